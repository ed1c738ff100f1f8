"""DDP2: the loss sees the node's batch, and the gradient is that of one process with all nodes' losses."""

import os
from importlib.util import find_spec

import pytest
import torch
from helpers import SCRIPTS
from helpers.fork_server import run_forked
from helpers.ranks import run_on_ranks
from train_contrastive import Contrast, pairs
from train_small import Small, dataset

import hpctrain
from hpctrain.errors import UserError
from hpctrain.training.data.batch_plan import BatchPlan, DataRank
from hpctrain.training.data.sample_order import SampleOrder
from hpctrain.training.strategies import find_strategy
from hpctrain.training.strategies.ddp import DDP
from hpctrain.training.strategies.ddp2 import DDP2

pytestmark = pytest.mark.ranks

SCRIPT = SCRIPTS / "train_contrastive.py"

needs_lightning = pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")

VARIABLES = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}


def trained_weights(
    tmp_path,
    steps: int,
    batch: int,
    kind: str = "Module",
    strategy: str = "ddp2",
    *,
    nodes: int = 2,
    ranks: int = 4,
    devices: int = 1,
) -> dict:
    args = [str(steps), str(batch), str(tmp_path / "out"), kind, strategy]
    # Without GPUs, the devices of a rank are all the CPU.
    variables = VARIABLES | ({"HPCTRAIN_GPUS_PER_TASK": str(devices)} if devices > 1 else {})
    run_forked(SCRIPT, args, variables, ranks=ranks, nodes=nodes)
    return torch.load(tmp_path / "out", weights_only=True)


def single_process(steps: int, batch: int, nodes: int, ranks: int) -> dict:
    """Train the same in this process: the mean of the nodes' losses, weighted by their samples."""
    torch.manual_seed(1)
    module = Contrast()
    optimizer = module.configure_optimizers()
    data = pairs()
    plan = BatchPlan(SampleOrder(len(data), 1), batch)
    per_node = ranks // nodes
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for node in range(nodes):
            shares = [
                plan.rank_batch(step, DataRank(rank, ranks))
                for rank in range(node * per_node, (node + 1) * per_node)
            ]
            indices = torch.cat([share.indices for share in shares])
            if len(indices):
                outputs = module.training_step(data[indices], 0)
                loss = module.training_step_end(outputs)["loss"]
                total = total + loss * len(indices) / shares[0].batch_size
        total.backward()
        optimizer.step()
    return module.state_dict()


@pytest.mark.parametrize(
    ("batch", "nodes", "ranks"),
    [
        pytest.param(20, 2, 4, marks=pytest.mark.extended),  # five pairs per rank
        (18, 2, 4),  # 5 4 5 4, and an epoch's last batch of four
        (3, 2, 4),  # one rank has none
        pytest.param(1, 2, 4, marks=pytest.mark.extended),  # one node has none
        pytest.param(10, 1, 3, marks=pytest.mark.extended),
    ],
)
def test_gradients_are_those_of_one_process(tmp_path, batch, nodes, ranks):
    torch.manual_seed(1)
    start = Contrast().state_dict()
    actual = trained_weights(tmp_path, 1, batch, nodes=nodes, ranks=ranks)
    expected = single_process(1, batch, nodes, ranks)
    for name in ("encoder.0.weight", "encoder.2.weight", "head.weight", "temperature"):
        gradient, reference = actual[name] - start[name], expected[name] - start[name]
        if batch == 1:  # one pair has no negatives: its loss has no gradient
            assert gradient.norm() == pytest.approx(0, abs=1e-12)
            continue
        torch.testing.assert_close(gradient, reference, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("batch", "kind", "strategy", "nodes", "ranks", "devices"),
    [
        pytest.param(18, "Module", "ddp2", 2, 2, 2, marks=pytest.mark.extended),
        (3, "Module", "ddp2", 2, 2, 2),
        pytest.param(1, "Module", "ddp2", 2, 2, 2, marks=pytest.mark.extended),
        *(
            pytest.param(18, "LightningModule", *topology, marks=[pytest.mark.extended, needs_lightning])
            for topology in (("ddp2", 2, 2, 2), ("ddp2", 2, 4, 1), ("dp", 1, 1, 3))
        ),
    ],
)
def test_step_end_sees_the_batch_of_the_node(tmp_path, batch, kind, strategy, nodes, ranks, devices):
    topology = {"nodes": nodes, "ranks": ranks, "devices": devices}
    actual = trained_weights(tmp_path, 8, batch, kind, strategy, **topology)
    for name, value in single_process(8, batch, nodes, max(ranks, nodes)).items():
        torch.testing.assert_close(actual[name], value, rtol=1e-9, atol=1e-9)


class MismatchedOutputs(Contrast):
    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        if os.environ["RANK"] == "1":
            outputs["left"] = outputs["left"][:, :3]
        return outputs


def train_with_mismatched_outputs() -> None:
    hpctrain.Trainer(max_steps=1, global_batch_size=8, strategy="ddp2").fit(MismatchedOutputs(), pairs())


def test_mismatched_outputs_are_reported():
    with pytest.raises(AssertionError, match=r"(?s)rank 0, 4 samples: .*rank 1, 4 samples: .*\[3\]"):
        run_on_ranks(train_with_mismatched_outputs, group=False)


def train_without_step_end(strategy: str) -> list[torch.Tensor]:
    trainer = hpctrain.Trainer(max_steps=3, global_batch_size=32, strategy=strategy, seed=1)
    module = Small(norm=False)
    trainer.fit(module, dataset())
    return [parameter.detach() for parameter in module.parameters()]


def test_module_without_training_step_end_trains_like_ddp():
    ddp, ddp2 = (run_on_ranks(train_without_step_end, name, group=False)[0] for name in ("ddp", "ddp2"))
    assert all(map(torch.equal, ddp, ddp2))


def test_auto_strategy_is_that_of_the_job_or_ddp():
    assert find_strategy("auto", {}) is DDP
    assert find_strategy("auto", {"HPCTRAIN_STRATEGY": "ddp2"}) is DDP2
    assert find_strategy("ddp", {"HPCTRAIN_STRATEGY": "ddp2"}) is DDP
    with pytest.raises(
        UserError, match=r"HPCTRAIN_STRATEGY is 'dpp', but must be one of 'ddp', .*'ddp2'.* Did you mean 'd"
    ):
        find_strategy("auto", {"HPCTRAIN_STRATEGY": "dpp"})
