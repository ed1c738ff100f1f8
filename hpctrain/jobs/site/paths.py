"""The paths of a job that the nodes have to see."""

from __future__ import annotations

import os
from pathlib import Path

from hpctrain.errors import SchedulerError
from hpctrain.jobs.site.mounts import is_per_node
from hpctrain.jobs.site.read import Ask
from hpctrain.jobs.spec import JobSpec


def path_notes(spec: JobSpec, ask: Ask) -> list[str]:
    """A warning where something lies in a folder that each node has for itself, such as /tmp."""
    paths = {
        "script": spec.script,
        "interpreter": spec.python,
        "working folder": spec.workdir,
        "run folder": spec.run_dir,
    }
    # By the folder: the interpreter of a virtual environment is a link that leads elsewhere.
    local = [
        f"{what} {path!r}"
        for what, path in paths.items()
        # Where an environment of conda lies that goes by its name, only the nodes know.
        if os.path.isabs(path) and is_per_node(Path(path).parent)
    ]
    if not local or nodes_are_this_machine(ask):
        return []
    listed = " and the ".join(filter(None, [", the ".join(local[:-1]), local[-1]]))
    verb = "lies" if len(local) == 1 else "lie"
    note = (
        f"The {listed} {verb} in a folder that each node has for itself, so the ranks may not find what is "
        "there. Move it to a folder that all nodes share, such as your home folder."
    )
    return [note]


def nodes_are_this_machine(ask: Ask) -> bool:
    """Whether all nodes of the cluster are this very machine."""
    try:
        hosts = set(ask(["sinfo", "--all", "--noheader", "--format=%n"]).split())
    except SchedulerError:
        return False
    return hosts == {os.uname().nodename.partition(".")[0]}
