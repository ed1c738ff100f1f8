"""Run any program as a rank, with the variables that torch's `env://` reads (`hpctrain exec`)."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import click

from hpctrain.cli.common import program_name as called_as
from hpctrain.cluster import ENVIRONMENT_VARIABLE, Ranks, detect
from hpctrain.cluster.addresses import resolve_host
from hpctrain.cluster.env_defaults import apply_env_defaults
from hpctrain.cluster.rendezvous import RENDEZVOUS_TIMEOUT_S, rendezvous
from hpctrain.errors import RendezvousError

#: Exit codes of a shell if a program is not found, and if it cannot be executed.
_NOT_FOUND, _NOT_RUNNABLE = 127, 126

#: Upper limit of the timeout: sockets do not accept arbitrarily large ones.
_DAY_S = 86_400

#: Python ignores these signals; the executed program would inherit this.
_IGNORED_BY_PYTHON = ("SIGPIPE", "SIGXFZ", "SIGXFSZ")


@click.command("exec", context_settings={"allow_interspersed_args": False})
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True, max=_DAY_S),
    default=RENDEZVOUS_TIMEOUT_S,
    show_default=True,
    metavar="S",
    help="Maximum time to wait for all ranks to join, in seconds.",
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="PROGRAM [ARGS]...")
def command(program: tuple[str, ...], timeout: float) -> None:
    """Run PROGRAM as this rank, with the variables that torch's env:// reads.

    Start this command once per rank, with srun or another launcher:

        srun --nodes=2 --ntasks-per-node=4 hpctrain exec -- python train.py

    Sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, GROUP_RANK, MASTER_ADDR and MASTER_PORT,
    then replaces itself with PROGRAM, which receives signals directly and sets the exit code. If MASTER_ADDR
    and MASTER_PORT are not set, the ranks first agree on a free port.
    """
    ranks = detect(os.environ)
    if note := _forgotten_srun(ranks, os.environ):
        click.echo(note, err=True)
    try:
        rendezvous_info = rendezvous(ranks, os.environ, timeout_s=timeout)
    except RendezvousError as error:
        raise RendezvousError(
            f"{str(error).rstrip('.')}. If ranks start late, increase --timeout (currently {timeout:g} s)."
        ) from None
    if ranks.is_main and (note := _unknown_master(rendezvous_info.address, os.environ)):
        click.echo(note, err=True)
    environ = {
        **apply_env_defaults(os.environ, rendezvous_info.gloo_variables(os.environ)),
        **ranks.torch_variables(),
        "MASTER_ADDR": rendezvous_info.address,
        "MASTER_PORT": str(rendezvous_info.port),
    }
    if rendezvous_info.reserved_port:
        rendezvous_info.reserved_port.reserve()
    become(program, environ)


def become(words: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process with a program."""
    sys.stdout.flush()
    sys.stderr.flush()
    for name in _IGNORED_BY_PYTHON:
        if number := getattr(signal, name, None):
            signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(words[0], list(words), environ)
    except OSError as error:
        missing = error.errno == errno.ENOENT
        where = "not found on PATH" if missing and os.sep not in words[0] else error.strerror
        click.echo(f"Error: cannot run {words[0]!r}: {where}.{_hint(words)}", err=True)
        sys.exit(_NOT_FOUND if missing else _NOT_RUNNABLE)


def _hint(words: Sequence[str]) -> str:
    script = Path(words[0])
    if script.suffix != ".py" or not script.is_file():
        return ""
    return f" Did you mean `{called_as()} exec -- python {shlex.join(words)}`?"


def _forgotten_srun(ranks: Ranks, environ: Mapping[str, str]) -> str | None:
    """Return a warning if a multi-task job runs only this process, without srun."""
    tasks = environ.get("SLURM_NTASKS", "1")
    if ranks.environment != "local" or tasks == "1" or environ.get(ENVIRONMENT_VARIABLE):
        return None
    return (
        f"Note: this starts a single process, but the job has {tasks} tasks (SLURM_NTASKS). "
        f"Put srun before {called_as()} exec to start all tasks."
    )


def _unknown_master(address: str, environ: Mapping[str, str]) -> str | None:
    """Return a warning if MASTER_ADDR does not resolve, although rank 0 was found elsewhere."""
    given = environ.get("MASTER_ADDR")
    if not given or given == address:
        return None
    try:
        resolve_host(given)
    except OSError as error:
        return f"Note: MASTER_ADDR={given} does not resolve ({error}); rank 0 was found at {address}."
    return None
