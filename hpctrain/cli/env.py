"""Show the rank settings of this process and their source variables (`hpctrain env`)."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

import click

from hpctrain.cli.common import echo_json, json_option
from hpctrain.cluster import ENVIRONMENT_VARIABLE, Ranks, detect
from hpctrain.cluster.amd_gpus import list_amd_gpus
from hpctrain.cluster.device_plan import plan_device
from hpctrain.cluster.host_name import host_name
from hpctrain.errors import EnvironmentMismatch, HpctrainError

#: A value and its source.
_Fact = tuple[int | str | None, str]

#: Fields of `Ranks` in the order of the table.
_FIELDS = (
    "rank",
    "local_rank",
    "node_rank",
    "num_nodes",
    "world_size",
    "local_world_size",
    "master_addr",
    "master_port",
)
_TITLES = {"num_nodes": "nodes", "master_addr": "master address"}


@click.command("env")
@json_option
@click.option(
    "--shell",
    "as_shell",
    is_flag=True,
    help="Print export commands for the variables that torch's env:// reads.",
)
def command(as_json: bool, as_shell: bool) -> None:
    """Show the rank, world size, device and other settings of this process, each with its source.

    To set the variables for a program in a job script:

        srun sh -c 'eval "$(hpctrain env --shell)"; exec ./program'

    `hpctrain exec` does the same and also finds a free port.
    """
    if as_json and as_shell:
        raise click.UsageError(
            "--json prints a JSON document and --shell prints shell commands. Use only one of these options."
        )
    environ = os.environ
    try:
        ranks = detect(environ)
    except HpctrainError:
        if as_shell:
            # eval returns the exit code of the evaluated text, not that of this command.
            click.echo("false")
        raise
    if as_shell:
        for variable, text in ranks.torch_variables().items():
            click.echo(f"export {variable}={shlex.quote(text)}")
        return
    device, refusal = _device(ranks, environ)
    facts = _facts(ranks, environ, device)
    if as_json:
        echo_json({name: {"value": value, "source": source} for name, (value, source) in facts.items()})
    else:
        width = max(len(str(value)) for value, _ in facts.values())
        for name, (value, source) in facts.items():
            title = _TITLES.get(name, name.replace("_", " "))
            shown = "-" if value is None else value
            click.echo(f"{title:<17} {shown!s:<{width}}  {source}".rstrip())
    if refusal is not None:
        raise refusal


def _device(ranks: Ranks, environ: Mapping[str, str]) -> tuple[_Fact, EnvironmentMismatch | None]:
    """Return the device and its source, or the error if this rank has no device."""
    from hpctrain.telemetry.sampling.nvml import count_gpus

    try:
        plan = plan_device(ranks, environ, count_gpus(environ), is_rocm=bool(list_amd_gpus()))
    except EnvironmentMismatch as refusal:
        return (None, "refused"), refusal
    return (str(plan), plan.source), None


def _facts(ranks: Ranks, environ: Mapping[str, str], device: _Fact) -> dict[str, _Fact]:
    """Return value and source of each line of the table."""
    found_by = (
        ENVIRONMENT_VARIABLE if environ.get(ENVIRONMENT_VARIABLE) else "detected from environment variables"
    )
    return {
        **{name: (getattr(ranks, name), ranks.sources.get(name, found_by)) for name in _FIELDS},
        "device": device,
        "host": (host_name(environ), "SLURMD_NODENAME" if environ.get("SLURMD_NODENAME") else "the kernel"),
        "environment": (ranks.environment, ranks.sources.get("environment", found_by)),
    }
