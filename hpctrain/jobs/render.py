"""The batch script of a job, out of a Jinja template. Templates hold shell, Python computes values."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from hpctrain.errors import SpecError
from hpctrain.jobs.directives import directive_lines, directives_of
from hpctrain.jobs.spec import JobSpec

SUFFIX = ".sbatch.j2"


def shipped_templates() -> Path:
    """The folder of the templates that come with hpctrain."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "slurm_templates"
    # A wheel carries the templates in the package; in a checkout they lie beside it.
    return inside if inside.is_dir() else package.parent / "slurm_templates"


def render(spec: JobSpec) -> str:
    """The batch script of the job.

    A template sees `spec`, the list `directives` of `#SBATCH` lines and the filter `quote`, and may
    extend a shipped one by its file name.

    Raises:
        SpecError: there is no such template, or it cannot be rendered.
    """
    import jinja2

    asked = spec.template or ("ddp" if spec.gpus_per_node else "cpu")
    folder, file_name = _locate(asked)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, shipped_templates()]),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    try:
        template = environment.get_template(file_name)
        return template.render(spec=spec, directives=directive_lines(directives_of(spec)), template=asked)
    except jinja2.TemplateSyntaxError as error:
        raise SpecError(
            f"Line {error.lineno} of the template {error.filename} is wrong: {error.message}."
        ) from error
    except (jinja2.TemplateError, UnicodeDecodeError) as error:
        raise SpecError(f"The template {asked!r} (--template) cannot be rendered: {error}.") from error


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
