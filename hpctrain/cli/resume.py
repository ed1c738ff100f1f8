"""Submit an ended run again, optionally with other options (`hpctrain resume`)."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.common import open_run, run_argument, run_reference, short_path
from hpctrain.errors import RunNotFound, SpecError, UserError
from hpctrain.rundir import RunDir

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run_status import RunStatus

#: Options that change the output, not the job.
_OUTPUT_OPTIONS = {"--json", "--follow", "--dry-run", "--show-config"}


@click.command("resume", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.pass_context
@run_argument
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def command(context: click.Context, run: str, runs_dir: Path, options: tuple[str, ...]) -> None:
    """Submit an ended RUN as a new job that resumes from the newest valid checkpoint.

    The job uses the script, arguments and options of the last submission. OPTIONS of `hpctrain submit`, such
    as --nodes 8 or --time 4:00:00, override them. To change the arguments, use `hpctrain submit --run-dir`.
    """
    from hpctrain.cli import submit
    from hpctrain.jobspec.load_spec import load_spec

    try:
        opened = open_run(run, runs_dir)
    except RunNotFound:
        if not Path(run).is_file():
            raise
        raise UserError(
            f"{run} is a file, not a run. To submit it: hpctrain submit {shlex.quote(run)}"
        ) from None
    folder = opened.dir
    spec = load_spec(folder.spec)
    if folder.function.exists():
        raise SpecError(
            f"Run {folder.run_id} calls a function, which can only be submitted from Python. Submit the "
            "function again from Python."
        )
    if folder.sweep.exists():
        raise SpecError(
            f"Run {folder.run_id} is a sweep, whose trials have different arguments. Use `hpctrain sweep "
            f"resume {run_reference(str(folder.path))}`, or resume a single trial."
        )
    _check_state(opened.status(), changed=not _OUTPUT_OPTIONS.issuperset(options))
    # Relative paths in OPTIONS refer to the folder of the submission, as in the run's files.
    target = folder.array or folder
    fields = asdict(spec) | ({} if spec.array_task is None else {"array": spec.array_task})
    started = bool(folder.attempts())
    with submit.resubmission(context, fields, target, options, started=started) as inner:
        os.chdir(spec.workdir)
        submit.command.invoke(inner)


def _check_state(status: RunStatus, *, changed: bool) -> None:
    """Reject a run that is active, or complete with unchanged options."""
    from hpctrain.records.log_tail import read_last_records
    from hpctrain.schema import StepRecord
    from hpctrain.slurm.states import RunState

    handle = run_reference(status.run_dir)
    match status.state:
        case RunState.PENDING:
            raise SpecError(
                f"Run {status.run_id} is still pending. Cancel it first: `hpctrain cancel {handle}`."
            )
        case RunState.RUNNING:
            raise SpecError(
                f"Run {status.run_id} is still running. Cancel it first, or use `hpctrain requeue {handle}`. "
                f"If you have already cancelled it, wait until it ends: `hpctrain wait {handle}`."
            )
        case RunState.COMPLETED if not changed:
            record = next(read_last_records(RunDir(Path(status.run_dir)).metrics, StepRecord), None)
            total = f" of {record.last_step}" if record is not None and record.last_step else ""
            step = "" if status.step is None else f" (step {status.step}{total})"
            raise SpecError(
                f"Run {status.run_id} is complete{step}. To train longer, increase max_steps or max_epochs "
                f"and submit the script with --run-dir {short_path(status.run_dir)}."
            )
