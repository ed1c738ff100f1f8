"""Batch script of a job, from a Jinja template. Templates contain shell; Python computes the values."""

from __future__ import annotations

import os
import shlex
from functools import partial
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hpctrain._version import __version__
from hpctrain.errors import SpecError
from hpctrain.jobs.submit.template_checks import check_blocks, check_rendered_script
from hpctrain.spec.directives import all_directives, directive_lines
from hpctrain.spec.job_spec import JobSpec
from hpctrain.spec.shell_setup import ShellSetup
from hpctrain.text import suggest

TEMPLATE_SUFFIX = ".sbatch.j2"
#: Exceptions that an invalid expression in a template may raise.
_EXPRESSION_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def shipped_templates() -> Path:
    """Return the folder of the templates shipped with hpctrain."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "slurm_templates"
    # A wheel contains the templates in the package, a checkout contains them next to the package.
    return inside if inside.is_dir() else package.parent / "slurm_templates"


def render(spec: JobSpec) -> str:
    """Return the batch script of the job.

    A template has access to `spec`, the list `directives` of `#SBATCH` lines, the `version` of hpctrain and
    the filter `quote`, and may extend a shipped template by its file name.

    Raises:
        SpecError: there is no such template, it cannot be rendered, or it omits a requested setting.
    """
    asked = spec.template or _default_template(spec)
    text = _render_template(spec, asked)
    _check_preparations(spec.shell, text, asked)
    if spec.template is not None:
        check_rendered_script(text, directive_lines(all_directives(spec)), asked)
    return text


def render_setup(spec: JobSpec) -> str:
    """Return the batch script of the job, which runs its arguments instead of the supervisor.

    Raises:
        SpecError: see `render`; or the template starts the supervisor outside the `launch` block.
    """
    asked = spec.template or _default_template(spec)
    text = _render_template(spec, asked, launch='exec "$@"')
    if "hpctrain.supervisor" in text:
        raise SpecError(
            f"The template {asked!r} (--template) starts the supervisor outside its block 'launch', so it "
            "cannot start a shell instead. Extend a built-in template."
        )
    return text


def _render_template(spec: JobSpec, asked: str, launch: str | None = None) -> str:
    """Return the script rendered from the template `asked`, a name or a path, without checking the result.

    `launch` replaces the block that starts the supervisor.
    """
    folder, file_name = _locate(asked)
    environment = _jinja_environment(folder)
    environment.globals["need"] = partial(_need, asked)
    try:
        if spec.template is not None:
            check_blocks(environment, file_name)
        template = environment.get_template(file_name)
        if launch is not None:
            template = environment.from_string(
                f"{{% extends parent %}}{{% block launch %}}{launch}{{% endblock %}}", {"parent": template}
            )
        return template.render(
            spec=spec,
            directives=directive_lines(all_directives(spec)),
            template=asked,
            version=__version__,
        )
    except jinja2.TemplateSyntaxError as error:
        words = str(error.message).rstrip(".")
        raise SpecError(
            f"Syntax error on line {error.lineno} of the template {error.filename}: {words}."
        ) from error
    except jinja2.exceptions.SecurityError as error:
        words = str(error).rstrip(".")
        raise SpecError(
            f"The template {asked!r} (--template) uses a blocked expression: {words}. Templates are rendered "
            "in a sandbox. Put Python code into the script, and add shell lines with --setup."
        ) from error
    except (jinja2.TemplateError, *_EXPRESSION_ERRORS) as error:
        words = str(error).rstrip(".")
        raise SpecError(f"Cannot render the template {asked!r} (--template): {words}.") from error


def _jinja_environment(folder: Path) -> jinja2.Environment:
    """Return a Jinja environment for shipped templates and those in `folder`.

    Neither kind can run Python or change the request: a template may come from a cloned repository.
    """
    environment = ImmutableSandboxedEnvironment(
        loader=jinja2.FileSystemLoader([folder, shipped_templates()]),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = _shell_quote
    return environment


def _default_template(spec: JobSpec) -> str:
    """Return the shipped template for a job without `--template`."""
    if spec.torchrun is not None:
        return "torchrun"
    return "ddp" if spec.gpus_per_node else "cpu"


def _shell_quote(value: object) -> str:
    """Return the value as one quoted shell word."""
    return shlex.quote(str(value))


def _need(template: str, value: object, option: str) -> None:
    """Raise an error if a required option is missing; called by templates."""
    if not value:
        raise SpecError(f"The template {template!r} (--template) requires {option}. Add this option.")


def _check_preparations(shell: ShellSetup, text: str, template: str) -> None:
    """Check that a custom template does not omit requested setup."""
    asked = {
        "--module": [_shell_quote(module) for module in shell.modules],
        "--conda": [_shell_quote(shell.conda)] if shell.conda else [],
        "--venv": [_shell_quote(f"{shell.venv}/bin/activate")] if shell.venv else [],
        "--setup": shell.setup,
    }
    for option, words in asked.items():
        if missing := [word for word in words if word not in text]:
            raise SpecError(
                f"The template {template!r} (--template) omits {missing[0]} ({option}). Call super() in the "
                "block that the template replaces, or remove the option."
            )


def _locate(asked: str) -> tuple[Path, str]:
    """Return folder and file name for the name or path of a template."""
    if os.sep in asked:
        path = Path(asked)
        if not path.is_file():
            raise SpecError(f"Template {asked!r} (--template) not found. Check its path.")
        return path.parent, path.name
    shipped = shipped_templates()
    names = sorted(path.name.removesuffix(TEMPLATE_SUFFIX) for path in shipped.glob(f"*{TEMPLATE_SUFFIX}"))
    if asked not in names:
        hint = suggest(asked, names)
        raise SpecError(f"Unknown template {asked!r} (--template). {hint} A path contains / or ends in .j2.")
    return shipped, asked + TEMPLATE_SUFFIX
