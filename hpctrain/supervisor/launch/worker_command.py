"""Commands of the processes of a step."""

from __future__ import annotations

import json

from hpctrain.spec.job_spec import JobSpec
from hpctrain.supervisor.launch.container_command import containerized_module_command


def worker_command(spec: JobSpec, num_nodes: int) -> list[str]:
    """Return the command of each process of a step: a rank, or the agent that starts the ranks of a node."""
    words = json.dumps([spec.program, spec.entry, *spec.args])
    if spec.torchrun is None:
        return [*module_command(spec, "worker"), words]
    plan = {
        "nodes": num_nodes,
        "ranks_per_node": spec.ntasks_per_node,
        "backend": spec.torchrun.rdzv_backend,
        "endpoint": spec.torchrun.rdzv_endpoint,
        "worker": [*module_command(spec, "worker"), "torchrun", words],
    }
    return [*module_command(spec, "torchrun_agent"), json.dumps(plan)]


def module_command(spec: JobSpec, name: str) -> list[str]:
    """Return the command that runs a module of `hpctrain.runtime`."""
    if spec.container is not None:
        return containerized_module_command(spec.container, name)
    # -P: a file in the user's folder must not shadow a module of the same name.
    return [spec.python, "-P", "-m", f"hpctrain.runtime.{name}"]
