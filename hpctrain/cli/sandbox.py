"""Run a real Slurm cluster on this machine (`hpctrain sandbox`)."""

from __future__ import annotations

import shlex
import time
from typing import Any

import click

from hpctrain import sandbox
from hpctrain.cli.common import echo_json, json_option
from hpctrain.errors import UserError

_name_option = click.option("--name", default="default", help="Name of the sandbox.")


@click.group(name="sandbox")
def command() -> None:
    """Run a real Slurm cluster on this machine, to learn Slurm or test scripts.

    Requires Linux, root and the packages slurm-wlm and munge. The nodes are daemons on this machine, and the
    GPUs are simulated by device files. The scheduler, queue, preemption and job steps are Slurm's own.
    """


@command.command()
@click.option("--nodes", default=4, help="Number of nodes.")
@click.option("--gpus-per-node", default=2, help="Simulated GPUs per node.")
@click.option("--cpus-per-node", default=8, help="CPUs per node, as configured in Slurm.")
@click.option(
    "--preempt-grace",
    "preempt_grace_s",
    default=30,
    help="Seconds from SIGTERM to SIGKILL when a job is preempted.",
)
@click.option(
    "--gpu-type", default="", show_default=False, metavar="TYPE", help="GPU type in Slurm, such as a100."
)
@click.option(
    "--conf",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Setting for slurm.conf, such as JobRequeue=0. Overrides the default. Repeatable.",
)
@_name_option
@json_option
def up(name: str, as_json: bool, **size: Any) -> None:
    """Start a sandbox and wait until its nodes accept jobs."""
    start, earlier = time.monotonic(), sandbox.find(name)
    dead = [label for label, pid in earlier.daemons().items() if pid is None] if earlier else []
    box = sandbox.up(name, **size)
    if as_json:
        echo_json({**_facts(box), "was_up": earlier is not None and not dead, "restarted": dead})
        return
    readiness = "is already up" if earlier and not dead else f"is up after {time.monotonic() - start:.1f} s"
    restarted = f" (restarted: {', '.join(dead)})" if dead else ""
    selection = "" if name == "default" else f" --name {name}"
    gpus = f" --gpus-per-node={box.shape.gpus_per_node}" if box.shape.gpus_per_node else ""
    click.echo(
        f"""\
Sandbox {name} {readiness}{restarted}: {box.shape}.
  nodes        {", ".join(box.nodes)}
  partitions   preemptible (default), urgent (its jobs preempt those in preemptible)
  files, logs  {box.folder}

To use the sandbox, run `eval "$(hpctrain sandbox env{selection})"`, or:
{_exports(box)}

Try this:
  sinfo
  srun --nodes={len(box.nodes)}{gpus} sh -c 'echo $SLURMD_NODENAME has GPUs $CUDA_VISIBLE_DEVICES'
  hpctrain sandbox down{selection}"""
    )


@command.command()
@_name_option
@json_option
def status(name: str, as_json: bool) -> None:
    """Show the daemons, nodes and partitions of a sandbox. Exits with 2 if it does not exist."""
    if sandbox.find(name) is None and as_json:
        echo_json({"name": name, "up": False, "sandboxes": sandbox.list_names()})
    box = _find(name)
    facts = _facts(box)
    if as_json:
        echo_json(facts)
        return
    daemons = {
        label: "not running" if pid is None else f"pid {pid}" for label, pid in facts["daemons"].items()
    }
    click.echo(f"Sandbox {name}: {box.shape}, files and logs in {facts['folder']}")
    for title, rows in (("Daemons", daemons), ("Nodes", facts["nodes"])):
        click.echo(f"\n{title}")
        for label, state in rows.items():
            click.echo(f"  {label:24} {state}")
    click.echo("\nPartitions\n  preemptible (default)\n  urgent")
    if names := [label for label in facts["sandboxes"] if label != name]:
        click.echo(f"\nOther sandboxes on this machine: {', '.join(names)}")


@command.command()
@_name_option
def env(name: str) -> None:
    """Print export commands that select a sandbox in a shell.

    Usage: eval "$(hpctrain sandbox env)"
    """
    click.echo(_exports(_find(name)))


@command.command()
@_name_option
@json_option
def down(name: str, as_json: bool) -> None:
    """Cancel the jobs of a sandbox, stop its daemons and delete its files.

    Exits with 2 if the sandbox does not exist.
    """
    was_there = sandbox.down(name)
    if as_json:
        echo_json({"name": name, "was_there": was_there})
    if not was_there:
        raise _not_there(name)
    if not as_json:
        click.echo(f"Sandbox {name} removed.")


def _facts(box: sandbox.Sandbox) -> dict[str, Any]:
    daemons = box.daemons()
    # Without controller or munged, Slurm's commands would fail only after several seconds.
    states = box.node_states() if daemons["munged"] and daemons["slurmctld"] else {}
    return {
        "name": box.name,
        "up": None not in daemons.values(),
        "daemons": daemons,
        "nodes": {node: states.get(node, "unknown") for node in box.nodes},
        "gpus_per_node": box.shape.gpus_per_node,
        "cpus_per_node": box.shape.cpus_per_node,
        "preempt_grace_s": box.shape.preempt_grace_s,
        "partitions": ["preemptible", "urgent"],
        "slurm": sandbox.installed_version(),
        "folder": str(box.folder),
        "env": box.env,
        "sandboxes": sandbox.list_names(),
    }


def _exports(box: sandbox.Sandbox) -> str:
    return f"export SLURM_CONF={shlex.quote(str(box.conf))}"


def _find(name: str) -> sandbox.Sandbox:
    if (box := sandbox.find(name)) is None:
        raise _not_there(name)
    return box


def _not_there(name: str) -> UserError:
    names = sandbox.list_names()
    if name in names:
        return UserError(
            f"Sandbox {name!r} is incomplete, because its start was interrupted. Remove it with `hpctrain "
            f"sandbox down --name {name}`, or start it again with `hpctrain sandbox up --name {name}`."
        )
    existing = f" Existing sandboxes: {', '.join(names)}." if names else ""
    return UserError(f"There is no sandbox {name!r}.{existing} Use `hpctrain sandbox up` to start a sandbox.")
