"""The shipped templates as Python. Written by scripts/compile_templates.py: change the templates instead."""

# ruff: noqa: E501, UP018, UP034
# fmt: off

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from hpctrain.jobs.submit.render import shell_quote

if TYPE_CHECKING:
    from hpctrain.spec.job_spec import JobSpec

    Script = Callable[[JobSpec, Sequence[str], str, str], Iterator[str]]


def _base(spec: JobSpec, directives: Sequence[str], template: str, version: str) -> Iterator[str]:
    yield "#!/bin/bash\n"
    yield "# Written by `hpctrain submit` "
    yield str(version)
    yield " from the template "
    yield str(shell_quote(template))
    yield "; resubmitting the run overwrites it.\n"
    yield "# By hand:  "
    yield str(("sbatch" if spec.backend == "slurm" else "bash"))
    yield " job.sbatch   (script and arguments: spec.yaml)\n"
    for line in directives:
        yield str(line)
        yield "\n"
    yield "\n"
    yield "set -eo pipefail\n"
    yield "\n"
    if spec.shell.modules:
        yield "# `module` is a shell function that is not defined in every job's shell.\n"
        yield "for init in /etc/profile.d/{modules,lmod,z00_lmod}.sh \"${LMOD_PKG:-/usr/share/lmod/lmod}/init/bash\" /usr/share/Modules/init/bash; do\n"
        yield "    type module >/dev/null 2>&1 || { [ ! -r \"$init\" ] || source \"$init\"; } || true\n"
        yield "done\n"
        for module in spec.shell.modules:
            yield "module load "
            yield str(shell_quote(module))
            yield "\n"
    if spec.shell.conda:
        yield "eval \"$(\"${CONDA_EXE:-conda}\" shell.bash hook)\"\n"
        yield "conda activate "
        yield str(shell_quote(spec.shell.conda))
        yield "\n"
    elif spec.shell.venv:
        yield "source "
        yield str(shell_quote(str(spec.shell.venv) + str("/bin/activate")))
        yield "\n"
    for line in spec.shell.setup:
        yield str(line)
        yield "\n"
    if spec.container:
        yield "# The ranks run in a container ("
        yield str(spec.container.runtime)
        yield "); this script and the supervisor do not.\n"
    yield "\n"
    if spec.torchrun:
        yield "# The supervisor starts one torchrun agent per node, and decides what to do when one exits.\n"
    else:
        yield "# The supervisor starts one process per rank, and decides what to do when one exits.\n"
    yield "exec "
    yield str(shell_quote(spec.python))
    yield " -m hpctrain.supervisor "
    yield str(shell_quote(spec.run_dir))
    yield "\n"


def _cpu(spec: JobSpec, directives: Sequence[str], template: str, version: str) -> Iterator[str]:
    yield "#!/bin/bash\n"
    yield "# Written by `hpctrain submit` "
    yield str(version)
    yield " from the template "
    yield str(shell_quote(template))
    yield "; resubmitting the run overwrites it.\n"
    yield "# By hand:  "
    yield str(("sbatch" if spec.backend == "slurm" else "bash"))
    yield " job.sbatch   (script and arguments: spec.yaml)\n"
    for line in directives:
        yield str(line)
        yield "\n"
    yield "\n"
    yield "set -eo pipefail\n"
    yield "\n"
    if spec.shell.modules:
        yield "# `module` is a shell function that is not defined in every job's shell.\n"
        yield "for init in /etc/profile.d/{modules,lmod,z00_lmod}.sh \"${LMOD_PKG:-/usr/share/lmod/lmod}/init/bash\" /usr/share/Modules/init/bash; do\n"
        yield "    type module >/dev/null 2>&1 || { [ ! -r \"$init\" ] || source \"$init\"; } || true\n"
        yield "done\n"
        for module in spec.shell.modules:
            yield "module load "
            yield str(shell_quote(module))
            yield "\n"
    if spec.shell.conda:
        yield "eval \"$(\"${CONDA_EXE:-conda}\" shell.bash hook)\"\n"
        yield "conda activate "
        yield str(shell_quote(spec.shell.conda))
        yield "\n"
    elif spec.shell.venv:
        yield "source "
        yield str(shell_quote(str(spec.shell.venv) + str("/bin/activate")))
        yield "\n"
    yield "# No GPU was requested: hide all GPUs, in case the node does not restrict access to them.\n"
    yield "export CUDA_VISIBLE_DEVICES=\"\"\n"
    for line in spec.shell.setup:
        yield str(line)
        yield "\n"
    if spec.container:
        yield "# The ranks run in a container ("
        yield str(spec.container.runtime)
        yield "); this script and the supervisor do not.\n"
    yield "\n"
    if spec.torchrun:
        yield "# The supervisor starts one torchrun agent per node, and decides what to do when one exits.\n"
    else:
        yield "# The supervisor starts one process per rank, and decides what to do when one exits.\n"
    yield "exec "
    yield str(shell_quote(spec.python))
    yield " -m hpctrain.supervisor "
    yield str(shell_quote(spec.run_dir))
    yield "\n"


def _ddp(spec: JobSpec, directives: Sequence[str], template: str, version: str) -> Iterator[str]:
    yield "#!/bin/bash\n"
    yield "# Written by `hpctrain submit` "
    yield str(version)
    yield " from the template "
    yield str(shell_quote(template))
    yield "; resubmitting the run overwrites it.\n"
    yield "# By hand:  "
    yield str(("sbatch" if spec.backend == "slurm" else "bash"))
    yield " job.sbatch   (script and arguments: spec.yaml)\n"
    for line in directives:
        yield str(line)
        yield "\n"
    yield "\n"
    yield "set -eo pipefail\n"
    yield "\n"
    if spec.shell.modules:
        yield "# `module` is a shell function that is not defined in every job's shell.\n"
        yield "for init in /etc/profile.d/{modules,lmod,z00_lmod}.sh \"${LMOD_PKG:-/usr/share/lmod/lmod}/init/bash\" /usr/share/Modules/init/bash; do\n"
        yield "    type module >/dev/null 2>&1 || { [ ! -r \"$init\" ] || source \"$init\"; } || true\n"
        yield "done\n"
        for module in spec.shell.modules:
            yield "module load "
            yield str(shell_quote(module))
            yield "\n"
    if spec.shell.conda:
        yield "eval \"$(\"${CONDA_EXE:-conda}\" shell.bash hook)\"\n"
        yield "conda activate "
        yield str(shell_quote(spec.shell.conda))
        yield "\n"
    elif spec.shell.venv:
        yield "source "
        yield str(shell_quote(str(spec.shell.venv) + str("/bin/activate")))
        yield "\n"
    yield "# NCCL prints warnings and errors only.\n"
    yield "export NCCL_DEBUG=\"${NCCL_DEBUG:-WARN}\"\n"
    for line in spec.shell.setup:
        yield str(line)
        yield "\n"
    if spec.container:
        yield "# The ranks run in a container ("
        yield str(spec.container.runtime)
        yield "); this script and the supervisor do not.\n"
    yield "\n"
    if spec.torchrun:
        yield "# The supervisor starts one torchrun agent per node, and decides what to do when one exits.\n"
    else:
        yield "# The supervisor starts one process per rank, and decides what to do when one exits.\n"
    yield "exec "
    yield str(shell_quote(spec.python))
    yield " -m hpctrain.supervisor "
    yield str(shell_quote(spec.run_dir))
    yield "\n"


#: By name: what yields the script, and CRC-32 of the files that it was made from.
SCRIPTS: dict[str, tuple[Script, dict[str, int]]] = {
    "base": (_base, {"base.sbatch.j2": 727335449}),
    "cpu": (_cpu, {"cpu.sbatch.j2": 417268283, "base.sbatch.j2": 727335449}),
    "ddp": (_ddp, {"ddp.sbatch.j2": 1772247677, "base.sbatch.j2": 727335449}),
}
