"""List, verify, export and import checkpoints (`hpctrain checkpoints`)."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from msgspec import to_builtins

from hpctrain.checkpoint.listing import (
    BestMetric,
    CheckpointInfo,
    list_checkpoints,
    list_quarantined,
    list_script_checkpoints,
)
from hpctrain.cli.common import (
    DefaultGroup,
    complete_runs,
    echo_json,
    echo_table,
    json_option,
    open_run,
    runs_dir_option,
    short_path,
)
from hpctrain.errors import CheckpointError, CorruptCheckpoint, UserError
from hpctrain.jobs.runs.run import require_single
from hpctrain.jobs.runs.run_status import checkpoint_pattern, unmatched_pattern
from hpctrain.record_types import ScriptCheckpoint
from hpctrain.rundir import RunDir
from hpctrain.text import format_duration, format_number, format_size, format_time, pluralize


def _run_argument(function: Any) -> Any:
    """Add RUN, which may also be the folder of a run that was not submitted, and `--runs-dir`."""
    return click.argument("run", metavar="RUN", shell_complete=complete_runs)(runs_dir_option(function))


@click.group("checkpoints", cls=DefaultGroup, default="list")
def command() -> None:
    """List the checkpoints of a run, export weights from a checkpoint, or import a checkpoint file.

    \b
        hpctrain checkpoints RUN
        hpctrain checkpoints RUN --verify
        hpctrain checkpoints export RUN model.safetensors
        hpctrain checkpoints import RUN model.ckpt

    If a run has the same name as a subcommand, pass the path of its folder, such as ./list.
    """  # noqa: D301


@command.command("list")
@_run_argument
@click.option(
    "--verify", is_flag=True, help="Compare every file with its checksum. Exits with 1 if a file is damaged."
)
@json_option
def list_(run: str, runs_dir: Path, verify: bool, as_json: bool) -> None:
    """List the checkpoints of RUN, newest last. `hpctrain checkpoints RUN` does the same.

    The run resumes from the newest valid checkpoint. --verify reads every file and compares it with its
    checksum. The exit code is 1 if a checkpoint is damaged.
    """
    folder = _folder_of(run, runs_dir)
    checkpoints, rule = _ranked_checkpoints(folder, verify=verify)
    quarantined = list_quarantined(folder)
    by_script = list_script_checkpoints(folder.checkpoints, checkpoint_pattern(folder))
    if as_json:
        others = [*map(_quarantined_record, quarantined), *map(_script_record, by_script)]
        echo_json([*(_as_record(saved, rule) for saved in checkpoints), *others])
    else:
        _print_table(folder, checkpoints, rule, verify=verify)
        if by_script:
            _print_script_checkpoints(by_script)
        if folder.attempts() and (problem := unmatched_pattern(folder)):
            click.echo(f"Note: {problem}.", err=True)
        for path in quarantined:
            problem = "damaged" if ".broken-" in path.name else "saved after the last verified step"
            click.echo(f"{short_path(path)}: {problem}, set aside by the run", err=True)
    if num_damaged := sum(bool(checkpoint.problems) for checkpoint in checkpoints):
        result = "A run skips damaged checkpoints and sets them aside."
        if num_damaged == len(checkpoints):
            result = "A run in this folder fails at its start. To start over, delete the checkpoints."
        verb = "is" if num_damaged == 1 else "are"
        if not as_json:
            click.echo(f"{pluralize(num_damaged, 'checkpoint')} {verb} damaged. {result}", err=True)
        sys.exit(CheckpointError.exit_code)


@command.command("export")
@_run_argument
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.option(
    "--step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Step of the checkpoint.  [default: the newest valid checkpoint]",
)
@click.option("--best", is_flag=True, help="Use the checkpoint with the best score.")
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Include the optimizers and all other state. Requires a .pt file.",
)
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
def export(
    run: str, runs_dir: Path, file: Path, step: int | None, best: bool, everything: bool, force: bool
) -> None:
    """Write the weights from a checkpoint of RUN to FILE, which must end in .safetensors or .pt.

    The weights keep the names of the module's `state_dict()`. Every file of the checkpoint is verified
    first. FILE is written atomically.
    """
    if step is not None and best:
        raise click.UsageError("--step and --best both select a checkpoint. Use only one of these options.")
    if file.exists() and not force:
        raise UserError(f"{file} already exists. Use --force to overwrite it.")
    folder = _folder_of(run, runs_dir)
    checkpoints, _ = _ranked_checkpoints(folder)
    chosen = _select(folder, checkpoints, step, best=best)
    from hpctrain.checkpoint.convert.import_export import export_checkpoint

    while True:
        try:
            sentences = export_checkpoint(chosen.path, file, everything=everything)
            break
        except CorruptCheckpoint as error:
            older = [saved for saved in checkpoints if saved.step < chosen.step and not saved.problems]
            if step is not None or best or not older:
                raise
            click.echo(f"{error} Using the previous checkpoint.", err=True)
            chosen = older[-1]
    for sentence in sentences:
        click.echo(sentence)


@command.command("import")
@_run_argument
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE")
@click.option(
    "--step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Number of steps for which the weights were trained.  [default: the step in FILE, or 0]",
)
@click.option(
    "--weights-only", is_flag=True, help="Import only the weights, not the optimizer and scheduler states."
)
@click.option(
    "--allow",
    multiple=True,
    metavar="CLASS",
    help="Class that FILE may contain, such as argparse.Namespace. Repeatable.",
)
def import_(
    run: str, runs_dir: Path, file: Path, step: int | None, weights_only: bool, allow: tuple[str, ...]
) -> None:
    """Import FILE, a PyTorch or Lightning checkpoint or a .safetensors file, as a checkpoint of RUN.

    RUN is a run that has ended, or a new folder. `submit --run-dir RUN` then resumes from the checkpoint. The
    step is read from FILE if FILE contains it; weights alone are imported as step 0. No code in FILE is
    executed. --allow names classes in FILE that you trust.
    """
    folder = _importable_folder(run, runs_dir)
    from hpctrain.checkpoint.convert.import_export import import_checkpoint

    for sentence in import_checkpoint(file, folder, step=step, weights_only=weights_only, allow=allow):
        click.echo(sentence)
    click.echo(f"Next: hpctrain submit --run-dir {short_path(folder.path)} …")


def _folder_of(run: str, runs_dir: Path) -> RunDir:
    """Return the folder of a run that was submitted, or that a `Trainer` wrote without a submission."""
    for folder in (RunDir((runs_dir / run).absolute()), RunDir(Path(run).absolute())):
        if folder.checkpoints.is_dir() and not folder.spec.exists():
            return folder
    opened = open_run(run, runs_dir)
    require_single(opened)
    return opened.dir


def _ranked_checkpoints(
    folder: RunDir, *, verify: bool = False
) -> tuple[list[CheckpointInfo], BestMetric | None]:
    """List the checkpoints. Without scores, the best one is the one that `status` and `report` show."""
    from hpctrain.telemetry.report.run_results import read_results

    checkpoints, rule = list_checkpoints(folder, verify=verify)
    if not checkpoints or rule is not None:
        return checkpoints, rule
    best = read_results(folder).best
    if best is None or best.metric == "loss":
        return checkpoints, None
    step = best.checkpoint_step
    checkpoints = [replace(saved, best=saved.step == step and not saved.problems) for saved in checkpoints]
    return checkpoints, BestMetric(best.metric, best.mode)


def _importable_folder(run: str, runs_dir: Path) -> RunDir:
    """Return the folder of an ended run, or a folder that can become a run."""
    folder = RunDir((runs_dir / run if (runs_dir / run).exists() else Path(run)).absolute())
    path = folder.path
    if folder.spec.exists():
        if not (status := open_run(run, runs_dir).status()).state.ended:
            raise UserError(
                f"Run {status.run_id} is {status.state}, but a checkpoint can only be imported into a run "
                "that has ended, or into a new folder."
            )
    elif not folder.checkpoints.exists() and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(
            f"{short_path(path)} is neither a run folder nor empty. Specify a run or a new folder."
        )
    return folder


def _select(
    folder: RunDir, checkpoints: list[CheckpointInfo], step: int | None, *, best: bool
) -> CheckpointInfo:
    for checkpoint in reversed(checkpoints):
        if checkpoint.best if best else checkpoint.newest if step is None else checkpoint.step == step:
            return checkpoint
    title, reason = "best checkpoint", "No checkpoint has a validation metric."
    if not best:
        title = "checkpoint" if step is None else f"checkpoint of step {step}"
        reason = f"Available steps: {', '.join(str(saved.step) for saved in checkpoints) or 'none'}."
    raise UserError(f"No {title} in {short_path(folder.checkpoints)}. {reason}")


def _print_table(
    folder: RunDir, checkpoints: list[CheckpointInfo], rule: BestMetric | None, *, verify: bool
) -> None:
    if not checkpoints:
        place = short_path(folder.checkpoints)
        click.echo(f"No checkpoints in hpctrain's format in {place}.", err=True)
        return
    rows = [_as_row(checkpoint, verify=verify) for checkpoint in checkpoints]
    score = "score" if rule is None else rule.metric
    table = [("step", "saved", "size", "files", "ranks", "tier", score, ""), *rows]
    if not any(row[6] for row in rows):
        table = [(*row[:6], row[7]) for row in table]
    echo_table(table, str.rjust)
    for checkpoint in checkpoints:
        for problem in checkpoint.problems:
            click.echo(f"step {checkpoint.step}: {problem}", err=True)


def _print_script_checkpoints(checkpoints: list[ScriptCheckpoint]) -> None:
    table = [("age", "size", "checkpoint of the script")]
    for saved in checkpoints:
        age = format_duration(max(0.0, time.time() - saved.time))
        table.append((age, format_size(saved.num_bytes), short_path(saved.path)))
    echo_table(table, str.rjust)
    click.echo("hpctrain can neither verify nor export checkpoints in the script's own format.", err=True)


def _as_row(checkpoint: CheckpointInfo, *, verify: bool) -> tuple[str, ...]:
    manifest, cells = checkpoint.manifest, [""] * 5
    marks = {
        "newest": checkpoint.newest,
        "best": checkpoint.best,
        "BROKEN": checkpoint.problems,
        "verified": verify and not checkpoint.problems,
        "NOT FINITE": manifest is not None and manifest.finite is False,
    }
    if manifest is not None:
        cells = [format_time(manifest.time), format_size(manifest.total_bytes), str(len(manifest.files))]
        cells += [str(manifest.world_size), "" if manifest.score is None else format_number(manifest.score)]
    notes = " ".join(mark for mark, applies in marks.items() if applies)
    return (str(checkpoint.step), *cells[:4], checkpoint.tier, cells[4], notes)


def _as_record(checkpoint: CheckpointInfo, rule: BestMetric | None) -> dict[str, Any]:
    manifest = checkpoint.manifest
    names = ("time", "world_size", "finite", "score")
    return {
        "step": checkpoint.step,
        "path": str(checkpoint.path),
        "tier": checkpoint.tier,
        "bytes": manifest and manifest.total_bytes,
        "files": manifest and len(manifest.files),
        **{name: manifest and getattr(manifest, name) for name in names},
        "metric": rule and rule.metric,
        "newest": checkpoint.newest,
        "best": checkpoint.best,
        "set_aside": False,
        "problems": list(checkpoint.problems),
    }


def _script_record(saved: ScriptCheckpoint) -> dict[str, Any]:
    flags = {"newest": False, "best": False, "set_aside": False, "by_script": True}
    return {"step": None, **to_builtins(saved), **flags}


def _quarantined_record(path: Path) -> dict[str, Any]:
    step = int(path.name.removeprefix("step-").partition(".")[0])
    return {"step": step, "path": str(path), "newest": False, "best": False, "set_aside": True}
