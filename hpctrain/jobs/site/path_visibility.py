"""Visibility of a job's paths on the nodes."""

from __future__ import annotations

import os
from pathlib import Path

from hpctrain.errors import SchedulerError
from hpctrain.jobs.site.mounts import is_node_local
from hpctrain.slurm.site_discovery import RunQuery
from hpctrain.spec.job_spec import JobSpec


def path_notes(spec: JobSpec, ask: RunQuery) -> list[str]:
    """Return a warning if a path is in a node-local folder such as /tmp."""
    paths = {
        **({"script": spec.script} if spec.program == "script" else {}),
        "interpreter": spec.python,
        "working directory": spec.workdir,
        "run folder": spec.run_dir,
    }
    # Check the parent folder: the interpreter of a virtual environment is a symbolic link.
    local = [
        f"{what} {path!r}"
        for what, path in paths.items()
        # The path is relative for a conda environment given by name, which only the nodes can resolve.
        if os.path.isabs(path) and is_node_local(Path(path).parent)
    ]
    if not local or nodes_are_this_machine(ask):
        return []
    listed = " and the ".join(filter(None, [", the ".join(local[:-1]), local[-1]]))
    verb, them = ("is", "it") if len(local) == 1 else ("are", "them")
    note = (
        f"The {listed} {verb} in a node-local folder, so ranks on other nodes may not find {them}. "
        f"Move {them} to a folder that all nodes share, such as your home folder."
    )
    return [note]


def nodes_are_this_machine(ask: RunQuery) -> bool:
    """Return true if all nodes of the cluster run on this machine."""
    try:
        hosts = set(ask(["sinfo", "--all", "--noheader", "--format=%n"]).split())
    except SchedulerError:
        return False
    return hosts == {os.uname().nodename.partition(".")[0]}
