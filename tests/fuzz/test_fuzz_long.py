"""Fuzzing of all parsers, and the completeness of their tables."""

import ast
import re
from pathlib import Path

import cluster_parsers
import pytest
import record_parsers
import slurm_parsers
import spec_parsers
import text_parsers
from fuzzing import LONG_S, Parser, check_errors, check_long, check_time

import hpctrain

PACKAGE = Path(hpctrain.__file__).parent
MODULES = (cluster_parsers, record_parsers, slurm_parsers, spec_parsers, text_parsers)
PARSERS: list[Parser] = [parser for module in MODULES for parser in module.PARSERS]

PARSER_NAME = re.compile(r"_?(parse|read|from|decode|expand|detect)(_\w+)?|load_spec")
#: Functions with such a name that need no entry in a table, by reason.
EXEMPT = {
    "takes objects, not text": """
        checkpoint.convert.external_formats.parse_external_state
        checkpoint.interval.InterruptionHistory.from_events jobs.executor.job.Job.from_run
        jobs.options.option.OptionType.from_hint
        jobs.options.resolved_options._from_caller jobs.options.resolved_options._from_files
        jobs.runs.run_log_reader.LogPosition.from_json jobs.backends.job_request.JobRequest.from_spec
        supervisor.monitors.early_stopping_monitor.EarlyStoppingMonitor._read_rule
        telemetry.accounting.time_breakdown.TimeBreakdown.from_records
        telemetry.accounting.timeline_events.read_timeline_events telemetry.report.attempts.read_attempts
        telemetry.report.metric_curves.MetricCurves.from_records telemetry.report.run_results.read_checkpoints
        training.observe.loss_guard.read_excluded_steps sweeps.stopping_rules.TrialReport.from_line
        slurm.srun_step.TaskExit.from_returncode telemetry.sampling.nvml.GpuActivity.read
        telemetry.sampling.nvml.GpuReader.read telemetry.sampling.nvml.read_driver_facts
        telemetry.sampling.nvml.read_gpu
        training.base.device_selection.parse_devices training.base.rng._from_tensors
        training.data.sampler_plan.SamplerPlan._read training.data.stream_step_source.StreamStepSource._read
        training.determinism.gradient_sum.GradientBucket.read_peaks
        training.loop.step_exchange.StepExchange._read_results
        training.observe.step_timers.ComputeTimer._read_sample
    """,
    "reads private memory that this job has written": """
        checkpoint.tier.memory_copies._read_markers
    """,
    "returns the content without interpreting it": """
        authentication.read_secret checkpoint.tier.local_tier.read_small_files
        cluster.env_variables._read files.read_regular
        jobs.runs.run_log_reader.RankLogReader._read jobs.runs.run_log_reader.RankLogReader.read_new
        jobs.runs.run_log_reader.RankLogReader.read_past jobs.runs.run_log_reader.RankLogReader.read_rest
        jobs.runs.run_log_reader.RunLogReader.read_rest jobs.runs.run_log_reader.RunLogReader._read_logs
        runtime.cpu_binding._read_text
    """,
    "part of functions in the tables, or composed of them": """
        jobs.options.batch_options.BatchScript.read slurm.batch_header._parse_words
        cli.report.read_runs cli.serve._read_logs cluster.detection._detect_as
        cluster.hostlist._expand jobs.executor.job.JobFailed.from_status
        jobs.options.config_files._read_habits jobs.options.config_files._read_option
        jobs.options.config_files._read_yaml jobs.options.option.OptionType._parse_text
        jobs.options.option_parser.parse_option jobs.options.resolved_options._read
        jobs.options.resolved_options._from_variables
        jobs.runs.run_log_reader.RunLogReader.read lightning.HpctrainEnvironment.detect
        checkpoint.io.messages._decode
        checkpoint.io.messages._parse records.log_tail.RecordTail._parse_lines
        files.decode_line files.read_json_lines files.read_lines rundir.RunDir.read_events
        rundir.RunStorage.read_events telemetry.report.run_results.read_report_records
        records.log_tail.RecordTail.read_in_parts supervisor.buffered_storage.BufferedStorage.read_events
        record_types.read_record record_types.read_records
        runtime.worker._detect_ranks
        telemetry.report.run_results._read_sweep_ranking slurm.srun_step.SrunStep._read
        sweeps.search_space._parse
        telemetry.sampling.sampler.TelemetrySampler.read
    """,
    "content is covered by a checksum or an authentication code": """
        checkpoint.format.dcp_format.TensorReader.read_metadata checkpoint.format.manifest.read_verified
    """,
    "unpickles files of the own user (tests/test_untrusted_data.py)": """
        checkpoint.convert.import_export._read jobs.executor.job._read_result
        records.call_payload.CallPayload.read
        telemetry.loggers.dispatcher.LoggerConfig.read telemetry.loggers.dispatcher._read_ending
    """,
    "set by hpctrain itself for its own processes": """
        training.saving.checkpoint_schedule.VerificationSteps.from_env
        training.saving.checkpoint_schedule._parse
    """,
    "words of the command line, or of the user's own command": """
        cli.common.DefaultGroup.parse_args cli.common.parse_pairs cli.main._LazyGroup.parse_args
        cli.on_login_node._parse cli.on_login_node._parse_options
        cli.submit.SubmitCommand.parse_args cli.sweep._parse_over
        runtime.program.program._parse_python_command
    """,
    "every error is caught by the caller and reported": """
        cluster.processes._read
        supervisor.workers.heartbeat_server.HeartbeatServer._read telemetry.loggers.trackers.Csv._read
    """,
}


def find_functions() -> set[str]:
    """Return the functions of the package whose name suggests a parser."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for scope, body in ((module, tree.body), *((f"{module}.{node.name}", node.body) for node in classes)):
            names |= {
                f"{scope}.{node.name}".removeprefix("hpctrain.")
                for node in body
                if isinstance(node, ast.FunctionDef) and PARSER_NAME.fullmatch(node.name)
            }
    return names


@pytest.mark.parametrize("parser", PARSERS, ids=str)
def test_parser_raises_only_documented_errors(parser):
    check_errors(parser)


@pytest.mark.parametrize("parser", PARSERS, ids=str)
def test_parser_takes_linear_time(parser):
    check_time(parser)


def test_every_parser_is_fuzzed_or_exempt():
    fuzzed = {str(parser) for parser in PARSERS}
    exempt = " ".join(EXEMPT.values()).split()
    assert find_functions() - fuzzed == set(exempt)


@pytest.mark.long
@pytest.mark.timeout(LONG_S + 600)
@pytest.mark.parametrize("parser", PARSERS, ids=str)
def test_fuzzing_for_a_long_time_finds_nothing(parser):
    check_long(parser, LONG_S / len(PARSERS))
