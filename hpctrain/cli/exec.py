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
from hpctrain.cluster.addresses import gloo_variables, master_host, own_address
from hpctrain.cluster.ports import bind_socket
from hpctrain.errors import RendezvousError
from hpctrain.slurm.environment import apply_env_defaults

#: Exit codes of a shell if a program is not found, and if it cannot be executed.
_NOT_FOUND, _NOT_RUNNABLE = 127, 126

#: Python ignores these signals; the executed program would inherit this.
_IGNORED_BY_PYTHON = ("SIGPIPE", "SIGXFZ", "SIGXFSZ")


@click.command("exec", context_settings={"allow_interspersed_args": False})
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="PROGRAM [ARGS]...")
def command(program: tuple[str, ...]) -> None:
    """Run PROGRAM as this rank, with the variables that torch's env:// reads.

    Start this command once per rank, with srun or another launcher:

        srun --nodes=2 --ntasks-per-node=4 hpctrain exec -- python train.py

    Sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, GROUP_RANK, MASTER_ADDR and MASTER_PORT,
    then replaces itself with PROGRAM, which receives signals directly and sets the exit code. If MASTER_PORT
    is not set, the port is computed from the ids of the job.
    """
    ranks = detect(os.environ)
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if ranks.environment == "local" and tasks != "1" and not os.environ.get(ENVIRONMENT_VARIABLE):
        click.echo(
            f"Note: this starts a single process, but the job has {tasks} tasks (SLURM_NTASKS). "
            f"Put srun before {called_as()} exec to start all tasks.",
            err=True,
        )
    variables = ranks.torch_variables() | {"MASTER_ADDR": master_host(ranks, os.environ)}
    if ranks.is_main and not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        variables["MASTER_PORT"] = str(_reserve_port(ranks))
    address = own_address(ranks, os.environ)
    defaults = gloo_variables(address, os.environ) if address else {}
    become(program, {**apply_env_defaults(os.environ, defaults), **variables})


def _reserve_port(ranks: Ranks) -> int:
    """Return rank 0's port, which stays reserved until the program listens on it with SO_REUSEADDR."""
    try:
        reserved = bind_socket(ranks.master_port)
    except OSError as error:
        raise RendezvousError(
            f"rank 0 cannot listen on port {ranks.master_port} ({error.strerror}). To find the program that "
            "uses the port, run `ss --tcp --all --processes`. Alternatively, set MASTER_PORT to a free port "
            "on every rank."
        ) from error
    port: int = reserved.getsockname()[1]
    os.set_inheritable(reserved.detach(), True)
    return port


def become(argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    for name in _IGNORED_BY_PYTHON:
        if number := getattr(signal, name, None):
            signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], list(argv), environ)
    except OSError as error:
        is_missing, hint = error.errno == errno.ENOENT, ""
        reason = "not found on PATH" if is_missing and os.sep not in argv[0] else error.strerror
        if argv[0].endswith(".py") and Path(argv[0]).is_file():
            hint = f" Did you mean `{called_as()} exec -- python {shlex.join(argv)}`?"
        click.echo(f"Error: cannot run {argv[0]!r}: {reason}.{hint}", err=True)
        sys.exit(_NOT_FOUND if is_missing else _NOT_RUNNABLE)
