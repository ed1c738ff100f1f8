import json
import sys
from pathlib import Path

import click
import pytest
from helpers import REPOSITORY
from helpers.commands import run_command
from helpers.ssh_cluster import CuttingProxy, Laptop, SshCluster

from hpctrain import sandbox

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
LOCAL = ("--backend", "local", "--ntasks-per-node", "1")

SAVING = """
import pathlib, sys
import hpctrain, torch
from torch.utils.data import TensorDataset

class Line(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        return (self.layer(batch[0]) ** 2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = TensorDataset(torch.ones(20, 1))
hpctrain.Trainer(max_steps=9, global_batch_size=4, checkpoint_every=3).fit(Line(), data)
"""


def commit(folder: Path) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "first"]):
        run_command(["git", *words], cwd=folder)
    return run_command(["git", "rev-parse", "HEAD"], cwd=folder).stdout.strip()


def test_the_code_of_a_repository_is_sent_and_recorded(laptop: Laptop, cluster: SshCluster):
    (laptop.project / ".gitignore").write_text("*.bin\nruns\n")
    head = commit(laptop.project)
    (laptop.project / "data.bin").write_bytes(b"large")
    (laptop.project / "new file.py").write_text("value = 5\n")
    with (laptop.project / "train.py").open("a") as script:
        script.write("print('value', __import__('new file').value)\n")
    args = ("submit", "--on", "alpha", *LOCAL, "--run-dir", "runs/a", "train.py", "3", "--on", "beta")
    result = laptop.hpctrain(*args)
    assert "Run a: job" in result.stdout
    assert "Next: hpctrain --on alpha logs -f a" in result.stdout
    waited = laptop.hpctrain("wait", "a", "--on", "alpha")
    assert "run          a: COMPLETED" in waited.stdout
    logs = laptop.hpctrain("--on=alpha", "logs", "a").stdout
    assert "args ['3', '--on', 'beta']" in logs
    assert "value 5" in logs
    there = cluster.home / "hpctrain" / "project"
    assert not (there / "data.bin").exists()
    record = json.loads((there / "runs" / "a" / "code" / "submission-000.json").read_text())
    assert (record["commit"], record["new_files"]) == (head, ["new file.py"])
    diff = (there / "runs" / "a" / "code" / "submission-000.diff").read_text()
    assert "+print('value', __import__('new file').value)" in diff


def test_deleted_files_and_files_of_parent_folders(laptop: Laptop, cluster: SshCluster):
    (laptop.project / "old.py").write_text("print('old')")
    (laptop.project / "experiments").mkdir()
    (laptop.project / "experiments" / "new.py").write_text("print('new')")
    (laptop.project / "hpctrain.yaml").write_text("name: from-the-file\n")
    commit(laptop.project)
    laptop.hpctrain("submit", "--on", "alpha", *LOCAL, "--dry-run", "old.py")
    there = cluster.home / "hpctrain" / "project"
    (there / "made-there.txt").touch()
    (laptop.project / "old.py").unlink()
    result = laptop.hpctrain("submit", "--on", "alpha", *LOCAL, "--dry-run", "old.py", check=False)
    assert "old.py" in result.stderr
    names = {path.name for path in there.glob("[!.]*")}
    assert names == {"experiments", "hpctrain.yaml", "made-there.txt", "train.py"}
    command = [sys.executable, "-m", "hpctrain", "submit", "--on", "alpha", *LOCAL, "--show-config", "new.py"]
    result = run_command(command, laptop.env, cwd=laptop.project / "experiments")
    assert "from-the-file" in result.stdout


def test_commands_leave_the_input_of_a_loop(laptop: Laptop, cluster: SshCluster):
    laptop.hpctrain("submit", "--on", "alpha", *LOCAL, "--dry-run", "train.py")
    script = "printf 'a\\nb\\nc\\n' | while read word; do echo read; $LIST; done"
    variables = {**laptop.env, "LIST": f"{sys.executable} -m hpctrain list --on alpha"}
    result = run_command(["bash", "-c", script], variables, cwd=laptop.project)
    assert result.stdout.count("read\n") == 3


PIECES = """
import os, pathlib, torch
folder = pathlib.Path(os.environ["HPCTRAIN_RUN_DIR"], "checkpoints")
folder.mkdir(exist_ok=True)
for rank in range(3):
    torch.save({"rank": rank}, folder / f"rank{rank}.pt")
"""


@pytest.mark.extended
def test_pull_copies_all_files_of_a_script(laptop: Laptop, cluster: SshCluster):
    (laptop.project / "train.py").write_text(PIECES)
    laptop.hpctrain("submit", "--on", "alpha", *LOCAL, "--run-dir", "runs/a", "--follow", "train.py")
    laptop.hpctrain("--on", "alpha", "pull", "a")
    copied = laptop.project / "runs" / "a" / "checkpoints"
    assert sorted(path.name for path in copied.glob("*.pt")) == ["rank0.pt", "rank1.pt", "rank2.pt"]
    # Another run of this name must not be overwritten.
    laptop.hpctrain("submit", *LOCAL, "--run-dir", "runs/b", "train.py")
    laptop.hpctrain("wait", "b")
    laptop.hpctrain("submit", "--on", "alpha", *LOCAL, "--run-dir", "runs/b", "--follow", "train.py")
    result = laptop.hpctrain("--on", "alpha", "pull", "b", check=False)
    assert result.returncode == 2
    assert "contains the run in" in result.stderr


def test_exit_codes_and_errors_pass_through(laptop: Laptop, cluster: SshCluster):
    result = laptop.hpctrain("submit", "--on", "alpha", *LOCAL, "missing.py", check=False)
    assert result.returncode == 2
    assert "missing.py" in result.stderr
    (laptop.project / "train.py").write_text("raise SystemExit(3)")
    result = laptop.hpctrain(
        "submit", "--on", "alpha", *LOCAL, "--run-dir", "runs/a", "--follow", "train.py", check=False
    )
    assert result.returncode == 4
    assert "run          a: FAILED" in result.stderr
    result = laptop.hpctrain("--on", "alpha", "logs", "-f", "other", check=False)
    assert result.returncode == 2
    assert "There is no run 'other'" in result.stderr


@pytest.mark.extended
def test_pulls_results_and_newest_checkpoint_over_a_bad_line(laptop: Laptop, cluster: SshCluster):
    (laptop.project / "train.py").write_text(SAVING)
    laptop.hpctrain("submit", "--on", "alpha", *LOCAL, "--run-dir", "runs/a", "--follow", "train.py")
    there = cluster.home / "hpctrain" / "project" / "runs" / "a"
    assert len(list((there / "checkpoints").glob("step-*"))) > 1
    (there / "logs" / "large").write_bytes(bytes(range(256)) * 2000)
    proxy = CuttingProxy(cluster.port, limit_bytes=150_000)
    cluster.close_connection()
    cluster.point_to(proxy.port)
    try:
        result = laptop.hpctrain("--on", "alpha", "pull", "a", timeout=100)
    finally:
        proxy.close()
    assert result.stdout == "Run copied to runs/a, with report.html\n"
    assert "was lost. Reconnecting" in result.stderr
    here = laptop.project / "runs" / "a"
    assert [path.name for path in (here / "checkpoints").glob("step-*")] == ["step-00000009"]
    for name in ("metrics.jsonl", "events.jsonl", "logs/large", "report.html"):
        assert (here / name).read_bytes() == (there / name).read_bytes()
    cluster.point_to(cluster.port)
    (there / "report.html").unlink()
    (there / "report.html").mkdir()
    result = laptop.hpctrain("--on", "alpha", "pull", "a", "copy")
    assert result.stdout == "Run copied to copy\n"
    assert "Warning: cannot write report.html on alpha: " in result.stderr


def test_submits_to_slurm_and_cancels(laptop: Laptop, cluster: SshCluster, slurm: sandbox.Sandbox):
    cluster.write_profile(
        PATH=f"{Path(sys.executable).parent}:$PATH", PYTHONPATH=str(REPOSITORY), **slurm.env
    )
    (laptop.project / "train.py").write_text("import time\nprint('started', flush=True)\ntime.sleep(100)\n")
    options = ("--gpus-per-node", "0", "--ntasks-per-node", "1", "--time", "10", "--run-dir", "runs/a")
    result = laptop.hpctrain("submit", "--on", "alpha", *options, "train.py")
    assert "(slurm), folder runs/a" in result.stdout
    result = laptop.hpctrain("--on", "alpha", "cancel", "a")
    assert "a" in result.stdout
    waited = laptop.hpctrain("--on", "alpha", "wait", "a", check=False)
    assert (waited.returncode, "a: CANCELLED" in waited.stdout) == (4, True)


@pytest.mark.long
def test_setup_installs_hpctrain(laptop: Laptop, cluster: SshCluster):
    packages = cluster.folder / "packages"
    packages.mkdir()
    for path in Path(click.__file__).parents[1].iterdir():
        if "hpctrain" not in path.name:
            (packages / path.name).symlink_to(path)
    cluster.write_profile(
        PATH=f"{sys.base_prefix}/bin:$PATH", PYTHONPATH=str(packages), PIP_NO_DEPS="1", PIP_NO_INDEX="1"
    )
    laptop.env |= {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}
    result = laptop.hpctrain("--on", "alpha", "setup", timeout=110)
    assert f"({cluster.home}/.local/share/hpctrain/venv/bin/python), hpctrain 0.1.0" in result.stdout
    assert "No runs in runs." in laptop.hpctrain("--on", "alpha", "list").stderr


def test_exit_code_255_is_not_a_lost_connection(laptop: Laptop, cluster: SshCluster):
    (cluster.home / "hpctrain" / "project").mkdir(parents=True)
    shell = ("shell", "--on", "alpha", "--backend", "local", "--", "bash", "-c")
    result = laptop.hpctrain(*shell, "exit 255", check=False)
    assert (result.returncode, "was lost" in result.stderr) == (254, False)
    assert laptop.hpctrain(*shell, "kill -TERM $$", check=False).returncode == 143
    shown, code = laptop.on_terminal(
        *shell, "read -p 'Ready? ' it; echo got $it", answers=[("Ready?", "yes")]
    )
    assert (code, "got yes" in shown) == (0, True)
    _, code = laptop.on_terminal(*shell, "read -p 'Ready? ' it; echo", answers=[("Ready?", "\x03")])
    assert code == 130
