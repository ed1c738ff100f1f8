"""Horovod under its own launcher, and errors if it is missing."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import SCRIPTS
from helpers.commands import run_command
from helpers.horovod_version import needs_horovod
from train_with_strategies import train_manually

import hpctrain
from hpctrain.training.strategies import horovod
from hpctrain.training.strategies.horovod import _slot

SCRIPT = SCRIPTS / "train_with_strategies.py"


@pytest.mark.long
@pytest.mark.ranks
@needs_horovod
def test_training_under_horovodrun(tmp_path):
    training = {"strategy": "horovod", "max_steps": 5, "micro_batch_size": 3}
    horovodrun = [Path(sys.executable).with_name("horovodrun"), "--gloo", "-np", "2", "-H", "localhost:2"]
    run_command(
        [*horovodrun, sys.executable, SCRIPT, tmp_path / "out", json.dumps([training])],
        {"OMP_NUM_THREADS": "1"},
        timeout=110,
    )
    (result,) = torch.load(tmp_path / "out", weights_only=True)
    for name, value in train_manually(5).items():
        assert torch.allclose(result["weights"][name], value, rtol=1e-9, atol=1e-12), name


def test_missing_horovod_is_reported_with_the_install_script(monkeypatch):
    monkeypatch.setattr(horovod, "find_spec", lambda name: None)
    with pytest.raises(hpctrain.UserError, match=r"scripts/install_horovod\.sh"):
        hpctrain.Trainer(max_steps=1, strategy="horovod")


def test_horovod_built_for_another_pytorch_is_reported(monkeypatch):
    def fail_import(name: str) -> None:
        raise ImportError("undefined symbol: _ZN5torch")

    monkeypatch.setattr(horovod.importlib, "import_module", fail_import)
    with pytest.raises(
        hpctrain.UserError, match=rf"(?s)PyTorch {re.escape(torch.__version__)}.*_ZN5torch.*install_horovod"
    ):
        horovod._import_horovod()


def test_slot_of_a_rank_on_uneven_nodes():
    placements = [(0, 0), (0, 1), (1, 0)]
    names = ("hostname", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    assert _slot(placements, 1) == dict(zip(names, ("node-0", 1, 3, 1, 2, 0, 1), strict=True))
    assert _slot(placements, 2) == dict(zip(names, ("node-1", 2, 3, 0, 1, 1, 2), strict=True))
