"""Every strategy with every feature: it trains, or is refused with the reason.

docs/strategies.md has the same table.
"""

import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from helpers import REPOSITORY, SCRIPTS
from helpers.fork_server import run_forked
from helpers.horovod_version import is_horovod_loadable
from train_with_strategies import train_alternately, train_manually

SCRIPT = SCRIPTS / "train_with_strategies.py"

VARIABLES = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}

STRATEGIES = ["ddp", "ddp2", "dp", "zero1", "zero2", "zero3", "horovod", "pipeline"]
#: Strategies that every run tests; `--long` adds the others.
ALWAYS_TESTED = {"ddp", "zero3", "pipeline"}
#: Features, in the terms of the table.
FEATURES: dict[str, dict] = {
    "bf16-mixed": {"precision": "bf16-mixed"},
    "16-mixed": {"precision": "16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "micro-batches": {"micro_batch_size": 2},
    "several optimizers": {"optimizers": 2},
    "alternating optimizers": {"optimizers": 2, "turns": True},
    "batch norm": {"norm": True},
    "a stream": {"stream": True},
    "data workers": {"num_workers": 1},
    "clipping": {"gradient_clip_norm": 0.1, "gradient_clip_value": 0.05},
    "activation checkpointing": {"recompute": ["net.*"]},
    "`compile`": {"compile": {"backend": "eager"}},
}
#: Features that start processes or compile.
SLOW = {"data workers", "`compile`"}
#: Refused combinations. All others work.
REFUSED = {
    ("horovod", "bf16-true"): "cannot send bfloat16",
    ("pipeline", "16-mixed"): "before the loss can be scaled",
    ("pipeline", "a stream"): "needs the complete batch on every rank",
    **{
        (strategy, "alternating optimizers"): "updates all parameters together"
        for strategy in ("zero2", "zero3", "horovod", "pipeline")
    },
}


@cache
def outcomes(strategy: str, features: tuple[str, ...]) -> dict[str, dict]:
    """Return the outcome of each feature on two ranks; dp uses one process."""
    trainings = [{"strategy": strategy, "max_steps": 2, **FEATURES[feature]} for feature in features]
    with TemporaryDirectory() as folder:
        out = Path(folder, "out")
        if strategy == "dp":
            trainings = [{**training, "devices": 2} for training in trainings]
        ranks = 1 if strategy == "dp" else 2
        run_forked(SCRIPT, [str(out), json.dumps(trainings)], VARIABLES, ranks=ranks, timeout=110)
        return dict(zip(features, torch.load(out, weights_only=True), strict=True))


def outcome_of(strategy: str, feature: str) -> dict:
    """Return the outcome of a feature, from a training of all features that take as long."""
    together = tuple(each for each in FEATURES if (each in SLOW) == (feature in SLOW))
    return outcomes(strategy, together)[feature]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "feature", [pytest.param(each, marks=pytest.mark.long) if each in SLOW else each for each in FEATURES]
)
@pytest.mark.parametrize(
    "strategy",
    [each if each in ALWAYS_TESTED else pytest.param(each, marks=pytest.mark.long) for each in STRATEGIES],
)
def test_combination_trains_or_is_refused_with_the_reason(strategy, feature):
    if strategy == "horovod" and not is_horovod_loadable():
        pytest.skip("Horovod is not built for this torch (scripts/install_horovod.sh)")
    outcome = outcome_of(strategy, feature)
    if reason := REFUSED.get((strategy, feature)):
        assert reason in outcome["error"]
        return
    assert "error" not in outcome, outcome
    assert outcome["step"] == 2
    low_precision = feature in ("bf16-mixed", "16-mixed", "bf16-true")
    if feature == "clipping":
        for name, value in outcome_of("ddp", feature)["weights"].items():
            assert torch.allclose(outcome["weights"][name], value, rtol=1e-6, atol=1e-9), name
    elif feature not in (
        "a stream",
        "batch norm",
    ):  # different order of samples; statistics of a rank's share
        for name, value in (
            train_alternately(2) if feature == "alternating optimizers" else train_manually(2)
        ).items():
            actual = outcome["weights"][name].double()
            assert torch.allclose(
                actual, value, rtol=0.02 if low_precision else 1e-9, atol=0.02 if low_precision else 1e-12
            ), name


def test_documentation_has_the_same_table():
    text = (REPOSITORY / "docs" / "strategies.md").read_text()
    lines = re.search(r"\n(\| feature .*?)\n\n", text, re.DOTALL)[1].splitlines()
    columns = [cell.strip().strip("`") for cell in lines[0].split("|")[2:-1]]
    assert columns == STRATEGIES
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines[2:]
    }
    features_in_part = {feature for _, feature in REFUSED}
    assert rows == {
        feature: ["no" if (strategy, feature) in REFUSED else "yes" for strategy in STRATEGIES]
        for feature in features_in_part
    }
    sentence = re.search(r"All strategies support (.*?)\.", text, re.DOTALL)[1]
    assert {*re.split(", | and ", " ".join(sentence.split()))} == FEATURES.keys() - features_in_part
