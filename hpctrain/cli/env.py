"""Show the rank settings of this process and their source variables (`hpctrain env`)."""

from __future__ import annotations

import os

import click

from hpctrain.cli.common import echo_json, json_option
from hpctrain.cluster import ENVIRONMENT_VARIABLE, detect
from hpctrain.cluster.addresses import host_name
from hpctrain.cluster.amd_gpus import list_amd_gpus
from hpctrain.cluster.device_plan import plan_device
from hpctrain.errors import EnvironmentMismatch

#: Fields of `Ranks` in the order of the table.
_FIELDS = (
    *("rank", "local_rank", "node_rank", "num_nodes", "world_size", "local_world_size"),
    *("master_addr", "master_port"),
)
_TITLES = {"num_nodes": "nodes", "master_addr": "master address"}


@click.command("env")
@json_option
def command(as_json: bool) -> None:
    """Show the rank, world size, device and other settings of this process, each with its source.

    `hpctrain exec` runs a program with these settings.
    """
    from hpctrain.telemetry.sampling.nvml import count_gpus

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
        plan = plan_device(ranks, environ, count_gpus(environ), is_rocm=bool(list_amd_gpus()))
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
            title = _TITLES.get(name, name.replace("_", " "))
            shown = "-" if value is None else value
            click.echo(f"{title:<17} {shown!s:<{width}}  {source}".rstrip())
    if refusal is not None:
        raise refusal
