"""The first half of a submission: everything is decided and checked, nothing is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import SpecError
from hpctrain.jobs.backends import Backend, choose_backend
from hpctrain.jobs.build import build_spec
from hpctrain.jobs.config import PYTHON, Settings, resolve
from hpctrain.jobs.container import Container
from hpctrain.jobs.given import Source
from hpctrain.jobs.idle_options import check_idle
from hpctrain.jobs.lint import check_files
from hpctrain.jobs.options import SubmitOptions
from hpctrain.jobs.render import render
from hpctrain.jobs.spec import BackendName, JobSpec

if TYPE_CHECKING:
    from hpctrain.jobs.snapshot import Snapshot


@dataclass(frozen=True)
class Submission:
    """A job that has passed every check."""

    spec: JobSpec
    #: The batch script, exactly as it will be submitted.
    script: str
    #: What the user should know, a line each.
    notes: tuple[str, ...]
    #: See `prospects`.
    foretell: Callable[[], tuple[str, ...]]
    #: See `Outlook.refusal`.
    refusal: Callable[[], str]
    backend: Backend
    #: Some of its variables may be secret.
    environ: Mapping[str, str] = field(repr=False)
    #: What is copied into the run folder; None where the script itself is run.
    snapshot: Snapshot | None = None

    @property
    def prospects(self) -> tuple[str, ...]:
        """When it starts, and what it may cost; waits until the scheduler has said so."""
        return self.foretell()


#: What may be an argument of a script; it gets a text.
_ARGUMENTS = (str, int, float, os.PathLike)


def prepare(
    script: str | os.PathLike[str],
    args: Sequence[str],
    options: SubmitOptions,
    *,
    source: Source = PYTHON,
    assignments: Sequence[str] = (),
    environ: Mapping[str, str],
    cwd: Path,
    python: str,
    code: Path | None = None,
) -> Submission:
    """Decide and check everything about a job; nothing is written and nothing submitted.

    Args:
        script: the Python script that every rank runs.
        args: its command-line arguments.
        options: what is asked for; files of options say the rest.
        source: where `options` come from.
        assignments: texts of the form KEY=VALUE, which win over all else.
        environ: the variables of the submission.
        cwd: the folder in which the script is to run.
        python: the interpreter of supervisor and ranks.
        code: a folder of the working tree that is copied, where the script does not lie in it.

    Raises:
        SpecError: the job cannot be done as asked.
        SchedulerError: Slurm was asked for by name and does not answer.
    """
    if isinstance(args, str | bytes) or not all(isinstance(arg, _ARGUMENTS) for arg in args):
        raise SpecError(
            f"The arguments of the script are {args!r}, but they have to be a list of texts, numbers "
            "and paths, such as ['--steps', 100]."
        )
    settings = resolve(options, source=source, assignments=assignments, cwd=cwd, environ=environ)
    try:
        return _prepare(script, args, settings, environ, cwd, python, code)
    except SpecError as error:
        if places := settings.places_of(str(error)):
            raise SpecError(f"{error} ({places})") from error
        raise


def _prepare(
    script: str | os.PathLike[str],
    args: Sequence[str],
    settings: Settings,
    environ: Mapping[str, str],
    cwd: Path,
    python: str,
    code: Path | None,
) -> Submission:
    asked = settings.options
    backend, notes = choose_backend(asked.get("backend", "auto"), environ)
    notes += _resolve_runs(asked, backend.name, cwd, environ)
    container = _container(settings, backend.name, cwd, environ)
    spec = build_spec(script, args, asked, backend=backend.name, cwd=cwd, python=python, container=container)
    notes += check_idle(settings.given, asked, spec)
    check_files(spec)
    snapshot = None
    if asked.get("snapshot", True):
        # Most of the time that it takes to import goes into what runs git.
        from hpctrain.jobs.snapshot import plan_snapshot

        snapshot, why_none = plan_snapshot(spec.script, asked["snapshot_limit"], environ, folder=code)
        notes += why_none
    text = render(spec)
    outlook = backend.check(spec, text, settings.site)
    notes += outlook.notes
    return Submission(spec, text, tuple(notes), outlook.foretell, outlook.refusal, backend, environ, snapshot)


def _container(
    settings: Settings, backend: BackendName, cwd: Path, environ: Mapping[str, str]
) -> Container | None:
    if "container_image" not in settings.given:
        return None
    from hpctrain.jobs.containers import build_container

    known = settings.site.habits.containers
    return build_container(settings.options, backend=backend, known=known, cwd=cwd, environ=environ)


def _resolve_runs(
    asked: SubmitOptions, backend: BackendName, cwd: Path, environ: Mapping[str, str]
) -> list[str]:
    """Put jobs in the place of runs on which the job depends; only Slurm can wait for one."""
    if backend != "slurm" or "dependency" not in asked:
        return []
    from hpctrain.jobs.dependency import resolve_dependency

    resolved, notes = resolve_dependency(asked["dependency"], cwd, environ)
    if resolved:
        asked["dependency"] = resolved
    else:
        del asked["dependency"]
    return notes
