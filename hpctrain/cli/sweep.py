"""Submit a script with many hyper-parameters as one job array (`hpctrain sweep`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from msgspec import to_builtins

from hpctrain.cli import submit
from hpctrain.cli.common import (
    DefaultGroup,
    complete_files,
    echo_json,
    echo_table,
    json_option,
    one_line,
    parse_pairs,
    program_name,
    run_argument,
    run_reference,
    runs_argument,
    short_path,
)
from hpctrain.errors import SchedulerError, SpecError, UserError
from hpctrain.jobs.options.option_parser import option_names
from hpctrain.jobs.options.resolved_options import resolve_options
from hpctrain.rundir import RunDir
from hpctrain.slurm.states import RunState
from hpctrain.sweeps.search_space import inline_files
from hpctrain.sweeps.stopping_rules import StoppingRule
from hpctrain.sweeps.sweep_record import DEFAULT_FORMAT, SweepRecord, read_sweep
from hpctrain.telemetry.hparams import varying_hparams
from hpctrain.telemetry.report.run_results import (
    Mode,
    RunResults,
    common_ranking,
    describe_results,
    rank_key,
    read_results,
)
from hpctrain.text import format_count, format_number, pluralize

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run import Run
    from hpctrain.jobs.runs.run_status import RunStatus

#: A trial, its hyper-parameters and its metrics.
_ResultRow = tuple["RunStatus", RunResults]


@click.group("sweep", cls=DefaultGroup, default="submit")
def command() -> None:
    """Submit a script with many sets of hyper-parameters as one job array, and compare the results.

    \b
        hpctrain sweep --over lr=1e-4,3e-4,1e-3 --over seed=0:5 train.py
        hpctrain sweep status RUN
        hpctrain sweep best RUN
    """  # noqa: D301


def _parse_over(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    names = [text.partition("=")[0] for text in values]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise click.BadParameter(f"{repeated!r} is given twice. List its values: --over {repeated}=1,2.")
    return parse_pairs(ctx, param, values)


_over_option = click.option(
    "--over",
    "over",
    multiple=True,
    callback=_parse_over,
    metavar="NAME=VALUES",
    help="Hyper-parameter and its values: a list (1e-4,3e-4), integers (0:5 is 0 to 4), a range for "
    "--random (1e-5..1e-1, log:1e-5..1e-1), or the lines of a file (@FILE). Repeatable.",
)
_random_option = click.option(
    "--random",
    "number",
    type=click.IntRange(min=1),
    metavar="N",
    help="Run N random trials instead of the complete grid.",
)
_concurrent_option = click.option(
    "--concurrent",
    type=click.IntRange(min=1),
    metavar="N",
    help="Maximum number of concurrent trials.  [default: the sweep's value, otherwise Slurm's limits, or "
    "1 on this machine]",
)


@command.command("submit", cls=submit.HiddenSubmitOptions, context_settings=submit.command.context_settings)
@_over_option
@_random_option
@click.option("--sweep-seed", type=int, metavar="SEED", help="Random seed for --random.  [default: 0]")
@click.option(
    "--as",
    "form",
    default=DEFAULT_FORMAT,
    metavar="FORMAT",
    help="Format in which hyper-parameters are passed to SCRIPT, such as '{name}={value}' for Hydra.",
)
@_concurrent_option
@click.option(
    "--metric",
    metavar="NAME",
    help="Metric that ranks the trials.  [default: the metric of keep_best, otherwise a validation metric]",
)
@click.option(
    "--mode", type=click.Choice(get_args(Mode)), help="Minimize or maximize --metric.  [default: min]"
)
@click.option(
    "--stop-early",
    "rule",
    metavar="RULE",
    help="Stop trials with poor values of --metric early: median, asha or asha:FACTOR.  [default: stop none]",
)
@click.option(
    "--min-steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --stop-early, the first step at which a trial can be stopped.  [default: 100]",
)
@click.argument("script", shell_complete=complete_files)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_files)
@click.pass_context
def submit_(ctx: click.Context, /, **params: Any) -> None:
    """Submit SCRIPT once per trial. A trial's hyper-parameters are passed to it after ARGS.

    All options of `hpctrain submit` apply to each trial. Each trial is a normal run.
    """
    number, metric, rule = params["number"], params["metric"], params["rule"]
    mode, min_steps, seed = params["mode"], params["min_steps"], params["sweep_seed"]
    space: dict[str, str | list[str]] = {**params["over"]}
    if not space:
        values: Any = {name: value for name, value in params.items() if name in option_names()}
        for file in resolve_options(values, cwd=Path.cwd(), environ=os.environ).files:
            space |= file.sweep
    if not space:
        place = " before SCRIPT" if "--over" in params["args"] else ""
        raise click.UsageError(
            f"The sweep has no hyper-parameters. Use --over NAME=VALUES{place}, or `sweep:` in hpctrain.yaml."
        )
    for is_wrong, message in (
        (rule and metric is None, "--stop-early compares trials by a metric. Add --metric NAME."),
        (mode and metric is None, "--mode is the direction of a metric. Add --metric NAME."),
        (min_steps and not rule, "--min-steps has no effect without --stop-early. Add --stop-early asha."),
        (seed is not None and not number, "--sweep-seed has no effect on a grid. Add --random N."),
        (
            params["dry_run"] and params["as_json"],
            "--dry-run prints the arguments of the trials as text. Remove --json.",
        ),
    ):
        if is_wrong:
            raise click.UsageError(message)
    if rule is not None:
        mode = mode or "min"
    record = SweepRecord(
        args=params["args"],
        format=params["form"],
        space=inline_files(space, Path.cwd()),
        folder=str(Path.cwd()),
        sampler="random" if number else "grid",
        seed=seed or 0,
        concurrent=params["concurrent"] or 0,
        metric=metric,
        mode=mode,
        stopping=rule and StoppingRule.parse(rule, metric, mode, min_steps or 100),
    ).with_trials(number or 0)
    _submit(ctx, record, range(len(record.trials)))


def _submit(ctx: click.Context, record: SweepRecord, indices: Sequence[int]) -> None:
    """Submit trials as one job array, with the options of `hpctrain submit` in `ctx`."""
    if ctx.params.get("array") is not None:
        raise click.UsageError("A sweep sets --array itself. Use --concurrent to limit concurrent trials.")
    submission, notes = submit.prepare(ctx, record.args, f"array={record.array(indices)}")
    run_dir = submission.spec.run_dir
    if "over" in ctx.params and RunDir(Path(run_dir)).sweep.exists():
        handle = run_reference(run_dir)
        raise SpecError(
            f"{short_path(run_dir)} (--run-dir) already contains a sweep. Use "
            f"`hpctrain sweep resume {handle}` or `hpctrain sweep extend {handle}`, or choose another folder."
        )
    advised_array = record.array(indices).partition("%")[0]
    for note in notes:
        click.echo(note.replace(f"--array {advised_array}%2", "--concurrent 2"), err=True)
    if ctx.params["dry_run"]:
        for index in indices:
            click.echo(f"task-{index}: {' '.join(record.trial_args(index))}")
        return
    from hpctrain.jobs.submit.submit_prepared import submit_prepared

    run, job_id = submit_prepared(submission, sweep=record)
    backend = submission.backend.name
    if ctx.params["as_json"]:
        facts = {"run_id": run.run_id, "job_id": job_id, "run_dir": str(run.dir), "backend": backend}
        echo_json(facts | {"trials": list(indices)})
        return
    click.echo(
        f"Sweep {run.run_id}: {pluralize(len(indices), 'trial')}, job {job_id} ({backend}), folder "
        f"{short_path(run.dir.path)}"
    )
    submit.echo_next(str(run.dir), "sweep status", "sweep best", "sweep cancel")


def _rows(run: Run, metric: str | None, mode: Mode | None) -> list[_ResultRow]:
    """Return the trials, best first. All best values are those of the same metric."""
    from hpctrain.jobs.runs.run import query_statuses

    if not run.dir.tasks():
        raise UserError(f"Run {run.run_id} is neither a sweep nor a job array. Use `hpctrain status`.")
    statuses = query_statuses(run.tasks(), skip_unreadable=True)
    rows = [(status, read_results(status.dir, metric, mode)) for status in statuses]
    ranking = common_ranking(results.best for _, results in rows)
    for index, (status, results) in enumerate(rows):
        if results.best and (results.best.metric, results.best.mode) != ranking:
            rows[index] = (status, read_results(status.dir, *ranking))
    return sorted(rows, key=lambda row: rank_key(row[1].best))


def _as_document(row: _ResultRow) -> dict[str, Any]:
    return asdict(row[0]) | asdict(row[1])


def _echo_rows(rows: Sequence[_ResultRow], names: Sequence[str]) -> None:
    """Print a line per trial. `names` are shown besides the hyper-parameters that differ."""
    columns = list(dict.fromkeys([*varying_hparams([results.hparams for _, results in rows]), *names]))
    best = next((results.best for _, results in rows if results.best), None)
    lines = [["RUN", "STATE", "STEP", *columns, *([f"{best.metric} ({best.mode})", "AT"] if best else [])]]
    for status, results in rows:
        values = (results.hparams.get(name) for name in columns)
        hparams = [format_number(v) if isinstance(v, float | None) else str(v) for v in values]
        cells = [status.run_id, str(status.state), format_count(status.step), *hparams]
        if best is not None:
            value, step = (results.best.value, results.best.step) if results.best else (None, None)
            cells += [format_number(value), format_count(step)]
        lines.append(cells)
    echo_table([[one_line(cell) for cell in line] for line in lines])


def _ranking(function: Any) -> Any:
    mode = click.option("--mode", type=click.Choice(get_args(Mode)), help="Minimize or maximize --metric.")
    text = "Metric that ranks the trials.  [default: the metric of the sweep]"
    metric = click.option("--metric", metavar="NAME", help=text)
    return run_argument(json_option(metric(mode(function))))


@command.command("status")
@_ranking
def status(run: Run, metric: str | None, mode: Mode | None, as_json: bool) -> None:
    """Show all trials of the sweep RUN, best first, with their states and causes of failures."""
    record = read_sweep(run.dir)
    sweep_status, rows = run.status(), _rows(run, metric, mode)
    if as_json:
        echo_json(
            {
                "run_id": run.run_id,
                "state": sweep_status.state,
                "states": sweep_status.tasks,
                "sweep": None if record is None else asdict(record),
                "trials": [_as_document(row) for row in rows],
            }
        )
        return
    click.echo(f"{run.run_id}: {sweep_status.words}")
    _echo_rows(rows, list(record.space) if record is not None else ())
    for trial, _ in rows:
        if trial.cause or trial.note:
            click.echo(f"{trial.run_id}: {one_line(trial.cause or trial.note or '')}")
        if trial.cause and trial.log:
            click.echo(f"    log: {short_path(trial.log)}")


@command.command("best")
@_ranking
def best(run: Run, metric: str | None, mode: Mode | None, as_json: bool) -> None:
    """Show the best trial of the sweep RUN, with its hyper-parameters and its best checkpoint."""
    rows = _rows(run, metric, mode)
    if not rows or (value := rows[0][1].best) is None:
        name = f"the metric {metric!r}" if metric else "a metric"
        raise UserError(
            f"No trial of {run.run_id} has logged {name} yet. Use `hpctrain sweep status "
            f"{run_reference(str(run.dir))}` to see their states."
        )
    trial, results = rows[0]
    if as_json:
        echo_json(_as_document(rows[0]))
        return
    click.echo(f"{'trial':<12}{trial.run_id} ({trial.state})")
    for title, text in describe_results(results).items():
        click.echo(f"{title:<12}{one_line(text)}")
    if value.checkpoint is not None:
        handle = run_reference(trial.run_dir)
        click.echo(f"{'checkpoint':<12}{short_path(value.checkpoint)}")
        step = f"--step {value.checkpoint_step}"
        click.echo(f"{'next':<12}{program_name()} checkpoints export {handle} model.safetensors {step}")


@command.command("resume", context_settings={"ignore_unknown_options": True})
@click.pass_context
@_concurrent_option
@run_argument
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def resume(ctx: click.Context, run: Run, concurrent: int | None, options: tuple[str, ...]) -> None:
    """Submit the trials of the sweep RUN that failed, were cancelled, or never ran.

    Completed and active trials are left unchanged. OPTIONS of `hpctrain submit`, such as --time 4:00:00,
    override those of the last submission.
    """
    record = _record_of(run)
    from hpctrain.jobs.runs.run import query_statuses

    statuses = dict(zip(run.dir.tasks(), query_statuses(run.tasks()), strict=True))
    # A trial without a job was never submitted.
    submitted = {index: status for index, status in statuses.items() if status.job_id is not None}
    retried = (RunState.FAILED, RunState.CANCELLED)
    missing = [n for n in range(len(record.trials)) if n not in submitted or submitted[n].state in retried]
    if unknown := [status.run_id for status in submitted.values() if status.state is RunState.UNKNOWN]:
        raise SchedulerError(
            f"Cannot determine whether {unknown[0]} and {pluralize(len(unknown) - 1, 'other trial')} are "
            "still active. Resume the sweep when Slurm responds."
        )
    if not missing:
        raise SpecError(f"Nothing to resume: every trial of {run.run_id} is complete or active.")
    _resubmit(ctx, run, record, missing, concurrent, options)


@command.command("extend", context_settings={"ignore_unknown_options": True})
@click.pass_context
@_over_option
@_random_option
@_concurrent_option
@run_argument
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def extend(
    ctx: click.Context,
    run: Run,
    over: dict[str, str],
    number: int | None,
    concurrent: int | None,
    options: tuple[str, ...],
) -> None:
    """Add trials to the sweep RUN: other values of the grid, or more trials of its sampler.

    Existing trials are not repeated. OPTIONS are those of `hpctrain submit`.
    """
    record = _record_of(run)
    if unknown := [name for name in over if name not in record.space]:
        raise UserError(
            f"The sweep has no hyper-parameter {unknown[0]!r} (--over). Its hyper-parameters are "
            f"{', '.join(record.space)}. To vary {unknown[0]!r}, submit another sweep."
        )
    if record.sampler == "random" and number is None:
        raise click.UsageError("This sweep draws random trials. Add --random N.")
    if record.sampler == "grid" and (not over or number):
        raise click.UsageError("This sweep is a grid. Add values: --over NAME=VALUES.")
    larger = record.with_values(over, Path.cwd()).with_trials(number or 0)
    new = range(len(record.trials), len(larger.trials))
    if not new:
        raise SpecError(f"The sweep {run.run_id} already has all of these trials.")
    _resubmit(ctx, run, larger, new, concurrent, options)


@command.command("cancel")
@runs_argument
@json_option
@click.pass_context
def cancel(ctx: click.Context, /, **arguments: Any) -> None:
    """Cancel all trials of every sweep RUN that have not ended, after saving their states."""
    from hpctrain.cli.control import cancel_command

    ctx.invoke(cancel_command, **arguments)


def _record_of(run: Run) -> SweepRecord:
    if (record := read_sweep(run.dir)) is None:
        raise UserError(f"Run {run.run_id} is not a sweep. Use `hpctrain resume` for other runs.")
    return record


def _resubmit(
    ctx: click.Context,
    run: Run,
    record: SweepRecord,
    indices: Sequence[int],
    concurrent: int | None,
    options: Sequence[str],
) -> None:
    from hpctrain.cli.resume import resubmission
    from hpctrain.jobspec.load_spec import load_spec

    spec = load_spec(run.dir.spec)
    fields = {**to_builtins(spec), "array": None, "args": record.args}
    record = replace(record, concurrent=concurrent or record.concurrent)
    with resubmission(ctx, fields, run.dir, options) as inner:
        os.chdir(spec.workdir)
        if inner.params["follow"] or inner.params["show_config"]:
            raise click.UsageError(
                "Sweeps do not support --follow or --show-config. To follow the logs, use "
                "`hpctrain logs -f RUN`."
            )
        _submit(inner, record, indices)


submit_.params += submit.hidden_options(("show_config", "follow"))
