"""Run a program as a rank, or show the rank of this process (`hpctrain exec`, `env`)."""

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

from hpctrain.cli.common import echo_json, json_option, program_name
from hpctrain.cluster import ENVIRONMENT_VARIABLE, Ranks, detect
from hpctrain.errors import EnvironmentMismatch, RendezvousError

#: Exit codes of a shell if a program is not found, and if it cannot be executed.
_NOT_FOUND, _NOT_RUNNABLE = 127, 126
#: Python ignores these signals; the executed program would inherit this.
_IGNORED_BY_PYTHON = ("SIGPIPE", "SIGXFZ", "SIGXFSZ")
#: Fields of `Ranks` in the order of the table.
_FIELDS = (
    *("rank", "local_rank", "node_rank", "num_nodes", "world_size", "local_world_size"),
    *("master_addr", "master_port"),
)
_TITLES = {"num_nodes": "nodes", "master_addr": "master address"}


@click.command("env")
@json_option
def env_command(as_json: bool) -> None:
    """Show the rank, world size, device and other settings of this process, each with its source.

    `hpctrain exec` runs a program with these settings.
    """
    from hpctrain.cluster.addresses import host_name
    from hpctrain.cluster.amd_gpus import list_amd_gpus
    from hpctrain.cluster.device_plan import plan_device
    from hpctrain.telemetry.sampling import nvml

    environ, refusal = os.environ, None
    ranks = detect(environ)
    default = (
        ENVIRONMENT_VARIABLE if environ.get(ENVIRONMENT_VARIABLE) else "detected from environment variables"
    )
    #: Values with their sources.
    facts: dict[str, tuple[int | str | None, str]] = {
        name: (getattr(ranks, name), ranks.sources.get(name, default)) for name in _FIELDS
    }
    try:
        plan = plan_device(ranks, environ, nvml.count_gpus(environ), is_rocm=bool(list_amd_gpus()))
        facts["device"] = (str(plan), plan.source)
    except EnvironmentMismatch as error:
        facts["device"], refusal = (None, "refused"), error
    facts["host"] = (
        host_name(environ),
        "SLURMD_NODENAME" if environ.get("SLURMD_NODENAME") else "the kernel",
    )
    facts["environment"] = (ranks.environment, ranks.sources.get("environment", default))
    if as_json:
        echo_json({name: {"value": value, "source": source} for name, (value, source) in facts.items()})
    else:
        width = max(len(str(value)) for value, _ in facts.values())
        for name, (value, source) in facts.items():
            title, shown = _TITLES.get(name, name.replace("_", " ")), "-" if value is None else value
            click.echo(f"{title:<17} {shown!s:<{width}}  {source}".rstrip())
    if refusal is not None:
        raise refusal


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
    from hpctrain.cluster.addresses import gloo_variables, own_address
    from hpctrain.cluster.master_address import master_host
    from hpctrain.slurm.environment import apply_env_defaults

    ranks = detect(os.environ)
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if ranks.environment == "local" and tasks != "1" and not os.environ.get(ENVIRONMENT_VARIABLE):
        click.echo(
            f"Note: this starts a single process, but the job has {tasks} tasks (SLURM_NTASKS). "
            f"Put srun before {program_name()} exec to start all tasks.",
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
    from hpctrain.cluster.ports import bind_socket

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
            hint = f" Did you mean `{program_name()} exec -- python {shlex.join(argv)}`?"
        click.echo(f"Error: cannot run {argv[0]!r}: {reason}.{hint}", err=True)
        sys.exit(_NOT_FOUND if is_missing else _NOT_RUNNABLE)


def terminal_options() -> list[str]:
    """Return the option of srun that connects a program to the user's terminal, if there is one."""
    return ["--pty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
