"""Checks of a job against the Slurm site that it is meant for, and what awaits it there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from hpctrain.jobs.backends import Outlook
from hpctrain.jobs.environment import outer_environment
from hpctrain.jobs.site.check import check_site
from hpctrain.jobs.site.facts import Site
from hpctrain.jobs.site.outlook import FORETELL_LIMIT_S, Forecast, can_start, expected_start, highest_cost
from hpctrain.jobs.site.paths import path_notes
from hpctrain.jobs.site.questions import Answers, ask_site
from hpctrain.jobs.site.read import site_of
from hpctrain.jobs.site.request import Request
from hpctrain.jobs.slurm_command import Question, answers_to, run_slurm
from hpctrain.jobs.spec import JobSpec


def lint_site(
    spec: JobSpec,
    script: str,
    environ: Mapping[str, str],
    profile: Site,
    answers: Answers | None = None,
) -> Outlook:
    """Hold a job against its site, and ask Slurm when it would start.

    This takes a few short calls of Slurm's commands, three of them side by side; none changes anything. The
    last one, `sbatch --test-only`, goes on while the job is made ready.

    Args:
        spec: what was asked for.
        script: the batch script.
        environ: variables of the submission.
        profile: what the site says of itself, for what Slurm does not tell.
        answers: what Slurm says of the site, where it was asked before.

    Raises:
        SpecError: the job cannot be done as asked; the message has a line for each reason.
    """
    outer = outer_environment(environ)

    def ask(command: Sequence[str]) -> str:
        return run_slurm(command, outer)

    request = Request.of(spec, environ)
    site, gaps = site_of(answers or answers_to(ask_site(outer)), profile)
    notes, partitions = check_site(request, site, ask)
    forecast = None
    if can_start(partitions):
        forecast = Forecast(
            Question(["sbatch", "--test-only"], request.variables, text=script, timeout_s=FORETELL_LIMIT_S)
        )
    notes = [
        *(f"{gap}: the job is not checked against that." for gap in gaps),
        *notes,
        *path_notes(spec, ask),
    ]

    @cache
    def foretell() -> tuple[str, ...]:
        start = expected_start(request, forecast) if forecast is not None else ""
        return tuple(filter(None, (start, highest_cost(request, partitions, site))))

    return Outlook(tuple(notes), foretell, forecast.refusal if forecast is not None else str)
