"""Checks of a job against its Slurm site, and a forecast of its start and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from hpctrain.jobs.backends.base import PreflightResult
from hpctrain.jobs.site.forecast import (
    FORECAST_TIMEOUT_S,
    StartForecast,
    can_start,
    estimate_cost,
    expected_start,
)
from hpctrain.jobs.site.job_request import JobRequest
from hpctrain.jobs.site.path_visibility import path_notes
from hpctrain.jobs.site.site_check import check_request
from hpctrain.slurm.command import SlurmCall, run_all, run_slurm
from hpctrain.slurm.environment import strip_job_env
from hpctrain.slurm.site_discovery import parse_site
from hpctrain.slurm.site_facts import Site
from hpctrain.slurm.site_queries import SiteAnswers, query_site
from hpctrain.spec.job_spec import JobSpec


def preflight_slurm(
    spec: JobSpec,
    script: str,
    environ: Mapping[str, str],
    profile: Site,
    answers: SiteAnswers | None = None,
) -> PreflightResult:
    """Check a job against its site, and query the expected start.

    Runs a few short Slurm commands, three of them in parallel; no command changes anything. The last command,
    `sbatch --test-only`, runs while the job is being prepared.

    Args:
        spec: the job as requested.
        script: the batch script.
        environ: environment variables of the submission.
        profile: settings of the site that Slurm does not report.
        answers: Slurm's answers about the site, if already queried.

    Raises:
        SpecError: the job cannot run as requested; the message has a line for each reason.
    """
    outer = strip_job_env(environ)

    def ask(command: Sequence[str]) -> str:
        return run_slurm(command, outer)

    request = JobRequest.from_spec(spec, environ)
    site, gaps = parse_site(answers or run_all(query_site(outer)), profile)
    notes, partitions = check_request(request, site, ask)
    forecast = None
    if can_start(partitions):
        forecast = StartForecast(
            SlurmCall(["sbatch", "--test-only"], request.variables, text=script, timeout_s=FORECAST_TIMEOUT_S)
        )
    notes = [
        *(f"{gap}. Checks that require this information are skipped." for gap in gaps),
        *notes,
        *path_notes(spec, ask),
    ]

    @cache
    def foretell() -> tuple[str, ...]:
        start = expected_start(request, forecast) if forecast is not None else ""
        return tuple(filter(None, (start, estimate_cost(request, partitions, site))))

    refusal = forecast.refusal if forecast is not None else str
    return PreflightResult(tuple(notes), foretell, refusal)
