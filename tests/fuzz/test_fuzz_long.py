"""All parsers: the complete table, and the long fuzzing."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
from helpers.fuzzing import LONG_S, Parser, check_long

import hpctrain

PACKAGE = Path(hpctrain.__file__).parent
MODULES = [
    importlib.import_module(path.stem)
    for path in sorted(Path(__file__).parent.glob("test_fuzz_*.py"))
    if path != Path(__file__)
]
PARSERS: list[Parser] = [parser for module in MODULES for parser in getattr(module, "PARSERS", ())]

PARSER_NAME = re.compile(r"_?(parse|read|from|decode|expand|detect)(_\w+)?|load_spec")
#: Functions with such a name that need no entry in a table, by reason.
EXEMPT = {
    "takes objects, not text": {
        "checkpoint.convert.external_formats.parse_external_state",
        "supervisor.monitors.early_stopping.EarlyStoppingMonitor._read_rule",
        "jobs.executor.job.Job.from_run",
        "jobs.executor.job.JobFailed.from_failure",
        "jobs.options.option.OptionType.from_hint",
        "jobs.options.resolved_options._from_caller",
        "jobs.options.resolved_options._from_files",
        "jobs.runs.run_log_reader.LogPosition.from_json",
        "jobs.site.job_request.JobRequest.from_spec",
        "supervisor.launch.job_step.TaskExit.from_returncode",
        "telemetry.sampling.nvml.GpuActivity.read",
        "telemetry.sampling.nvml.GpuReader.read",
        "telemetry.sampling.nvml.read_driver_facts",
        "telemetry.sampling.nvml.read_field",
        "telemetry.sampling.nvml.read_gpu",
        "training.base.device_selection.parse_devices",
        "training.base.rng._from_tensors",
        "training.data.sampler_plan.SamplerPlan._read",
        "training.data.stream_step_source.ShardBuffers.read",
        "training.determinism.gradient_sum.GradientBucket.read_peaks",
        "training.loop.step_exchange.StepExchange._read_results",
        "training.observe.step_timers.ComputeTimer._read_sample",
    },
    "reads private memory that this job has written": {
        "checkpoint.tier.memory_copies._read_markers",
    },
    "returns the content without interpreting it": {
        "authentication.read_secret",
        "checkpoint.tier.node_files.read_small_files",
        "cluster.env_variables._read",
        "files.read_regular",
        "jobs.executor.function_runs.read_stdout",
        "jobs.runs.rank_logs.RankLogReader._read",
        "jobs.runs.rank_logs.RankLogReader.read_new",
        "jobs.runs.rank_logs.RankLogReader.read_past",
        "jobs.runs.rank_logs.RankLogReader.read_rest",
        "jobs.runs.run_log_reader.RunLogReader.read_rest",
        "jobs.runs.run_log_reader._AttemptLogs.read",
        "jobs.runs.run_log_reader._AttemptLogs.read_rest",
        "runtime.cpu_binding._read_text",
        "telemetry.loggers.dispatcher.LoggerDispatcher._read",
    },
    "part of functions in the tables, or composed of them": {
        "cli.serve._read_logs",
        "cli.report.read_runs",
        "cluster.detection._detect_as",
        "cli.results_table.read_rows",
        "cluster.hostlist._expand",
        "jobs.executor.function_runs.FunctionFailure.from_status",
        "jobs.options.config_files._read_option",
        "jobs.options.config_files._read_yaml",
        "jobs.options.option.OptionType._read",
        "jobs.options.option_parser.parse_option",
        "jobs.options.site_profile._parse",
        "jobs.options.site_profile._parse_scalar",
        "jobs.options.resolved_options._read",
        "jobs.runs.run_log_reader.RunLogReader.read",
        "lightning.HpctrainEnvironment.detect",
        "messages._decode",
        "messages._parse",
        "records.log_tail.RecordTail._parse_lines",
        "rundir.RunStorage.read",
        "sweeps.search_space._parse",
        "runtime.worker._detect_ranks",
        "supervisor.failures.failure_files._parse_corruption",
        "supervisor.launch.srun.SrunStep._read",
        "telemetry.sampling.sampler.TelemetrySampler.read",
    },
    "content is covered by a checksum or an authentication code": {
        "checkpoint.format.dcp_format.TensorReader.read_metadata",
        "checkpoint.format.manifest.read_verified",
    },
    "unpickles files of the own user (tests/test_untrusted_data.py)": {
        "checkpoint.convert.import_checkpoint._read",
        "jobs.executor.function_runs.read_call",
        "jobs.executor.function_runs.read_result",
        "serialization.CallPayload.read",
        "telemetry.loggers.process.LoggerConfig.read",
        "telemetry.loggers.process._read_ending",
        "training.loop.spawn._read_result",
    },
    "set by hpctrain itself for its own processes": {
        "training.saving.checkpoint_schedule.VerificationSteps.from_env",
        "training.saving.checkpoint_schedule._parse",
    },
    "words of the command line, or of the user's own command": {
        "cli.common.DefaultGroup.parse_args",
        "cli.common.parse_pairs",
        "cli.main._LazyGroup.parse_args",
        "cli.on_cluster._parse",
        "cli.on_cluster._parse_options",
        "cli.shell._ShellCommand.parse_args",
        "cli.submit.SubmitCommand.parse_args",
        "cli.sweep._parse_over",
        "runtime.program.program._parse_python_command",
    },
    "every error is caught by the caller and reported": {
        "cli.on_cluster._read_status",
        "cluster.processes._read",
        "supervisor.workers.heartbeat_server.HeartbeatServer._read",
        "telemetry.loggers.csv_file.Csv._read",
    },
}


def find_functions() -> set[str]:
    """Return the functions of the package whose name suggests a parser."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        scopes = [
            (module, tree),
            *((f"{module}.{one.name}", one) for one in tree.body if isinstance(one, ast.ClassDef)),
        ]
        for scope, node in scopes:
            found |= {
                f"{scope}.{each.name}".removeprefix("hpctrain.")
                for each in node.body
                if isinstance(each, ast.FunctionDef) and PARSER_NAME.fullmatch(each.name)
            }
    return found


def test_every_parser_is_fuzzed_or_exempt():
    fuzzed = {str(parser) for parser in PARSERS}
    exempt = [name for names in EXEMPT.values() for name in names]
    assert find_functions() - fuzzed == set(exempt)


@pytest.mark.long
@pytest.mark.timeout(LONG_S + 600)
@pytest.mark.parametrize("parser", PARSERS, ids=str)
def test_fuzzing_for_a_long_time_finds_nothing(parser):
    check_long(parser, LONG_S / len(PARSERS))
