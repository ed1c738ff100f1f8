"""Turn the options of a submission into a checked job and its batch script; write nothing.

The options are resolved and completed with facts of the site. The specification that is built from them
checks its values and never changes: further checks only read it, and the batch script is rendered from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs.backends import choose_backend
from hpctrain.jobs.backends.backend import Backend, PreflightResult
from hpctrain.jobs.options.batch_options import BatchScript, build_batch_spec
from hpctrain.jobs.options.option import OptionSource, OptionValue
from hpctrain.jobs.options.option_table import SubmitOptions
from hpctrain.jobs.options.resolved_options import PYTHON_SOURCE, ResolvedOptions, resolve_options
from hpctrain.jobs.options.spec_builder import build_spec, is_plain_template, template_path
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.launcher import ProgramKind

if TYPE_CHECKING:
    from hpctrain.jobs.submit.code_snapshot import CodeSnapshot

#: Types of a script's arguments; the script receives strings.
_ARGUMENTS = (str, int, float, os.PathLike)
_WITHOUT_SUPERVISOR = (
    "Without hpctrain in the job (--template plain), a crash or the time limit ends the run, and hangs are "
    "not detected. Slurm requeues the job only after a preemption or a node failure, and the script must "
    "load its own checkpoint."
)


class PreparedSubmission(Struct, frozen=True):
    """A job that passed every check."""

    spec: JobSpec
    backend: Backend
    environ: Mapping[str, str]
    """Environment variables of the submission. Some may be secret."""
    script: str
    """The batch script, exactly as it will be submitted."""
    notes: tuple[str, ...] = ()
    """Notes for the user, one line each."""
    snapshot: CodeSnapshot | None = None
    """Code to copy into the run folder, if any."""
    preflight: PreflightResult = PreflightResult()
    batch: BatchScript | None = None
    """The user's batch script, if the job runs one."""

    def __repr__(self) -> str:
        return f"PreparedSubmission(run_dir={self.spec.run_dir!r}, backend={self.backend.name!r})"

    @property
    def forecast(self) -> tuple[str, ...]:
        """Return the expected start and cost; waits for the scheduler's answer."""
        return self.preflight.get_forecast()

    def raise_refusal(self, message: str = "The job was not submitted") -> None:
        """Raise an error if the scheduler would reject the job; waits for its answer."""
        if reason := self.preflight.refusal():
            raise SchedulerError(f"{message}: {reason}")


def prepare_submission(
    script: str | os.PathLike[str],
    args: Sequence[str],
    options: SubmitOptions,
    *,
    source: OptionSource = PYTHON_SOURCE,
    assignments: Sequence[str] = (),
    previous: Sequence[OptionValue] | None = None,
    environ: Mapping[str, str],
    cwd: Path,
    python: str,
    code: Path | None = None,
    program: ProgramKind = "script",
    dry_run: bool = False,
    is_run: bool = True,
) -> PreparedSubmission:
    """Resolve the options, build the job and check it; nothing is written or submitted.

    `code` is a folder of the working tree to copy, if the script is elsewhere. For a dry run, Slurm need not
    respond if it is requested by name. A shell (`is_run=False`) has no run folder and no copy of the code.
    """
    if isinstance(args, str | bytes) or not all(isinstance(arg, _ARGUMENTS) for arg in args):
        raise SpecError(
            f"The arguments of the script are {args!r}, but must be a list of strings, numbers and "
            "paths, such as ['--steps', 100]."
        )
    batch = BatchScript.read(cwd / script) if program == "script" else None
    settings = resolve_options(
        options,
        source=source,
        assignments=assignments,
        previous=previous,
        header=None if batch is None else batch.options,
        cwd=cwd,
        environ=environ,
    )
    try:
        requested = settings.options.get("backend", "auto")
        if batch is not None and requested == "auto":
            requested = "slurm"  # its commands must not start on a login node without Slurm
        backend, notes = choose_backend(requested, environ, dry_run=dry_run, meanwhile=_import_checks)
        from hpctrain.jobs.submit.complete_options import complete_options
        from hpctrain.jobs.submit.preflight import check_job
        from hpctrain.jobs.submit.render import render

        if backend.name == "local":
            settings = settings.without_variables()
        chosen, site = settings.options, backend.site(settings.habits)
        of_batch = batch is not None
        notes += complete_options(
            chosen, backend.name, settings.habits, site, cwd, environ, of_batch=of_batch
        )
        snapshot: CodeSnapshot | None = None
        code_notes: list[str] = []
        is_plain = is_plain_template(template_path(chosen, cwd))
        if is_plain and of_batch:
            raise SpecError(
                f"{os.fspath(script)} is a batch script, which --template {chosen['template']} would run "
                "once per rank. Pass the script to sbatch, or remove the template."
            )
        if is_run and chosen.get("code_snapshot", True) and not is_plain and not of_batch:
            from hpctrain.jobs.submit.code_snapshot import plan_snapshot

            folder = cwd if code is None and program != "script" else code
            snapshot, code_notes = plan_snapshot(
                cwd / script,
                chosen["code_snapshot_limit"],
                environ,
                folder=folder,
                starts_now=backend.name == "local",
            )
        shape: dict[str, Any] = {"backend": backend.name, "cwd": cwd, "python": python}
        shape["expedites_requeues"] = site is not None and site.expedites_requeues
        origins: Mapping[str, str] = {}
        if batch is None:
            reference = snapshot.reference if snapshot else None
            spec = build_spec(script, args, chosen, program=program, code=reference, **shape)
        else:
            spec, origins = build_batch_spec(script, args, chosen, settings.values, **shape)
            notes += batch.notes
        notes += [*check_job(spec, settings, environ, is_run=is_run), *code_notes]
        batch_script = render(spec, origins)
        if not spec.supervised:
            notes.append(_WITHOUT_SUPERVISOR)
        preflight = backend.check(spec, batch_script, settings.habits)
        if of_batch:
            preflight = replace(preflight, refusal=partial(_refusal_with_sources, preflight, settings))
        notes += preflight.notes
        return PreparedSubmission(
            spec, backend, environ, batch_script, tuple(notes), snapshot, preflight, batch
        )
    except SpecError as error:
        if places := settings.describe_sources(str(error)):
            raise SpecError(f"{error} ({places})") from error
        raise


def _refusal_with_sources(preflight: PreflightResult, settings: ResolvedOptions) -> str:
    """Return the scheduler's reason for a rejection, with the lines of the options that it names."""
    reason = preflight.refusal()
    places = settings.describe_sources(reason)
    return f"{reason} ({places})" if places else reason


def _import_checks() -> None:
    """Import what the rest of a submission needs, which takes about as long as Slurm's answers."""
    import hpctrain.jobs.backends.site_check
    import hpctrain.jobs.submit.complete_options
    import hpctrain.jobs.submit.preflight
    import hpctrain.jobs.submit.render  # noqa: F401
