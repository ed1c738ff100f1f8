"""Batch script of a job from the user's own Jinja template."""

from __future__ import annotations

from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hpctrain._version import __version__
from hpctrain.errors import SpecError
from hpctrain.jobs.submit.batch_script import BUILT_IN_TEMPLATES, built_in_blocks, shell_quote
from hpctrain.jobs.submit.template_checks import check_blocks, check_rendered_script
from hpctrain.spec.directives import all_directives, directive_lines
from hpctrain.spec.job_spec import JobSpec
from hpctrain.spec.shell_setup import ShellSetup

TEMPLATE_SUFFIX = ".sbatch.j2"
#: Exceptions that an invalid expression in a template may raise.
_EXPRESSION_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def render_custom_template(spec: JobSpec, path: str, launch: str | None) -> str:
    """Return the batch script of the job.

    A template has access to `spec`, the list `directives` of `#SBATCH` lines, the `version` of hpctrain and
    the filter `quote`. It may extend a built-in template, such as `ddp.sbatch.j2`.

    Args:
        spec: the job.
        path: the template.
        launch: replaces the block that starts the supervisor.

    Raises:
        SpecError: the template does not exist, cannot be rendered, omits a requested setting, or starts the
            supervisor although `launch` replaces it.
    """
    file = Path(path)
    if not file.is_file():
        raise SpecError(f"Template {path!r} (--template) not found. Check its path.")
    lines = directive_lines(all_directives(spec))
    try:
        text = _render_template(spec, file, lines, launch)
    except jinja2.TemplateSyntaxError as error:
        words = str(error.message).rstrip(".")
        raise SpecError(
            f"Syntax error on line {error.lineno} of the template {error.filename}: {words}."
        ) from error
    except jinja2.exceptions.SecurityError as error:
        words = str(error).rstrip(".")
        raise SpecError(
            f"The template {path!r} (--template) uses a blocked expression: {words}. Templates are rendered "
            "in a sandbox. Put Python code into the script, and add shell lines with --setup."
        ) from error
    except (jinja2.TemplateError, *_EXPRESSION_ERRORS) as error:
        words = str(error).rstrip(".")
        raise SpecError(f"Cannot render the template {path!r} (--template): {words}.") from error
    if launch is None:
        _check_preparations(spec.shell, text, path)
        check_rendered_script(text, lines, path)
    elif "hpctrain.supervisor" in text:
        raise SpecError(
            f"The template {path!r} (--template) starts the supervisor outside its block 'launch', so it "
            "cannot start a shell instead. Extend a built-in template."
        )
    return text


def _render_template(spec: JobSpec, file: Path, lines: list[str], launch: str | None) -> str:
    """Return the script, without checking it."""
    environment = _jinja_environment(spec, file.parent)
    check_blocks(environment, file.name)
    template = environment.get_template(file.name)
    if launch is not None:
        template = environment.from_string(
            f"{{% extends parent %}}{{% block launch %}}{launch}{{% endblock %}}", {"parent": template}
        )
    return template.render(spec=spec, directives=lines, template=str(file), version=__version__)


def _jinja_environment(spec: JobSpec, folder: Path) -> jinja2.Environment:
    """Return a Jinja environment for the templates in `folder` and the built-in ones.

    Templates cannot run Python or change the request: they may come from a cloned repository.
    """

    def built_in_source(name: str) -> str | None:
        template = name.removesuffix(TEMPLATE_SUFFIX)
        if template == name or template not in BUILT_IN_TEMPLATES:
            return None
        # A text is a Jinja string, because it may contain Jinja's own syntax.
        return "".join(
            f"{{% block {block} %}}{{{{ {text!a} }}}}{{% endblock %}}" if block else f"{{{{ {text!a} }}}}"
            for block, text in built_in_blocks(spec, template)
        )

    environment = ImmutableSandboxedEnvironment(
        loader=jinja2.ChoiceLoader([jinja2.FileSystemLoader(folder), jinja2.FunctionLoader(built_in_source)]),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = shell_quote
    return environment


def _check_preparations(shell: ShellSetup, text: str, template: str) -> None:
    """Check that a template does not omit requested setup."""
    asked = {
        "--module": [shell_quote(module) for module in shell.modules],
        "--conda": [shell_quote(shell.conda)] if shell.conda else [],
        "--venv": [shell_quote(f"{shell.venv}/bin/activate")] if shell.venv else [],
        "--setup": shell.setup,
    }
    for option, words in asked.items():
        if missing := [word for word in words if word not in text]:
            raise SpecError(
                f"The template {template!r} (--template) omits {missing[0]} ({option}). Call super() in the "
                "block that the template replaces, or remove the option."
            )
