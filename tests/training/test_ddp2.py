"""DDP2: the loss sees the node's batch, and the gradient is that of one process with all nodes' losses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from forked import run_forked
from torch.nn import functional as F

from hpctrain.errors import UserError
from hpctrain.training.data.batch_plan import BatchPlan, DataRank
from hpctrain.training.data.sample_order import SampleOrder
from hpctrain.training.strategies import find_strategy
from hpctrain.training.strategies.ddp import DDP
from hpctrain.training.strategies.ddp2 import DDP2

SCRIPT = Path(__file__).with_name("contrast.py")
sys.path.insert(0, str(SCRIPT.parent))

from contrast import Contrast, pairs  # noqa: E402 (a script, not a package)

VARIABLES = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}


def trained(tmp_path, steps: int, batch: int, *settings: str, nodes: int = 2, ranks: int = 4) -> dict:
    words = [str(steps), str(batch), str(tmp_path / "out"), *settings]
    run_forked(SCRIPT, words, VARIABLES, ranks=ranks, nodes=nodes)
    return torch.load(tmp_path / "out", weights_only=True)


def single_process(steps: int, batch: int, nodes: int, ranks: int) -> dict:
    """The same training in this process: the mean of the nodes' losses, weighted by their samples."""
    torch.manual_seed(1)
    module = Contrast()
    optimizer = module.configure_optimizers()
    data = pairs()
    plan = BatchPlan(SampleOrder(len(data), 1), batch)
    per_node = ranks // nodes
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        total = torch.zeros(())
        for node in range(nodes):
            shares = [
                plan.share(step, DataRank(rank, ranks))
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
        (20, 2, 4),  # five pairs a rank
        (18, 2, 4),  # 5 4 5 4, and an epoch's last batch of four
        (3, 2, 4),  # one rank has none
        (1, 2, 4),  # one node has none
        (10, 1, 3),
    ],
)
def test_gradients_are_those_of_one_process(tmp_path, batch, nodes, ranks):
    torch.manual_seed(1)
    start = Contrast().state_dict()
    got = trained(tmp_path, 1, batch, nodes=nodes, ranks=ranks)
    expected = single_process(1, batch, nodes, ranks)
    for name in ("encoder.0.weight", "encoder.2.weight", "head.weight", "temperature"):
        gradient, reference = got[name] - start[name], expected[name] - start[name]
        if batch == 1:  # One pair has no negatives: its loss has no gradient.
            assert gradient.norm() == pytest.approx(0, abs=1e-6)
            continue
        assert float(gradient.norm() / reference.norm()) == pytest.approx(1.0, abs=1e-4), name
        assert F.cosine_similarity(gradient.flatten(), reference.flatten(), dim=0) > 0.9999


def test_fifty_steps_are_those_of_one_process(tmp_path):
    got, expected = trained(tmp_path, 50, 18), single_process(50, 18, 2, 4)
    for name, value in expected.items():
        assert torch.allclose(got[name], value, rtol=1e-3, atol=1e-4), name


def test_without_other_ranks_the_batch_is_that_of_the_process(tmp_path):
    got, expected = trained(tmp_path, 5, 18, nodes=1, ranks=1), single_process(5, 18, 1, 1)
    for name, value in expected.items():
        assert torch.allclose(got[name], value, rtol=1e-5, atol=1e-6), name


def test_outputs_that_do_not_fit_together_are_named(tmp_path):
    script = tmp_path / "odd.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "from contrast import Contrast, pairs\n"
        "import hpctrain\n"
        "class Odd(Contrast):\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        outputs = super().training_step(batch, batch_idx)\n"
        "        if os.environ['RANK'] == '1':\n"
        "            outputs['left'] = outputs['left'][:, :3]\n"
        "        return outputs\n"
        "trainer = hpctrain.Trainer(max_steps=1, global_batch_size=8, strategy='ddp2')\n"
        "trainer.fit(Odd(), pairs())\n"
    )
    with pytest.raises(AssertionError, match=r"(?s)rank 0, 4 samples: .*rank 1, 4 samples: .*\[3\]"):
        run_forked(script, [], VARIABLES, ranks=2)


def test_a_module_without_an_end_of_its_step_is_trained_as_with_ddp(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(
        "import sys, torch\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "from small import Small, dataset\n"
        "import hpctrain\n"
        "trainer = hpctrain.Trainer(max_steps=3, global_batch_size=32, strategy=sys.argv[1], seed=1)\n"
        "module = Small(norm=False)\n"
        "trainer.fit(module, dataset())\n"
        "print(*(p.double().sum().item() for p in module.parameters()))\n"
    )
    results = [
        run_forked(script, [strategy], VARIABLES, ranks=2).splitlines()[-1] for strategy in ("ddp", "ddp2")
    ]
    assert results[0] == results[1]


def test_auto_is_what_the_job_asks_for_and_ddp_otherwise():
    assert find_strategy("auto", {}) is DDP
    assert find_strategy("auto", {"HPCTRAIN_STRATEGY": "ddp2"}) is DDP2
    assert find_strategy("ddp", {"HPCTRAIN_STRATEGY": "ddp2"}) is DDP
    with pytest.raises(
        UserError, match=r"HPCTRAIN_STRATEGY is 'dpp'; choose from 'ddp', .*'ddp2'.* Did you mean 'd"
    ):
        find_strategy("auto", {"HPCTRAIN_STRATEGY": "dpp"})
