"""Checks of a job against the Slurm site that it is meant for, and what awaits it there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.jobs.backends import Outlook
from hpctrain.jobs.environment import outer_environment
from hpctrain.jobs.site.check import check_site
from hpctrain.jobs.site.facts import Site
from hpctrain.jobs.site.outlook import FORETELL_LIMIT_S, expected_start, highest_cost
from hpctrain.jobs.site.paths import path_notes
from hpctrain.jobs.site.read import Answers, ask_site, site_of
from hpctrain.jobs.site.request import Request
from hpctrain.jobs.slurm_command import run_slurm
from hpctrain.jobs.spec import JobSpec


def lint_site(
    spec: JobSpec,
    script: str,
    environ: Mapping[str, str],
    profile: Site,
    answers: Answers | None = None,
) -> Outlook:
    """Hold a job against its site, and ask Slurm when it would start.

    This takes a few short calls of Slurm's commands, three of them side by side; none changes anything.

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
    site, gaps = site_of(answers or ask_site(outer), profile)
    notes, partitions = check_site(request, site, ask)
    notes = [
        *(f"{gap}: the job is not checked against that." for gap in gaps),
        *notes,
        *path_notes(spec, ask),
    ]

    def test_only() -> str:
        return run_slurm(
            ["sbatch", "--test-only"],
            request.variables,
            text=script,
            with_stderr=True,
            timeout_s=FORETELL_LIMIT_S,
        )

    prospects = (expected_start(request, partitions, test_only), highest_cost(request, partitions, site))
    return Outlook(tuple(notes), tuple(filter(None, prospects)))
