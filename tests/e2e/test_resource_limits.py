"""Full temporary folders, few file descriptors, closed terminals and deleted scripts."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress

import pytest
from helpers.commands import run_command
from helpers.disks import mounted_disk
from helpers.processes import assert_no_process_left
from helpers.terminal import Terminal
from helpers.training_runs import Run, submit_script

HPCTRAIN = [sys.executable, "-m", "hpctrain", "submit", "--backend=local", "--run-dir=run"]
PRINT_SLOWLY = "import time\nfor i in range(40):\n    print('line', i, flush=True)\n    time.sleep(0.1)\n"

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def test_closing_the_terminal_of_follow_keeps_the_run_alive(tmp_path):
    (tmp_path / "train.py").write_text(PRINT_SLOWLY)
    run = Run(tmp_path / "run", {})
    with Terminal([*HPCTRAIN, "--follow", "train.py"], tmp_path, {}) as terminal:
        terminal.expect("line 3")
    assert run.wait() == 0
    assert "line 39" in run.dir.rank_log(0, 0).read_text()
    assert_no_process_left(run.path)


def test_snapshot_of_script_survives_its_deletion(tmp_path):
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "train.py").write_text(PRINT_SLOWLY)
    run_command(["git", "init", "--quiet", repository])
    run = submit_script(tmp_path, repository / "train.py")
    shutil.rmtree(repository)
    assert run.wait() == 0, run.describe()


def test_run_completes_with_a_full_temporary_folder(tmp_path):
    with mounted_disk(tmp_path / "tmp", "size=64k") as disk:
        with suppress(OSError):
            (disk / "filler").write_bytes(bytes(1 << 17))
        assert shutil.disk_usage(disk).free == 0
        run = submit_script(tmp_path, PRINT_SLOWLY, env={"TMPDIR": str(disk)})
        assert run.wait() == 0, run.describe()
        run.hpctrain("report", str(run.path), "--json")
        assert_no_process_left(run.path)


def test_run_completes_with_few_file_descriptors(tmp_path):
    (tmp_path / "train.py").write_text(PRINT_SLOWLY)
    run = Run(tmp_path / "run", {})
    run_command(["bash", "-c", 'ulimit -n 64; exec "$@"', "bash", *HPCTRAIN, "train.py"], cwd=tmp_path)
    assert run.wait() == 0, run.describe()
    assert_no_process_left(run.path)
