"""What each process of a step runs."""

from __future__ import annotations

import json

from hpctrain.jobs.spec import JobSpec
from hpctrain.supervisor.container import module_inside


def command_of(spec: JobSpec, num_nodes: int) -> list[str]:
    """What each process of a step on so many nodes runs: a rank, or the agent that starts a node's ranks."""
    words = json.dumps([spec.entry, *spec.args])
    if spec.torchrun is None:
        return [*module_command(spec, "worker"), words]
    plan = {
        "nodes": num_nodes,
        "ranks_per_node": spec.tasks_per_node,
        "backend": spec.torchrun.rdzv_backend,
        "endpoint": spec.torchrun.rdzv_endpoint,
        "worker": [*module_command(spec, "worker"), "torchrun", words],
    }
    return [*module_command(spec, "agent"), json.dumps(plan)]


def module_command(spec: JobSpec, name: str) -> list[str]:
    """What each process of a step runs that is a module of `hpctrain.runtime`."""
    if spec.container is not None:
        return module_inside(spec.container, name)
    # -P: a file of the user's folder that is named like a module must not be imported in its place.
    return [spec.python, "-P", "-m", f"hpctrain.runtime.{name}"]
