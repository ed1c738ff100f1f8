"""Batch script of a job: a built-in one, or one from the user's template."""

from __future__ import annotations

import os

from hpctrain.jobs.submit.batch_script import built_in_blocks, template_of
from hpctrain.spec.job_spec import JobSpec


def render(spec: JobSpec) -> str:
    """Return the batch script of the job.

    Raises:
        SpecError: there is no such template, it cannot be rendered, or it omits a requested setting.
    """
    return _render(spec, None)


def render_setup(spec: JobSpec) -> str:
    """Return the batch script of the job, which runs its arguments instead of the supervisor.

    Raises:
        SpecError: see `render`; or the template starts the supervisor outside the `launch` block.
    """
    return _render(spec, 'exec "$@"')


def _render(spec: JobSpec, launch: str | None) -> str:
    """Return the batch script; `launch` replaces the block that starts the supervisor."""
    template = template_of(spec)
    if os.sep in template:
        from hpctrain.jobs.submit.custom_template import render_custom_template

        return render_custom_template(spec, template, launch)
    blocks = built_in_blocks(spec, template)
    return "".join(launch if launch and name == "launch" else text for name, text in blocks)
