"""Directives on a real Slurm: each must arrive as given, character by character."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.commands import environment, run_command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain import sandbox
from hpctrain.jobs.submit.render import render
from hpctrain.jobspec.job_spec import JobSpec

#: All characters that a line of a script can contain; control characters are refused.
texts = st.text(
    st.characters(exclude_categories=["Cs"], min_codepoint=0x20, exclude_characters="\x7f"),
    min_size=1,
    max_size=40,
)
live = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# Free text has its own line; all other fields contain no blanks.
FREE_TEXTS = {
    "JobName": r"^JobId=\d+ JobName=(.*)$",
    "Comment": r"^   Comment=(.*)$",
    "MailUser": r"^   MailUser=(.*?)(?: MailType=\S+)?$",
    "WorkDir": r"^   WorkDir=(.*)$",
    "StdOut": r"^   StdOut=(.*)$",
}


class HeldJobs:
    """Submit jobs that never start, and cancel them."""

    def __init__(self, env: dict[str, str], folder: Path) -> None:
        self.environ = environment(env)
        self.folder = folder

    def submit(self, spec: JobSpec) -> dict[str, str]:
        """Return Slurm's fields of the job from our script."""
        script = self.folder / "job.sbatch"
        script.write_text(render(spec))
        result = run_command(["sbatch", "--hold", "--parsable", script], self.environ, check=False)
        assert result.returncode == 0, f"{result.stderr}\n{script.read_text()}"
        job = result.stdout.strip()
        try:
            output = run_command(["scontrol", "show", "job", job], self.environ).stdout
        finally:
            run_command(["scancel", job], self.environ)
        fields = dict(re.findall(r"(\S+?)=(\S*)", output))
        # Newer versions print gres/gpu for gres:gpu, and have a separate field for this value.
        fields = {name: value.replace("gres:", "gres/") for name, value in fields.items()}
        fields.setdefault("Exclusive", fields["OverSubscribe"])
        for name, pattern in FREE_TEXTS.items():
            if match := re.search(pattern, output, re.MULTILINE):
                fields[name] = match[1]
        return fields


@pytest.fixture
def held_jobs(slurm, tmp_path) -> HeldJobs:
    return HeldJobs(slurm.env, tmp_path)


@pytest.fixture
def make(make_spec, tmp_path) -> Callable[..., JobSpec]:
    return lambda **fields: make_spec(**{"run_dir": str(tmp_path), **fields})


@live
@given(name=texts, comment=texts, mail_user=texts)
def test_texts_arrive_character_by_character(held_jobs, make, name, comment, mail_user):
    directives = {"comment": comment, "mail-user": mail_user, "mail-type": "END"}
    fields = held_jobs.submit(make(name=name, directives=directives))
    assert (fields["JobName"], fields["MailUser"]) == (name, mail_user)
    # Slurm 22.05 prints another blank.
    assert fields["Comment"] in (comment, f"{comment} ")


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"nodes": 2, "ntasks_per_node": 3}, {"NumNodes": "2-2", "NumTasks": "6"}),
        ({"cpus_per_task": 3}, {"CPUs/Task": "3"}),
        ({"gpus_per_node": 2}, {"TresPerNode": "gres/gpu:2"}),
        ({"gpus_per_node": 2, "gpu_request_style": "gpus-per-node"}, {"TresPerNode": "gres/gpu:2"}),
        ({"time_limit_s": 5400.0}, {"TimeLimit": "01:30:00"}),
        ({"array": "0-7:2%3"}, {"ArrayTaskId": "0,2,4,6%3", "ArrayTaskThrottle": "3"}),
    ],
)
def test_job_size_arrives(held_jobs, make, fields, shown):
    assert held_jobs.submit(make(**fields)).items() >= shown.items()


@pytest.mark.parametrize(
    ("directives", "shown"),
    [
        ({"partition": "urgent"}, {"Partition": "urgent"}),
        ({"account": "physics"}, {"Account": "physics"}),
        ({"mem": "100"}, {"MinMemoryNode": "100M"}),
        ({"mem": "0"}, {"MinMemoryNode": "0"}),
        ({"mem-per-cpu": "1G"}, {"MinMemoryCPU": "1G"}),
        ({"exclusive": ""}, {"OverSubscribe": "NO"}),
        ({"exclusive": "user"}, {"Exclusive": "USER"}),
        ({"oversubscribe": ""}, {"OverSubscribe": "YES"}),
        ({"begin": "2099-01-02T03:04:05"}, {"EligibleTime": "2099-01-02T03:04:05"}),
        ({"nice": "100"}, {"Nice": "100"}),
        ({"nice": "-100"}, {"Nice": "-100"}),
        ({"mail-type": "END,FAIL"}, {"MailType": "END,FAIL"}),
        ({"dependency": "singleton"}, {"Dependency": "singleton(unfulfilled)"}),
        ({"switches": "1@02:00"}, {"Switches": "1@00:02:00"}),
        ({"contiguous": ""}, {"Contiguous": "1"}),
        ({"threads-per-core": "1"}, {"ReqB:S:C:T": "0:0:*:1"}),
    ],
)
def test_directive_arrives(held_jobs, make, directives, shown):
    assert held_jobs.submit(make(directives=directives)).items() >= shown.items()


@pytest.fixture(scope="module")
def site(slurm) -> Iterator[sandbox.Sandbox]:
    """Nodes with typed GPUs, a feature, licences and a reservation."""
    name = f"pytest-d{os.getpid()}"
    try:
        box = sandbox.up(name, nodes=2, gpu_type="h100", settings=["Licenses=fluent:8"])
        feature = f"scontrol update NodeName={name}-1 AvailableFeatures=fast,big ActiveFeatures=fast,big"
        run_command(feature.split(), box.env)
        reservation = "scontrol create reservation=ours Users=root Nodes=ALL Duration=60 StartTime=now"
        run_command(reservation.split(), box.env)
        yield box
    finally:
        sandbox.down(name)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"gpus_per_node": 2, "gpu_type": "h100"}, {"TresPerNode": "gres/gpu:h100:2"}),
        (
            {"gpus_per_node": 2, "gpu_type": "h100", "gpu_request_style": "gpus-per-node"},
            {"TresPerNode": "gres/gpu:h100:2"},
        ),
        ({"directives": {"licenses": "fluent:2"}}, {"Licenses": "fluent:2"}),
        ({"directives": {"constraint": "fast&big"}}, {"Features": "fast&big"}),
        ({"directives": {"reservation": "ours"}}, {"Reservation": "ours"}),
        ({"directives": {"mem-per-gpu": "1G"}, "gpus_per_node": 1}, {"MemPerTres": "gres/gpu:1024"}),
    ],
)
def test_site_specific_directive_arrives(site, tmp_path, make, fields, shown):
    assert HeldJobs(site.env, tmp_path).submit(make(**fields)).items() >= shown.items()
