"""Choice of the backend that runs a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from hpctrain.errors import SchedulerError
from hpctrain.jobs.backends.backend import Backend
from hpctrain.jobspec.job_spec import BackendName


def open_backend(name: BackendName, environ: Mapping[str, str]) -> Backend:
    """Return the backend of that name; `environ` is the environment of its commands."""
    # Imported only when needed: dry runs should be fast.
    if name == "slurm":
        from hpctrain.jobs.backends.slurm import SlurmBackend

        return SlurmBackend(environ)
    from hpctrain.jobs.backends.local import LocalBackend

    return LocalBackend(environ)


def choose_backend(
    requested: Literal["auto", "slurm", "local"],
    environ: Mapping[str, str],
    *,
    dry_run: bool = False,
    meanwhile: Callable[[], object] = bool,
) -> tuple[Backend, list[str]]:
    """Return the backend, and notes for the user; `meanwhile` is called while Slurm answers."""
    if requested == "local":
        return open_backend("local", environ), []
    from hpctrain.jobs.backends.slurm import SlurmBackend
    from hpctrain.slurm.command import is_transient

    slurm = SlurmBackend(environ)
    trouble = slurm.unavailable_reason(meanwhile)
    if trouble is None or (requested == "slurm" and dry_run):
        return slurm, []
    if is_transient(trouble):  # this machine may be a login node, where no training must start
        raise SchedulerError(
            f"Slurm is set up on this machine but does not respond: {trouble}. Try again later, "
            "or use --backend local to run on this machine."
        )
    if requested == "slurm":
        raise SchedulerError(
            f"Slurm cannot be used on this machine: {trouble}. Submit from a login node of the cluster, "
            "or use --backend local to run on this machine."
        )
    return open_backend("local", environ), [f"Slurm is not available ({trouble}). Running on this machine."]
