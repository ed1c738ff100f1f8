"""Code that `torch.compile` generated is loaded from the run folder after a restart."""

import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import SCRIPTS
from helpers.training_runs import Run

SCRIPT = SCRIPTS / "train_compiled.py"
PROGRAMS = {
    "Trainer": [str(SCRIPT), "trainer"],
    "shell script": ["--", "/bin/sh", "-c", f"{sys.executable} {SCRIPT} loop"],
}


def train(path: Path, program: str, **variables: str) -> Run:
    # Inductor shall neither precompile headers and probe the compiler, which takes long, nor start processes.
    quick = {"CPP_CACHE_PRECOMPILE_HEADERS": "0", "VEC_ISA_OK": "1", "COMPILE_THREADS": "1"}
    variables |= {f"TORCHINDUCTOR_{name}": value for name, value in quick.items()}
    run = Run(path, {"LOCAL_FOLDER": str(path.parent), "OMP_NUM_THREADS": "1", **variables})
    run.hpctrain("submit", "--backend=local", f"--run-dir={path}", *PROGRAMS[program])
    assert run.wait() == 0, run.describe()
    return run


def counters(run: Run, attempt: int) -> dict[str, int]:
    return json.loads((run.path / f"counters-{attempt}.json").read_text())


def result(run: Run) -> object:
    return run.losses() or (run.path / "losses").read_text()


@pytest.mark.skipif(not hasattr(torch.compiler, "save_cache_artifacts"), reason="needs torch 2.7")
@pytest.mark.extended
@pytest.mark.timeout(400)
@pytest.mark.parametrize("program", PROGRAMS)
def test_restarted_program_compiles_nothing_again_and_ends_bit_for_bit_the_same(
    tmp_path, monkeypatch, program
):
    # Inductor, imported by another test of this process, sets this to a folder that earlier runs have filled.
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    run = train(tmp_path / "killed", program, KILL="1")
    compiled, loaded = counters(run, 0), counters(run, 1)
    assert compiled["fxgraph_cache_miss"] == 2
    assert "fxgraph_cache_hit" not in compiled
    assert loaded["fxgraph_cache_hit"] == 2
    assert "fxgraph_cache_miss" not in loaded
    assert len(list(run.dir.compile_cache.glob("*/0-*"))) == 1
    undisturbed = train(tmp_path / "undisturbed", program)
    assert counters(undisturbed, 0)["fxgraph_cache_miss"] == 2
    assert result(run) == result(undisturbed)
