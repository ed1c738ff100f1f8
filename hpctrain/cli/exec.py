"""`hpctrain exec`: any program as a rank, with the variables that torch's `env://` reads."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import click

from hpctrain.cli.common import program as called_as
from hpctrain.cluster import ENVIRONMENT_VARIABLE, Ranks, detect
from hpctrain.cluster.addresses import resolve
from hpctrain.cluster.defaults import with_defaults
from hpctrain.cluster.meeting import MEETING_TIMEOUT_S, meet
from hpctrain.errors import MeetingFailed

#: What a shell ends with where it does not find a program, and where it cannot run it.
_NOT_FOUND, _NOT_RUNNABLE = 127, 126

#: Sockets take no more than some years, and nobody waits so long.
_DAY_S = 86_400

#: Python ignores them; a program that it becomes would, too.
_IGNORED_BY_PYTHON = ("SIGPIPE", "SIGXFZ", "SIGXFSZ")


@click.command("exec", context_settings={"allow_interspersed_args": False})
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True, max=_DAY_S),
    default=MEETING_TIMEOUT_S,
    show_default=True,
    metavar="S",
    help="Seconds that the ranks have to find each other.",
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="PROGRAM [ARGS]...")
def command(program: tuple[str, ...], timeout: float) -> None:
    """Run PROGRAM as this rank, with the variables that torch's env:// reads.

    To be started once for each rank, by srun or whatever starts processes here:

        srun --nodes=2 --ntasks-per-node=4 hpctrain exec -- python train.py

    Sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, GROUP_RANK, MASTER_ADDR and MASTER_PORT,
    and becomes PROGRAM: signals and exit code are its own. Where nobody has chosen MASTER_ADDR and
    MASTER_PORT, the ranks first agree on a free port.
    """
    ranks = detect(os.environ)
    if note := _forgotten_srun(ranks, os.environ):
        click.echo(note, err=True)
    try:
        meeting = meet(ranks, os.environ, timeout_s=timeout)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except MeetingFailed as error:
        raise MeetingFailed(
            f"{str(error).rstrip('.')}. Where ranks only come late, give them more than {timeout:g} s "
            "(--timeout)."
        ) from None
    if ranks.is_main and (note := _unknown_master(meeting.address, os.environ)):
        click.echo(note, err=True)
    environ = {
        **with_defaults(os.environ, meeting.gloo_variables(os.environ)),
        **ranks.torch_variables(),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
    }
    if meeting.held:
        meeting.held.reserve()
    _become(program, environ)


def _become(words: tuple[str, ...], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by a program."""
    sys.stdout.flush()
    sys.stderr.flush()
    for name in _IGNORED_BY_PYTHON:
        if number := getattr(signal, name, None):
            signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(words[0], words, environ)
    except OSError as error:
        missing = error.errno == errno.ENOENT
        where = "it is not on the PATH" if missing and os.sep not in words[0] else error.strerror
        click.echo(f"Error: {words[0]!r} cannot be run: {where}.{_hint(words)}", err=True)
        sys.exit(_NOT_FOUND if missing else _NOT_RUNNABLE)


def _hint(words: tuple[str, ...]) -> str:
    script = Path(words[0])
    if script.suffix != ".py" or not script.is_file():
        return ""
    return f" Did you mean: {called_as()} exec -- python {shlex.join(words)}"


def _forgotten_srun(ranks: Ranks, environ: Mapping[str, str]) -> str | None:
    """What to tell somebody who is about to run one process of many."""
    tasks = environ.get("SLURM_NTASKS", "1")
    if ranks.environment != "local" or tasks == "1" or environ.get(ENVIRONMENT_VARIABLE):
        return None
    return (
        f"Note: this is one process of its own, though the job has {tasks} tasks (SLURM_NTASKS). "
        f"Put srun before {called_as()} exec to start them all."
    )


def _unknown_master(address: str, environ: Mapping[str, str]) -> str | None:
    """What to tell somebody whose MASTER_ADDR is no name of any host, while rank 0 was found elsewhere."""
    given = environ.get("MASTER_ADDR")
    if not given or given == address:
        return None
    try:
        resolve(given)
    except OSError as error:
        return f"Note: MASTER_ADDR={given} does not resolve ({error}); rank 0 was found at {address}."
    return None
