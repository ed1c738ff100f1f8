"""Reject or report options that have no effect on this job.

Options from files are exempt, because files are written for many jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hpctrain.errors import SpecError
from hpctrain.jobs.options.option import DEFAULT_SOURCE, OptionValue
from hpctrain.jobs.options.table import SubmitOptions, all_options

if TYPE_CHECKING:
    from hpctrain.spec.job_spec import JobSpec

#: Options that only the supervisor and its ranks use.
_OF_SUPERVISOR = (
    *("node_check", "max_failures", "restart_policy", "standby_workers", "hang_timeout", "cpu_binding"),
    *("independent_ranks", "resume_mode", "code_snapshot", "code_snapshot_limit", "stop_before_limit"),
)


def check_unused_options(
    settings: Mapping[str, OptionValue], given: SubmitOptions, spec: JobSpec
) -> list[str]:
    """Find options of this submission, outside files, that have no effect.

    Args:
        settings: every value with its source.
        given: the values alone.
        spec: the resulting job.

    Returns:
        A sentence for each option that changes nothing.

    Raises:
        SpecError: an option applies to a part that the job does not have.
    """
    asked = {
        key.partition(".")[0]: all_options()[key.partition(".")[0]].flag
        for key, value in settings.items()
        if value.source.path is None and value.source != DEFAULT_SOURCE
    }
    for name, flag in asked.items():
        if spec.container is None and name.startswith("container_"):
            raise SpecError(
                f"{flag} requires a container, but --container-image is not given. Add --container-image, "
                f"or remove {flag}."
            )
        if spec.torchrun is None and name.startswith("rdzv_"):
            raise SpecError(
                f"{flag} requires torchrun, but srun starts the ranks (--launcher). Remove {flag}, or use "
                "--launcher torchrun."
            )
    reasons = dict(_reasons(given, spec))
    return [f"{flag} has no effect: {reasons[name]}." for name, flag in asked.items() if name in reasons]


def _reasons(given: SubmitOptions, spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield the options that change nothing in this job, with the reason."""
    if not spec.supervised:
        yield from ((name, "hpctrain does not run in the job (--template plain)") for name in _OF_SUPERVISOR)
    if spec.min_nodes == spec.nodes:
        yield "scale_up_after", f"the number of nodes is fixed (--nodes {spec.nodes})"
    if spec.gpus_per_node == 0:
        yield "gpu_request_style", "no GPUs are requested (--gpus-per-node)"
    if not spec.notify.targets:
        yield from ((name, "--notify is not given") for name in ("notify_on", "notify_stall_after"))
    elif "stall" not in spec.notify.on:
        yield "notify_stall_after", "notify_on does not include stall"
    if not given.get("code_snapshot", True):
        yield "code_snapshot_limit", "the code is not copied (--no-code-snapshot)"
    if spec.torchrun is not None:
        yield "standby_workers", "torchrun starts the ranks (--launcher)"
    elif spec.mpi != "none":
        yield "standby_workers", "the processes of an MPI program start together (--mpi)"
    if spec.backend == "local":
        others = ("spare_nodes", "scale_up_after", "gpu_request_style", "resume_mode", "mpi", "srun_arg")
        yield from ((name, "the run uses the local backend") for name in others)
        if spec.time_limit_s is None:
            yield "stop_before_limit", "there is no time limit (--time)"
