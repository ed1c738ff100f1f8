"""Saved in a fast folder first, of each node or of all, and copied to the shared one in the background."""

from __future__ import annotations

import os
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch
from forked import run_forked
from saved_states import names, steps

from hpctrain.checkpoint.io import file_writer
from hpctrain.checkpoint.io.retention import Retention
from hpctrain.checkpoint.store import CheckpointStore

SCRIPT = Path(__file__).with_name("on_ranks.py")


def on_ranks(scenario: str, folder: Path, ranks: int = 2) -> None:
    run_forked(SCRIPT, [scenario, str(folder)], {}, ranks=ranks)


@pytest.mark.parametrize("scenario", ["node_local", "one_node", "a_tier_that_one_node_has_not"])
def test_two_ranks(tmp_path, scenario):
    on_ranks(scenario, tmp_path)


@pytest.fixture(scope="module")
def in_the_tier_only(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tier") / "first"
    on_ranks("only_in_the_tier", folder)
    return folder


@pytest.mark.parametrize(
    ("scenario", "ranks"),
    [
        ("same_nodes", 2),
        ("brought_home", 2),
        ("nodes_exchanged", 2),
        ("nodes_exchanged", 3),
        ("a_node_is_gone", 2),
        ("a_part_is_broken", 2),
    ],
)
def test_restart_from_what_lies_on_the_nodes(in_the_tier_only, tmp_path, scenario, ranks):
    # The run's folder in the tier is named after the path of its checkpoints: give each test the same.
    shutil.copytree(in_the_tier_only, tmp_path / "copy")
    kept = in_the_tier_only.with_name("kept")
    in_the_tier_only.rename(kept)
    try:
        (tmp_path / "copy").rename(in_the_tier_only)
        on_ranks(scenario, in_the_tier_only, ranks)
    finally:
        shutil.rmtree(in_the_tier_only)
        kept.rename(in_the_tier_only)


def state(step: int) -> dict:
    return {"x": torch.full((1000,), float(step))}


@pytest.fixture
def tier(tmp_path) -> Path:
    """A fast folder, which is there."""
    folder = tmp_path / "tier"
    folder.mkdir()
    return folder


@pytest.fixture
def slow_copying(monkeypatch) -> threading.Event:
    """Copying to the shared folder waits until this is set."""
    let_go = threading.Event()
    blocks = file_writer.write_of_file

    def held(path):
        part = blocks(path)

        def wait_and_read():
            assert let_go.wait(20)
            yield from part.blocks()

        return file_writer.FileWrite(part.name, wait_and_read)

    monkeypatch.setattr("hpctrain.checkpoint.tier.tier_copier.write_of_file", held)
    return let_go


def test_where_copying_is_slow_the_newest_is_copied_and_the_tier_does_not_grow(tmp_path, tier, slow_copying):
    store = CheckpointStore(tmp_path / "run" / "checkpoints", second_tier=tier)
    for step in range(1, 9):
        store.begin(step, state(step), {})
    assert store.finish(20)
    assert [saved.step for saved in store.finished()] == list(range(1, 9))
    (of_the_run,) = tier.iterdir()
    assert steps(of_the_run) == [1, 8]
    slow_copying.set()
    store.close()
    assert [saved.step for saved in store.finished()] == [1, 8]
    assert steps(tmp_path / "run" / "checkpoints") == [1, 8]


def test_what_stays_for_good_is_copied_however_slow(tmp_path, tier, slow_copying):
    store = CheckpointStore(
        tmp_path / "run" / "checkpoints", retention=Retention(last=1, every=3), second_tier=tier
    )
    for step in range(1, 9):
        store.begin(step, state(step), {})
    assert store.finish(20)
    slow_copying.set()
    store.close()
    assert steps(tmp_path / "run" / "checkpoints") == [3, 6, 8]


def test_a_tier_without_room_is_passed_by_and_that_is_said(tmp_path, tier):
    store = CheckpointStore(tmp_path / "run" / "checkpoints", second_tier=tier, second_tier_bytes=10_000)
    store.begin(1, state(1), {})
    store.begin(2, {"x": torch.zeros(3000)}, {})
    store.close()
    ended = {(saved.step, saved.path.parent.name): saved for saved in store.finished()}
    assert (1, "checkpoints") in ended
    direct = ended[2, "checkpoints"]
    assert "no space for" in direct.notes[0]
    assert "directly" in direct.notes[0]
    assert steps(tmp_path / "run" / "checkpoints") == [1, 2]


def planted(folder: Path, how: str) -> None:
    """Put at `folder` what another user may have left there."""
    match how:
        case "link":
            (folder.parent / "elsewhere").mkdir(0o700)
            folder.symlink_to("elsewhere")
        case "file":
            folder.touch(0o600)
        case "mode":
            folder.mkdir()
            folder.chmod(0o750)
        case "owner":
            if os.geteuid() != 0:
                pytest.skip("giving a folder away takes root")
            folder.mkdir(0o700)
            os.chown(folder, 65534, 65534)
        case "replaceable":
            folder.parent.chmod(0o777)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("link", "is a symbolic link, not a folder. Remove it"),
        ("file", "is a file, not a folder. Remove it"),
        ("mode", "has mode 0750, not 0700: other users can access it. Remove it"),
        ("owner", "belongs to user 65534, not to user 0. Have its owner remove it"),
        ("replaceable", "can be replaced by any user: .* has mode 0777. Set the sticky bit"),
    ],
)
def test_a_tier_that_other_users_can_get_into_is_refused_and_checkpoints_go_to_the_run(
    tmp_path, tier, how, words
):
    checkpoints = tmp_path / "run" / "checkpoints"
    first = CheckpointStore(checkpoints, second_tier=tier)
    first.begin(1, state(1), {})
    first.finish(20)
    (folder,) = tier.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    first.close()
    shutil.rmtree(folder)
    planted(folder, how)
    store = CheckpointStore(checkpoints, second_tier=tier)
    store.begin(2, state(2), {})
    store.close()
    (saved,) = store.finished()
    assert saved.path.parent == checkpoints
    assert str(folder) in saved.notes[0]
    assert re.search(words, saved.notes[0])
    assert "directly" in saved.notes[0]
    assert not folder.is_dir() or list(folder.iterdir()) == []


def test_a_blocking_save_is_in_the_shared_folder(tmp_path, tier):
    store = CheckpointStore(tmp_path / "run" / "checkpoints", second_tier=tier)
    assert store.save(1, state(1), {}).path == tmp_path / "run" / "checkpoints" / "step-00000001"
    store.close(clean=True)
    assert names(tier) == []


def test_the_removal_of_a_tier_never_shows_a_part_of_a_checkpoint(tmp_path, tier, monkeypatch):
    """A kill at any moment of it leaves whole checkpoints and hidden folders."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints", second_tier=tier)
    store.begin(1, state(1), {})
    assert store.finish(60)
    (folder,) = tier.iterdir()
    seen = []
    unlink = os.unlink

    def look(*words, **more):
        unlink(*words, **more)
        seen.append(steps(folder))

    monkeypatch.setattr(os, "unlink", look)
    store.close(clean=True)
    assert seen == [[]] * len(seen)
    assert len(seen) > 3


def test_two_runs_do_not_meet_in_one_tier(tmp_path, tier):
    runs = [
        CheckpointStore(tmp_path / where / "run" / "checkpoints", second_tier=tier) for where in ("a", "b")
    ]
    for number, store in enumerate(runs, 1):
        store.begin(number, state(number), {})
        store.close()
    assert len(names(tier)) == 2
    for number, store in enumerate(runs, 1):
        assert store.load_newest()[0].step == number


def test_a_tier_whose_newest_was_not_copied_is_not_cleaned(tmp_path, tier):
    shared = tmp_path / "run" / "checkpoints"
    shared.parent.mkdir()
    shared.write_text("in the way")
    store = CheckpointStore(shared, second_tier=tier)
    store.begin(1, state(1), {})
    (sentence,) = store.close(clean=True)
    assert "Step 1 exists only in" in sentence
    shared.unlink()
    again = CheckpointStore(shared, second_tier=tier)
    assert torch.equal(again.load_newest()[0].state["x"], state(1)["x"])
    again.close(clean=True)
    assert steps(shared) == [1]
    assert names(tier) == []
