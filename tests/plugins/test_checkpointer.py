"""A plain DDP loop with the building blocks ends with the parameters of an undisturbed run."""

import pytest
import torch
import train_with_blocks
from helpers.disturbed_runs import assert_resumed, assert_same_bits, train
from helpers.ranks import run_on_ranks
from torch import nn

from hpctrain import Checkpointer, CheckpointError, UserError
from hpctrain.rundir import RunDir

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Three ranks, so that they share batches unevenly."""
    return train(tmp_path_factory.mktemp("undisturbed"), "train_with_blocks.py", num_ranks=3)


@pytest.mark.long
@pytest.mark.parametrize("disturb", ["requeue:9", "kill:9"])
def test_disturbed_loop_is_bitwise_identical(disturb, undisturbed, tmp_path):
    run, result = train(tmp_path, "train_with_blocks.py", disturb=disturb, num_ranks=3)
    assert_resumed(run, disturb)
    assert_same_bits(result, undisturbed[1])
    assert run.losses() == undisturbed[0].losses()
    assert sorted(run.losses()) == list(range(1, 25))


def test_resized_loop_has_the_same_samples_and_similar_parameters(tmp_path):
    env = {"NO_DROPOUT": "", "NUM_WORKERS": "0"}
    whole = run_on_ranks(train_with_blocks.main, 3, world_size=2, env=env)[0]
    run_on_ranks(train_with_blocks.main, 3, 8, str(tmp_path), world_size=3, env=env)
    resized = run_on_ranks(train_with_blocks.main, 3, None, str(tmp_path), world_size=2, env=env)
    for rank in resized:
        torch.testing.assert_close(rank, whole, rtol=1e-4, atol=1e-6)


class Counter:
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_random_numbers_continue(tmp_path):
    counter = Counter()
    checkpointer = Checkpointer(run_dir=tmp_path, counter=counter)
    assert checkpointer.load() == 0
    torch.manual_seed(5)
    counter.count = 7
    checkpointer.save(3)
    drawn = torch.rand(2)
    again = Counter()
    assert Checkpointer(run_dir=tmp_path, counter=again).load() == 3
    assert again.count == 7
    assert torch.equal(torch.rand(2), drawn)


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    checkpointer = Checkpointer(run_dir=tmp_path, keep_last=1, keep_every=4, counter=Counter())
    for step in range(1, 7):
        checkpointer.async_save(step)
    checkpointer.wait()
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step-00000004",
        "step-00000006",
    ]


def test_other_objects_are_refused(tmp_path):
    Checkpointer(run_dir=tmp_path, model=nn.Linear(1, 1)).save(1)
    with pytest.raises(UserError, match="contains model, but Checkpointer received other"):
        Checkpointer(run_dir=tmp_path, other=Counter()).load()
    with pytest.raises(UserError, match=r"received data=list\(…\), which lacks state_dict"):
        Checkpointer(run_dir=tmp_path, data=[])
    with pytest.raises(UserError, match=r"model in .*step-00000001 does not match the script"):
        Checkpointer(run_dir=tmp_path, model=nn.Linear(2, 1)).load()


def save_states_of_each_rank(folder) -> str:
    import torch.distributed as dist

    checkpointer = Checkpointer(run_dir=folder, counter=Counter(dist.get_rank()))
    with pytest.raises(CheckpointError) as error:
        checkpointer.save(1)
    return str(error.value)


def test_states_that_differ_between_ranks_are_refused(tmp_path):
    first, second = run_on_ranks(save_states_of_each_rank, tmp_path)
    assert first.startswith("counter.state_dict() differs between rank 1 and rank 0")
    assert second.startswith("counter.state_dict() differs between rank 0 and rank 1")
    assert not RunDir(tmp_path).checkpoints.exists()


def save_buffers_of_each_rank(folder) -> list[float]:
    import torch.distributed as dist

    module = nn.BatchNorm1d(8)
    checkpointer = Checkpointer(run_dir=folder, model=nn.parallel.DistributedDataParallel(module))
    module.running_mean.fill_(dist.get_rank())
    checkpointer.save(1)
    assert module.running_mean.tolist() == [0.0] * 8
    module.running_mean.fill_(5.0)
    checkpointer.load()
    return module.running_mean.tolist()


def test_buffers_of_rank_0_are_saved(tmp_path):
    assert run_on_ranks(save_buffers_of_each_rank, tmp_path) == [[0.0] * 8] * 2


def test_nothing_is_saved_without_a_run_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    checkpointer = Checkpointer(counter=Counter())
    assert checkpointer.load() == 0
    checkpointer.save(1)
    checkpointer.async_save(2)
    checkpointer.wait()
    with pytest.raises(SystemExit, match="75"):
        checkpointer.save_and_exit(3)
    assert list(tmp_path.iterdir()) == []
    assert "There is no run folder, so nothing is saved. Pass run_dir" in capsys.readouterr().out
