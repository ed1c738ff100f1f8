"""`--stage` and `--stage-environment` on simulated nodes and on Slurm."""

import json
import os
import re
import shutil
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers import REPOSITORY
from helpers.commands import run_command
from helpers.run_histories import make_spec
from helpers.training_runs import Run, submit_script
from helpers.waiting import wait_for

from hpctrain.files import make_folder, read_json, try_lock
from hpctrain.jobs.runs.run_log_reader import describe_event
from hpctrain.record_types import Event, to_record
from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDir
from hpctrain.supervisor.workers.node_steps import StagePlan

sys.path.append(str(REPOSITORY / "benchmarks"))
from stage import PACKAGES, count_operations, make_environment, start
from stage import SCRIPT as IMPORTING_SCRIPT

#: Reads the copies; the first attempt is killed.
SCRIPT = """
import os, signal, sys
from pathlib import Path

folder = Path(os.environ["HPCTRAIN_STAGE"])
assert sys.argv[1] == f"--data={folder}/data", sys.argv
print("read", (folder / "data/a.txt").read_text(), (folder / "packed/source/a.txt").read_text())
if os.environ["HPCTRAIN_ATTEMPT"] == "0" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a.txt").write_text("content")
    with tarfile.open(tmp_path / "packed.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "source", "source")
    return tmp_path


def submit(folder: Path, shape: list[str], env=None) -> Run:
    options = [*shape, "--independent-ranks", "--standby-workers=never"]
    options += [f"--stage={folder / 'source:data'}", f"--stage={folder / 'packed.tar.gz'}"]
    return submit_script(folder, SCRIPT, "--data={stage}/data", options=options, env=env)


def staged_folder(run: Run, environ: Mapping[str, str] = os.environ) -> Path:
    spec = make_spec(run.path, backend="local", python=sys.executable, stage={"data": "/data"})
    plan = StagePlan.create(spec, environ)
    assert plan is not None
    return Path(plan.folder)


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("file/stage", "Not a directory: '{}'"),
        ("link", "{} is a symbolic link, not a folder. Remove this symbolic link, or set TMPDIR"),
    ],
)
def test_error_before_the_first_copy_names_no_copy(folder, stage, message):
    (folder / "file").touch()
    (folder / "link").symlink_to(folder / "source")
    plan = {"folder": str(folder / stage), "sources": {"data": str(folder / "source")}, "packs": None}
    env = {**os.environ, "SLURM_NODEID": "0", RUN_DIR_VARIABLE: str(folder), ATTEMPT_VARIABLE: "0"}
    command = [sys.executable, "-P", "-m", "hpctrain.runtime.stage_node", json.dumps(plan)]
    assert run_command(command, env, check=False).returncode == 1
    error = read_json(RunDir(folder).staging_result(0, 0))["error"]
    assert re.match(f"cannot stage files: {message.format(folder / stage)}", error)


def test_files_are_staged_once_on_slurm(slurm, folder):
    run = submit(folder, ["--nodes", "2", "--ntasks-per-node", "1"], slurm.env)
    assert run.wait() == 0
    first, second = run.events("staged")
    # The simulated nodes share a disk.
    assert (first["reused"], first["bytes"]) == (2, 14)
    assert (second["reused"], second["bytes"], second["digests"]) == (4, 0, first["digests"])
    for rank in (0, 1):
        assert "read content content" in run.dir.rank_log(1, rank).read_text()
    assert not staged_folder(run).exists()
    assert not run.dir.staging_result(0, 0).parent.exists()
    assert "staged 0 B in " in str(describe_event(to_record(second, Event)))
    assert "; 4 copies reused, " in run.dir.supervisor_log.read_text()


def test_cancelled_while_staging(folder):
    copies = staged_folder(Run(folder / "run", {}))
    make_folder(copies, private=True)
    lock = try_lock(copies / ".lock")
    assert lock is not None
    try:
        run = submit(folder, ["--backend", "local"])
        log = run.dir.supervisor_log
        wait_for(lambda: log.exists() and "staging on" in log.read_text(), 60, "the staging")
        run.hpctrain("cancel", str(run.path))
        assert run.wait() == 4
    finally:
        os.close(lock)
    assert run.events("finished")[0]["state"] == "CANCELLED"
    assert not run.events("staged")
    assert not staged_folder(run).exists()


@pytest.mark.long
def test_start_from_the_staged_environment_has_few_file_operations(tmp_path):
    if not shutil.which("strace") or run_command(["strace", "true"], check=False).returncode:
        pytest.skip("strace may not trace processes here")
    # A pretended shared file system with an environment without PyTorch.
    shared = tmp_path / "shared"
    make_environment(shared / "venv", PACKAGES)
    (shared / "code").mkdir()
    (shared / "code/train.py").write_text(IMPORTING_SCRIPT.replace("torch", "jinja2"))
    run_command(["git", "init", "-q", shared / "code"])
    unstaged = start(shared, "not-staged", staged=False, traced=True)
    assert unstaged["prefix"] == str(shared / "venv")
    assert count_operations(unstaged, shared) > 200
    staged = start(shared, "staged", staged=True, traced=True)
    assert not staged["prefix"].startswith(str(shared))
    assert staged["module"].startswith(staged["prefix"])
    assert staged["script"].startswith(str(Path(staged["prefix"]).parents[1] / ".code"))
    assert count_operations(staged, shared) <= 50
    assert not Path(staged["prefix"]).exists()
    (pack,) = (shared / "runs").glob(".environments-*/*.tar")
    packed_at = pack.stat().st_ino
    start(shared, "staged-again", staged=True)
    assert pack.stat().st_ino == packed_at
