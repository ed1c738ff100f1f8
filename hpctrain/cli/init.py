"""Write a template of the options file (`hpctrain init`)."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.common import program_name
from hpctrain.errors import SpecError
from hpctrain.jobs.options.config_template import config_template
from hpctrain.jobs.options.resolved_options import PROJECT_FILE


@click.command("init")
@click.argument("file", default=PROJECT_FILE, type=click.Path(path_type=Path))
def command(file: Path) -> None:
    """Write FILE (default: hpctrain.yaml) with every option of submit, commented out.

    An existing file is never overwritten.
    """
    try:
        with open(file, "x", encoding="utf-8") as new:
            new.write(config_template())
    except FileExistsError:
        raise SpecError(
            f"{str(file)!r} already exists and was not changed. Choose another file name."
        ) from None
    except OSError as error:
        raise SpecError(f"Cannot write {str(file)!r}: {error.strerror}. Choose another file name.") from error
    click.echo(
        f"Wrote {file}. Edit this file, then run `{program_name()} submit --show-config SCRIPT` to see the "
        "effective values."
    )
