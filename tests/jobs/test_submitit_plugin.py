"""hpctrain as a plugin of submitit and of Hydra's submitit launcher."""

import importlib
import inspect
import os
import re
import sys
import tomllib

import pytest
import submitit
from helpers import REPOSITORY
from helpers.commands import environment, run_command
from helpers.processes import run_processes
from helpers.waiting import wait_for
from submitit.core import plugins
from submitit.slurm.slurm import _make_sbatch_string

from hpctrain import Executor
from hpctrain.errors import SpecError
from hpctrain.jobs.executor.executor import to_options
from hpctrain.jobs.runs.run import find_run
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.jobspec.restart_policy import parse_rule_changes
from hpctrain.slurm.states import RunState

#: They start many processes or trainings, so `make test-fast` leaves them out.
pytestmark = pytest.mark.slow

SUBMITITS = {*inspect.signature(_make_sbatch_string).parameters, *submitit.AutoExecutor._typed_parameters()}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Folder with the entry points of pyproject.toml, as an installation has them."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    entries = project["entry-points"]["submitit"]
    folder = tmp_path / "site" / "hpctrain-0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: hpctrain\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[submitit]", *lines, ""]))
    monkeypatch.syspath_prepend(folder.parent)
    importlib.invalidate_caches()
    for cached in (plugins._get_plugins, plugins.get_executors, plugins.get_job_environments):
        cached.cache_clear()
    yield folder.parent
    for cached in (plugins._get_plugins, plugins.get_executors, plugins.get_job_environments):
        cached.cache_clear()


@pytest.fixture
def auto(installed, tmp_path, fake_interpreter):
    return submitit.AutoExecutor(
        tmp_path / "runs" / "%j",
        cluster="hpctrain",
        hpctrain_cluster="local",
        hpctrain_code_snapshot=False,
        hpctrain_max_num_timeout=5,
    )


def add(a: int, b: int = 0) -> int:
    return a + b


def test_auto_executor_submits_runs(auto, tmp_path):
    auto.update_parameters(
        timeout_min=90, tasks_per_node=2, mem_gb=1.5, stderr_to_stdout=False, slurm_partition="ignored"
    )
    auto.update_parameters(hpctrain_signal_delay_s=100, hpctrain_timeout_min=60)
    job = auto.submit(add, 1, b=2)
    job.wait()
    assert job.run.dir.path.parent == tmp_path / "runs"
    assert (job.state, job.num_tasks) == ("COMPLETED", 2)
    spec = load_spec(job.run.dir.spec)
    assert (spec.time_limit_s, spec.stop_before_limit_s, spec.directives) == (3600, 100, {"mem": "1536M"})
    assert spec.restart_policy == parse_rule_changes({"time-limit.retries": "5"})


def test_srun_args_and_teardown_reach_the_batch_script(auto, monkeypatch, fake_slurm):
    monkeypatch.setenv("PATH", fake_slurm.environ["PATH"])
    auto.update_parameters(
        hpctrain_backend="slurm", hpctrain_srun_args=["--cpu-bind=cores"], hpctrain_teardown=["rm -f x"]
    )
    run = auto.submit(add, 1).run.dir
    assert load_spec(run.spec).srun_args == ("--cpu-bind=cores",)
    lines = run.job_script.read_text().splitlines()
    assert any("--cpu-bind=cores" in line for line in lines if line.startswith("#   "))
    assert lines[-2:] == ["rm -f x", 'exit "${hpctrain_status:-0}"']


def test_plugin_does_not_affect_other_clusters(installed, tmp_path, monkeypatch):
    assert submitit.AutoExecutor(tmp_path).cluster in ("slurm", "local")
    monkeypatch.setattr(submitit.SlurmExecutor, "affinity", classmethod(lambda _: 1))
    slurm = submitit.AutoExecutor(tmp_path, cluster="slurm")
    with pytest.warns(UserWarning, match="Use 'slurm_partition'"):
        slurm.update_parameters(partition="gpu")
    assert slurm._executor.parameters == {"partition": "gpu"}


def test_debug_calls_the_function_in_this_process(tmp_path):
    job = Executor(tmp_path, cluster="debug").submit(os.getpid)
    assert job.results() == [os.getpid()]


def test_parameters_of_submitit_become_options(tmp_path):
    executor = Executor(
        tmp_path, sbatch={"hint": "nomultithread"}, restart_policy={"oom": {"retries": 0}}, ntasks_per_node=4
    )
    executor.update_parameters(
        slurm_wckey="w",
        slurm_gpus_per_task=1,
        slurm_cpus_per_gpu=3,
        slurm_use_srun=True,
        slurm_array_parallelism=7,
        slurm_additional_parameters={"mail-user": "me", "job-name": "n", "contiguous": True, "prefer": 1},
    )
    executor.update_parameters(max_num_timeout=1)
    assert to_options(executor.parameters) == (
        {
            "ntasks_per_node": 4,
            "gpus_per_task": 1,
            "cpus_per_task": 3,
            "mail_user": "me",
            "name": "n",
            "contiguous": True,
            "prefer": 1,
            "wckey": "w",
            "sbatch": {"hint": "nomultithread"},
            "restart_policy": {"time-limit.retries": 1, "oom": {"retries": 0}},
        },
        7,
    )


@pytest.mark.parametrize(
    ("parameters", "cpus"),
    [
        ({"gpus_per_node": 8}, 3),
        ({"gpus_per_node": 8, "tasks_per_node": 2}, 12),
        ({"gpus_per_task": 4}, 12),
        ({"tasks_per_node": 2}, 3),
    ],
)
def test_cpus_per_gpu_are_those_of_all_gpus_of_a_rank(tmp_path, parameters, cpus):
    executor = Executor(tmp_path, cpus_per_gpu=3, **parameters)
    assert to_options(executor.parameters)[0]["cpus_per_task"] == cpus


def test_documentation_lists_all_parameters_of_submitit(tmp_path):
    table = (REPOSITORY / "docs/submitit.md").read_text().partition("| submitit | hpctrain |")[2]
    rows = [row.split(" | ", 1) for row in table.partition("\n\n")[0].splitlines()[2:]]
    effects = {name: effect for names, effect in rows for name in re.findall(r"`(\w+)`", names)}
    internal = {"command", "folder", "map_count"}
    assert effects.keys() == SUBMITITS - internal | {"max_num_timeout", "max_pickle_size_gb", "python"}
    for name, effect in effects.items():
        if effect.startswith("rejected:"):
            with pytest.raises(SpecError):
                Executor(tmp_path).update_parameters(**{name: None})
        else:
            Executor(tmp_path).update_parameters(**{name: None})


def test_hydra_submits_a_multirun_without_waiting(tmp_path):
    """The jobs wait for a file that does not exist yet."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    app = REPOSITORY / "tests/scripts/hydra_app.py"
    setup = f"while [ ! -e {tmp_path}/go ]; do sleep 0.1; done"
    done = run_command(
        [
            *(sys.executable, app, "--multirun", "+lr=1,2", "hydra.sweep.dir=sweep"),
            *("hydra/launcher=hpctrain", "hydra.launcher.wait=false", f"hydra.launcher.setup=['{setup}']"),
            *("+hydra.launcher.backend=local", "+hydra.launcher.code_snapshot=false"),
        ],
        cwd=tmp_path,
        env={**environment(), "PYTHONPATH": str(REPOSITORY)},
    )
    (array,) = (tmp_path / "sweep" / "runs").iterdir()
    assert f"#1: +lr=2, {array}/task-1" in done.stdout
    run = find_run(str(array), tmp_path, environment())
    assert run.status().state is RunState.PENDING
    run.cancel()
    assert run.wait_for_end(timeout=120).state is RunState.CANCELLED
    (tmp_path / "go").touch()
    wait_for(lambda: not run_processes(array), 60, "the end of the job script")
