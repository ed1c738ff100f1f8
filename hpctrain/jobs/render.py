"""The batch script of a job, out of a Jinja template. Templates hold shell, Python computes values."""

from __future__ import annotations

import os
import shlex
import zlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import hpctrain
from hpctrain.errors import SpecError
from hpctrain.jobs.directives import directive_lines, directives_of
from hpctrain.jobs.shell import Shell
from hpctrain.jobs.spec import JobSpec
from hpctrain.jobs.template_checks import check_blocks, check_script

if TYPE_CHECKING:
    import jinja2

SUFFIX = ".sbatch.j2"


def shipped_templates() -> Path:
    """The folder of the templates that come with hpctrain."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "slurm_templates"
    # A wheel carries the templates in the package; in a checkout they lie beside it.
    return inside if inside.is_dir() else package.parent / "slurm_templates"


def render(spec: JobSpec) -> str:
    """The batch script of the job.

    A template sees `spec`, the list `directives` of `#SBATCH` lines, the `version` of hpctrain and the filter
    `quote`, and may extend a shipped one by its file name.

    Raises:
        SpecError: there is no such template, it cannot be rendered, or it leaves out what was asked for.
    """
    asked = spec.template or _fitting(spec)
    text = _written(spec, asked) or rendered_by_jinja(spec, asked)
    _check_preparations(spec.shell, text, asked)
    if spec.template is not None:
        check_script(text, directive_lines(directives_of(spec)), asked)
    return text


def _written(spec: JobSpec, asked: str) -> str:
    """The script by the Python that stands for a shipped template; empty where none does.

    Most jobs take such a template, and Jinja takes longer to import than the whole submission (ADR 6).
    """
    from hpctrain.jobs.shipped_scripts import SCRIPTS

    if asked not in SCRIPTS:
        return ""
    script, sums = SCRIPTS[asked]
    folder = shipped_templates()
    if any(zlib.crc32((folder / name).read_bytes()) != known for name, known in sums.items()):
        return ""  # Somebody has changed it where it is installed.
    return "".join(script(spec, directive_lines(directives_of(spec)), asked, hpctrain.__version__))


def rendered_by_jinja(spec: JobSpec, asked: str) -> str:
    """The script out of the template `asked`, a name or a path, whatever stands in it.

    Raises:
        SpecError: there is no such template, or it cannot be rendered.
    """
    import jinja2

    folder, file_name = _locate(asked)
    environment = environment_of(folder)
    environment.globals["need"] = partial(_need, asked)
    try:
        check_blocks(environment, file_name)
        return environment.get_template(file_name).render(
            spec=spec,
            directives=directive_lines(directives_of(spec)),
            template=asked,
            version=hpctrain.__version__,
        )
    except jinja2.TemplateSyntaxError as error:
        words = str(error.message).rstrip(".")
        raise SpecError(f"Line {error.lineno} of the template {error.filename} is wrong: {words}.") from error
    except (jinja2.TemplateError, UnicodeDecodeError) as error:
        words = str(error).rstrip(".")
        raise SpecError(f"The template {asked!r} (--template) cannot be rendered: {words}.") from error


def environment_of(folder: Path) -> jinja2.Environment:
    """Jinja, for templates that lie in a folder or are shipped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, shipped_templates()]),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = quote
    return environment


def _fitting(spec: JobSpec) -> str:
    """The shipped template for a job that names none."""
    if spec.torchrun is not None:
        return "torchrun"
    return "ddp" if spec.gpus_per_node else "cpu"


def quote(value: object) -> str:
    """One word of shell that stands for the value, whatever characters it has."""
    return shlex.quote(str(value))


def _need(template: str, value: object, option: str) -> None:
    """What a template calls that does not do without an option."""
    if not value:
        raise SpecError(f"The template {template!r} (--template) is meant for {option}. Give that, too.")


def _check_preparations(shell: Shell, text: str, template: str) -> None:
    """See to it that a template of the user's own has not left out what was asked for."""
    asked = {
        "--module": [quote(module) for module in shell.modules],
        "--conda": [quote(shell.conda)] if shell.conda else [],
        "--venv": [quote(f"{shell.venv}/bin/activate")] if shell.venv else [],
        "--setup": shell.setup,
    }
    for option, words in asked.items():
        if missing := [word for word in words if word not in text]:
            raise SpecError(
                f"The template {template!r} (--template) leaves out {missing[0]} ({option}). Have it call "
                "super() in the block that it replaces, or leave out the option."
            )


def _locate(asked: str) -> tuple[Path, str]:
    """Folder and file name of a template given by name or path."""
    if os.sep in asked:
        path = Path(asked)
        if not path.is_file():
            raise SpecError(f"There is no template {asked!r} (--template). Check its path.")
        return path.parent, path.name
    shipped = shipped_templates()
    names = sorted(path.name.removesuffix(SUFFIX) for path in shipped.glob(f"*{SUFFIX}"))
    if asked not in names:
        from difflib import get_close_matches

        close = get_close_matches(asked, names, 1)
        hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(names)}."
        raise SpecError(f"There is no template {asked!r} (--template). {hint} A path has a / or ends in .j2.")
    return shipped, asked + SUFFIX
