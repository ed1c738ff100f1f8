"""Fuzzing of the parsers of specifications, configuration files, options and templates."""

import json

import click
import yaml
from fuzzing import FOLDER, Parser, parse_mapping, write_file

from hpctrain.cli import resume, verify
from hpctrain.errors import HpctrainError, SpecError, UserError
from hpctrain.jobs.backends.job_request import JobRequest
from hpctrain.jobs.options import config_files, option, option_parser, resolved_options, spec_builder
from hpctrain.jobs.options.option_table import all_options
from hpctrain.jobs.submit import complete_options, render
from hpctrain.jobspec import container, launcher, load_spec, notify, restart_policy
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.slurm import batch_header
from hpctrain.sweeps import search_space
from hpctrain.sweeps.stopping_rules import StoppingRule
from hpctrain.telemetry import hparams

# YAML is parsed in Python, so larger files take seconds.
YAML_BYTES = 1 << 13

CONFIG = """nodes: 2
time: 1-00:00:00
env:
  A: b
restart_policy: {oom: {retries: 0}}
sbatch:
  hint: compute_bound
module: [cuda, gcc]
profiles:
  fast: {qos: high}
site:
  habits: {requeue: no}
"""
SITE = "site:\n  habits: {memory_option: refused, needs_time: yes, containers: [pyxis]}\n"
JOB = JobSpec(
    script="/x.py",
    args=("--lr", "0.1"),
    name="n",
    run_id="r",
    run_dir="/r",
    backend="slurm",
    python="/p",
    workdir="/w",
    time_limit_s=600.0,
    env={"A": "b"},
    directives={"partition": "gpu"},
    restart_policy={"oom": {"retries": 0}},
    notify=notify.NotifyConfig(("https://example.org/x",)),
)
SPEC = yaml.safe_load(JOB.text())


def as_changes(text: str) -> dict:
    return {name: values for name, values in parse_mapping(text).items() if isinstance(values, dict)}


def check_container(text: str) -> str:
    found = container.Container(image=text, runtime="pyxis", mounts=(f"/a:/{text}",))
    found.check({"run folder": "/r"})
    return found.image_name


PARSERS = [
    Parser(
        load_spec.load_spec,
        [json.dumps(SPEC), JOB.text()],
        (SpecError,),
        lambda text: load_spec.load_spec(write_file(text)),
        most_bytes=YAML_BYTES,
    ),
    Parser(
        config_files.read_config_file,
        [CONFIG, SITE],
        (SpecError,),
        lambda text: config_files.read_config_file(write_file(text, "c.yaml"), {"HOME": "/h"}),
        most_bytes=YAML_BYTES,
    ),
    Parser(
        spec_builder._read_nodes,
        ["n1  # fast\nn[2-3],n4\n"],
        (SpecError,),
        lambda text: spec_builder._read_nodes(write_file(text), "exclude"),
    ),
    Parser(
        resume.resubmit_command,
        [json.dumps(SPEC)],
        call=lambda text: resume.resubmit_command(parse_mapping(text)),
    ),
    *(
        Parser(option.OptionType.parse, [example], (ValueError,), all_options()[name].kind.parse)
        for name, example in {"nodes": "2", "requeue": "yes", "time": "30:00", "notify": "x"}.items()
        if name in all_options()
    ),
    Parser(
        resolved_options._from_assignment,
        ["nodes=2", "env.A=b", "sbatch.hint=compute_bound", "qos=a", "restart_policy.oom.retries=0"],
        (SpecError,),
    ),
    Parser(
        option_parser.parse_sbatch_option,
        ["gpu", "nomultithread"],
        (SpecError,),
        lambda text: option_parser.parse_sbatch_option("exclusive", text, "exclusive"),
    ),
    Parser(spec_builder._nodes, ["2:4"], (SpecError,)),
    Parser(spec_builder.parse_gpus, ["h100:8"], (SpecError,)),
    Parser(
        restart_policy.parse_rule_changes,
        ["0", "17"],
        (SpecError,),
        lambda text: restart_policy.parse_rule_changes({"oom.retries": text}),
    ),
    Parser(
        restart_policy.RestartPolicy.with_changes,
        ['{"oom": {"retries": 0}}'],
        (SpecError,),
        lambda text: restart_policy.RestartPolicy.with_changes(as_changes(text), 3),
    ),
    Parser(container.split_list_values, ["a,b"], call=lambda text: container.split_list_values([text])),
    Parser(container.Container.check, ["data:ro", "data"], (SpecError,), check_container),
    Parser(
        notify.NotifyConfig.__post_init__,
        ["https://example.org:80/x", "mail me"],
        (SpecError,),
        lambda text: notify.NotifyConfig(targets=(text,)),
    ),
    Parser(
        launcher.TorchrunConfig.__post_init__,
        ["host:2379", "[::1]:2379"],
        (SpecError,),
        lambda text: launcher.TorchrunConfig(rdzv_backend="etcd", rdzv_endpoint=text),
    ),
    Parser(
        complete_options.resolve_dependency,
        ["afterok:123:124_5,afterany:9", "after:17+5?afterok:18"],
        (HpctrainError,),
        lambda text: complete_options.resolve_dependency(text, FOLDER, {"PATH": "/nonexistent"}, "runs"),
    ),
    Parser(
        batch_header.parse_batch_header,
        ["#SBATCH -N2 --time=1:00 -p gpu # x", '#SBATCH --comment="a b"'],
        (SpecError,),
        lambda text: batch_header.parse_batch_header(text, "t"),
        most_bytes=1 << 14,
    ),
    Parser(
        render._check_script,
        ["#!/bin/sh\n#SBATCH --nodes=2\n#SBATCH -p gpu\npython -m hpctrain.supervisor\n"],
        (SpecError,),
        lambda text: render._check_script(text, ["#SBATCH --nodes=2"], "t", supervised=True),
        most_bytes=1 << 14,
    ),
    Parser(
        JobRequest.memory_per_node_mib.fget,
        ["32G"],
        call=lambda text: JobRequest(JOB, {"mem": text}, {}).memory_per_node_mib,
    ),
    Parser(
        search_space.parse_space,
        ["1e-4,3e-4", "0:5:2", "log:1e-5..1e-1", "-3..7"],
        (UserError,),
        lambda text: search_space.parse_space({"lr": text}, FOLDER),
        slow=[("", "-3..7", "\n")],
    ),
    Parser(
        StoppingRule.parse,
        ["median", "asha:3"],
        (UserError,),
        lambda text: StoppingRule.parse(text, "val_loss", "min", 10),
    ),
    Parser(
        hparams.parse_hparams,
        ["--lr 1e-3 --warm-up --name=a b=2 +c.d=x"],
        call=lambda text: hparams.parse_hparams(text.split(" ")),
    ),
    Parser(verify._parse_steps, ["1:100", "101:"], (click.UsageError,)),
]
