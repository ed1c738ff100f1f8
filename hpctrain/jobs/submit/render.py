"""Render the batch script of a job from a template in `slurm_templates/`, or from the user's template."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import jinja2
import jinja2.bccache
import jinja2.nodes
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hpctrain._version import __version__
from hpctrain.errors import SpecError
from hpctrain.jobs.options.find_replacement import find_replacement
from hpctrain.jobspec.job_directives import job_directives, program_words, srun_options
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.redaction import redact_args
from hpctrain.jobspec.shell_setup import ShellSetup
from hpctrain.slurm.batch_header import directive_lines, parse_batch_header
from hpctrain.text import suggest

TEMPLATE_SUFFIX = ".sbatch.j2"
#: Maximum length of the command in the comments of a script.
_MAX_CHARACTERS = 2_000
_NOT_PLAIN = re.compile(r"[^\w@%+=:,./-]", re.ASCII)
#: Exceptions that an invalid expression in a template may raise.
_EXPRESSION_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class _CompiledTemplates(jinja2.FileSystemBytecodeCache):
    """Templates that are compiled only once, like modules: compiling takes as long as importing Jinja."""

    def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        with suppress(OSError):
            if not sys.dont_write_bytecode:
                os.makedirs(self.directory, exist_ok=True)
                super().dump_bytecode(bucket)


def template_folder() -> Path:
    package = Path(__file__).resolve().parents[2]
    inside = package / "slurm_templates"
    return inside if inside.is_dir() else package.parent / "slurm_templates"


def built_in_templates() -> list[str]:
    """Return the names of the templates, without that of their common base."""
    names = {path.name.removesuffix(TEMPLATE_SUFFIX) for path in template_folder().glob("*.j2")}
    return sorted(names - {"base"})


def render(spec: JobSpec, origins: Mapping[str, str] | None = None) -> str:
    """Return the batch script of the job, with the origins of its directives in comments."""
    text = _render(spec, launch=None, origins=origins)
    if spec.template is not None and os.sep in spec.template:
        _check_preparations(spec.shell, text, spec.template)
        _check_script(text, directive_lines(job_directives(spec)), spec.template, supervised=spec.supervised)
    return text


def render_setup(spec: JobSpec) -> str:
    """Return the batch script of the job, which runs its arguments instead of the supervisor."""
    text = _render(spec, launch='exec "$@"')
    if "hpctrain.supervisor" in text:
        raise SpecError(
            f"The template {template_of(spec)!r} (--template) starts the supervisor outside its block "
            "'launch', so it cannot start a shell instead. Extend a built-in template."
        )
    return text


def template_of(spec: JobSpec) -> str:
    if spec.template is not None:
        return spec.template
    if spec.program == "batch":
        return "batch"
    if spec.torchrun is not None:
        return "torchrun"
    return "ddp" if spec.gpus_per_node else "cpu"


def _render(spec: JobSpec, *, launch: str | None, origins: Mapping[str, str] | None = None) -> str:
    """Return the script, without checking it; `launch` replaces the block that starts the supervisor."""
    name = template_of(spec)
    path = _find_template(name)
    environment = _jinja_environment(name, path.parent)
    try:
        template = environment.get_template(path.name)
        if launch is not None:
            template = environment.from_string(
                f"{{% extends parent %}}{{% block launch %}}{launch}{{% endblock %}}"
                "{% block teardown %}{% endblock %}",
                {"parent": template},
            )
        context = template.new_context(
            {
                "spec": spec,
                "directives": directive_lines(job_directives(spec), origins),
                "summary": describe_job(spec),
                "step": [shlex.quote(option) for option in srun_options(spec, spec.nodes)],
                "program": shlex.join(program_words(spec)),
                "template": name if os.sep in name else f"slurm_templates/{path.name}",
                "version": __version__,
            }
        )
        text = "".join(template.root_render_func(context))
        if os.sep in name and launch is None:
            _check_blocks(environment.parse(path.read_text(encoding="utf-8")), context, path.name)
        return text
    except SpecError:
        raise
    except jinja2.TemplateSyntaxError as error:
        reason = str(error.message).rstrip(".")
        raise SpecError(
            f"Syntax error on line {error.lineno} of the template {error.filename}: {reason}."
        ) from error
    except jinja2.exceptions.SecurityError as error:
        reason = str(error).rstrip(".")
        raise SpecError(
            f"The template {name!r} (--template) uses a blocked expression: {reason}. Templates are rendered "
            "in a sandbox. Put Python code into the script, and add shell lines with --setup."
        ) from error
    except (jinja2.TemplateError, *_EXPRESSION_ERRORS) as error:
        reason = str(error).rstrip(".")
        raise SpecError(f"Cannot render the template {name!r} (--template): {reason}.") from error


def _find_template(name: str) -> Path:
    if os.sep in name:
        path = Path(name)
        if not path.is_file():
            raise SpecError(
                f"Template {name!r} (--template) not found. Check its path, or choose from "
                f"{', '.join(built_in_templates())}."
            )
        return path
    path = template_folder() / f"{name}{TEMPLATE_SUFFIX}"
    if not os.path.isfile(path):
        raise SpecError(
            f"Unknown template {name!r} (--template). {suggest(name, built_in_templates())} "
            "A path contains / or ends in .j2."
        )
    return path


def _jinja_environment(name: str, folder: Path) -> jinja2.Environment:
    """Return a Jinja environment for the templates in `folder` and the built-in ones."""

    def require(option: str) -> None:
        raise SpecError(f"The template {name!r} (--template) requires {option}. Add this option.")

    environment = ImmutableSandboxedEnvironment(
        bytecode_cache=_CompiledTemplates(str(Path(__file__).parent / "__pycache__")),
        loader=jinja2.FileSystemLoader([folder, template_folder()]),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    environment.globals["require"] = require
    return environment


def _check_blocks(tree: jinja2.nodes.Template, context: jinja2.runtime.Context, file_name: str) -> None:
    """Refuse a block that replaces nothing, because the script would not contain it."""
    if tree.find(jinja2.nodes.Extends) is None:
        return
    blocks = {node.name: node.lineno for node in tree.body if isinstance(node, jinja2.nodes.Block)}
    for name, line in blocks.items():
        # The functions of a block: its own, and those that it replaces.
        if len(context.blocks[name]) == 1:
            names = sorted(context.blocks.keys() - blocks.keys())
            raise SpecError(
                f"Line {line} of the template {file_name!r} (--template): the template that it extends has "
                f"no block {name!r}. {suggest(name, names)}"
            )


def _check_preparations(shell: ShellSetup, text: str, template: str) -> None:
    requested = {
        "--module": [shlex.quote(module) for module in shell.modules],
        "--conda": [shlex.quote(shell.conda)] if shell.conda else [],
        "--venv": [shlex.quote(f"{shell.venv}/bin/activate")] if shell.venv else [],
        "--setup": shell.setup,
        "teardown": shell.teardown,
    }
    for option, lines in requested.items():
        if missing := [line for line in lines if line not in text]:
            raise SpecError(
                f"The template {template!r} (--template) omits {missing[0]} ({option}). Call super() in the "
                "block that the template replaces, or remove the option."
            )


def describe_job(spec: JobSpec) -> list[str]:
    """Return comments that say what the job runs, and explain directives that differ from the request."""
    if spec.supervised:
        start = f"To start an ended run again: hpctrain resume {shlex.quote(spec.run_dir)}"
        return [start, *_explain_step(spec), *_explain_directives(spec)]
    command = "sbatch" if spec.backend == "slurm" else "bash"
    return [
        f"To start an ended run again: {command} job.sbatch, in the run folder.",
        *_explain_directives(spec),
    ]


def _explain_step(spec: JobSpec) -> Iterator[str]:
    arguments = redact_args(program_words(spec))
    if spec.program == "batch":
        yield f"Each attempt runs a copy of: {' '.join(map(_quote, arguments))}"
        return
    if spec.torchrun is not None:
        program = ["--no-python", *arguments] if spec.program == "command" else arguments[1:]
        agents = [f"--nnodes={spec.nodes}", f"--nproc-per-node={spec.ntasks_per_node}"]
        arguments = ["torchrun", *agents, f"--rdzv-backend={spec.torchrun.rdzv_backend}", *program]
    if spec.backend == "local":
        yield f"Each attempt starts {spec.world_size} processes on this machine:"
    else:
        arguments = ["srun", *srun_options(spec, spec.nodes), *arguments]
        yield "Each attempt runs the equivalent of:"
    command = " ".join(map(_quote, arguments))
    if len(command) > _MAX_CHARACTERS:
        command = f"{command[:_MAX_CHARACTERS]} …"
    for line in textwrap.wrap(command, 105, break_long_words=False, break_on_hyphens=False):
        yield f"  {line}"
    if spec.torchrun is not None and spec.torchrun.rdzv_endpoint is not None:
        yield f"Rendezvous: {spec.torchrun.rdzv_backend} at {_quote(spec.torchrun.rdzv_endpoint)}"
    else:
        host = "rank 0" if spec.torchrun is None else "the supervisor"
        yield f"Rendezvous: a store of {host} on the first node (MASTER_ADDR, MASTER_PORT)"
    if spec.container is not None:
        yield f"Container of the ranks: {_quote(spec.container.image)} ({spec.container.runtime})"
    for name, source in spec.stage.items():
        yield f"Staged to the local disks: {_quote(source)} as $HPCTRAIN_STAGE/{name}"
    if spec.stage_environment:
        yield "Staged to the local disks: the Python environment and the code"


def _explain_directives(spec: JobSpec) -> Iterator[str]:
    if spec.backend == "local":
        return
    if not spec.supervised:
        yield "--requeue: Slurm requeues the job after a preemption or a node failure, and for nothing else"
    if spec.is_elastic:
        spares = f", and {spec.spare_nodes} spare" if spec.spare_nodes else ""
        yield f"--nodes: the run uses {spec.min_nodes} to {spec.nodes} nodes{spares}"
        yield "--cpus-per-task: the CPUs of all ranks of a node, because sbatch counts one task per node"
    elif spec.spare_nodes:
        yield f"--nodes: {spec.nodes} for the run, and {spec.spare_nodes} spare"
    if spec.resume_mode == "successor":
        yield "--requeue: for preemptions and the loss of the first node; otherwise, a new job continues"


def _quote(text: str) -> str:
    """Return a word on one line, quoted if it contains special characters."""
    return text if text and not _NOT_PLAIN.search(text) else json.dumps(text, ensure_ascii=False)


def _check_script(text: str, lines: Sequence[str], template: str, *, supervised: bool) -> None:
    if supervised and "hpctrain.supervisor" not in text:
        raise SpecError(
            f"The template {template!r} (--template) does not start the supervisor, so no rank would "
            "run. Extend a built-in template. If you replace its block 'launch', call super() in that block."
        )
    script_lines = text.split("\n")
    directives = parse_batch_header(
        text, f"the script from the template {template!r} (--template)"
    ).directives
    options = {name: value for name, value, number in directives if script_lines[number - 1] in lines}
    for name, value, number in directives:
        if (line := script_lines[number - 1]) in lines:
            continue
        if name in options and options[name] != value:
            raise SpecError(
                f"The template {template!r} (--template) contains {line.strip()!r}, but the job is "
                f"submitted with --{name}={options[name]}. Remove that line, and pass the option "
                "to hpctrain submit."
            )
        if name not in options and (hint := find_replacement(name)):
            raise SpecError(
                f"The template {template!r} (--template) contains {line.strip()!r}, but a template "
                f"cannot set --{name}. {hint}."
            )
