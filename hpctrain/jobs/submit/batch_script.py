"""Blocks of the built-in batch scripts, which a custom template can replace."""

from __future__ import annotations

import shlex

from hpctrain._version import __version__
from hpctrain.errors import SpecError
from hpctrain.spec.directives import all_directives, directive_lines
from hpctrain.spec.job_spec import JobSpec
from hpctrain.text import suggest

#: Custom templates can extend each of them. `base` contains the blocks that all have in common.
BUILT_IN_TEMPLATES = ("base", "cpu", "ddp", "ddp2", "torchrun")

_LOAD_MODULES = """\
# `module` is a shell function that is not defined in the shell of every job.
for init in /etc/profile.d/{modules,lmod,z00_lmod}.sh "${LMOD_PKG:-/usr/share/lmod/lmod}/init/bash" \
/usr/share/Modules/init/bash; do
    type module >/dev/null 2>&1 || { [ ! -r "$init" ] || source "$init"; } || true
done"""


def template_of(spec: JobSpec) -> str:
    """Return the name or path of the job's template."""
    if spec.template is not None:
        return spec.template
    if spec.torchrun is not None:
        return "torchrun"
    return "ddp" if spec.gpus_per_node else "cpu"


def built_in_blocks(spec: JobSpec, template: str) -> list[tuple[str, str]]:
    """Return names and texts of the blocks of a built-in template; a block without a name cannot be replaced.

    Raises:
        SpecError: there is no such template, or it requires another option.
    """
    if template not in BUILT_IN_TEMPLATES:
        hint = suggest(template, BUILT_IN_TEMPLATES)
        raise SpecError(
            f"Unknown template {template!r} (--template). {hint} A path contains / or ends in .j2."
        )
    if template == "torchrun" and spec.torchrun is None:
        raise SpecError(
            f"The template {template_of(spec)!r} (--template) requires --launcher torchrun. Add this option."
        )
    agent = "one torchrun agent per node" if spec.torchrun else "one process per rank"
    launch = [
        f"# The supervisor starts {agent}, and decides what to do when one exits.",
        f"exec {shell_quote(spec.python)} -m hpctrain.supervisor {shell_quote(spec.run_dir)}",
    ]
    blocks = [
        ("", _header(spec)),
        ("directives", []),
        ("", ["", "set -eo pipefail", ""]),
        ("modules", _modules(spec)),
        ("environment", _environment(spec)),
        ("setup", _setup(spec, template)),
        ("container", _container(spec)),
        ("", [""]),
        ("launch", launch),
    ]
    return [(name, "".join(f"{line}\n" for line in lines)) for name, lines in blocks]


def shell_quote(value: object) -> str:
    """Return the value as one quoted shell word."""
    return shlex.quote(str(value))


def _header(spec: JobSpec) -> list[str]:
    command = "sbatch" if spec.backend == "slurm" else "bash"
    origin = f"`hpctrain submit` {__version__} from the template {shell_quote(template_of(spec))}"
    return [
        "#!/bin/bash",
        f"# Written by {origin}; resubmitting the run overwrites this file.",
        f"# To submit manually:  {command} job.sbatch   (script and arguments: spec.yaml)",
        *directive_lines(all_directives(spec)),
    ]


def _modules(spec: JobSpec) -> list[str]:
    modules = [f"module load {shell_quote(module)}" for module in spec.shell.modules]
    return [_LOAD_MODULES, *modules] if modules else []


def _environment(spec: JobSpec) -> list[str]:
    if spec.shell.conda:
        hook = 'eval "$("${CONDA_EXE:-conda}" shell.bash hook)"'
        return [hook, f"conda activate {shell_quote(spec.shell.conda)}"]
    return [f"source {shell_quote(f'{spec.shell.venv}/bin/activate')}"] if spec.shell.venv else []


def _setup(spec: JobSpec, template: str) -> list[str]:
    """Return shell that runs once, before the supervisor: variables, limits."""
    lines = []
    if template == "ddp2":
        lines += [
            "# Default strategy of the Trainer: the ranks of a node share one batch.",
            "export HPCTRAIN_STRATEGY=ddp2",
        ]
    if template == "ddp" or (template in ("ddp2", "torchrun") and spec.gpus_per_node):
        lines += [
            "# NCCL prints warnings and errors only.",
            'export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"',
        ]
    elif template != "base":
        lines += [
            "# No GPU was requested: hide all GPUs, in case the node does not restrict access to them.",
            'export CUDA_VISIBLE_DEVICES=""',
        ]
    return [*lines, *spec.shell.setup]


def _container(spec: JobSpec) -> list[str]:
    if spec.container is None:
        return []
    return [
        f"# The ranks run in a container ({spec.container.runtime}); this script and the supervisor do not."
    ]
