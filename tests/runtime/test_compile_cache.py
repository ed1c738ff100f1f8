"""Files of compiled code: written once, bounded, and never an error of the program."""

import getpass
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.node_ranks import ranks

from hpctrain.rundir import RunDir
from hpctrain.runtime.program import compile_cache
from hpctrain.runtime.program.compile_cache import CompileCache
from hpctrain.runtime.program.import_watcher import ImportWatcher


class FakeTorch:
    """Artifacts are words, of which each file contains those of a process."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.loaded: list[str] = []
        self.is_new = False

    def compile(self, *words: str) -> None:
        self.words += words
        self.is_new = True

    def need_serialize(self) -> bool:
        return self.is_new

    def save(self) -> tuple[bytes, SimpleNamespace]:
        self.is_new = False
        return " ".join(self.words).encode(), SimpleNamespace(artifacts={"inductor": list(self.words)})

    def load(self, content: bytes) -> SimpleNamespace | None:
        if content == b"foreign":
            return None
        self.loaded += content.decode().split()
        return SimpleNamespace(artifacts={"inductor": content.decode().split()})


@pytest.fixture
def process(tmp_path, monkeypatch):
    """Return a function that starts a process of the run, which imports the compiler."""

    def start(local_rank: int = 0) -> tuple[FakeTorch, CompileCache]:
        fake, cache = FakeTorch(), CompileCache()
        monkeypatch.setattr(torch.compiler, "save_cache_artifacts", fake.save, raising=False)
        monkeypatch.setattr(torch.compiler, "load_cache_artifacts", fake.load, raising=False)
        module = SimpleNamespace(CacheArtifactManager=fake)
        monkeypatch.setitem(sys.modules, "torch.compiler._cache", module)
        monkeypatch.setitem(sys.modules, "torch._inductor.compile_fx", SimpleNamespace())
        cache.install(RunDir(tmp_path), ranks(local_rank, 2), {})
        return fake, cache

    return start


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("compile-cache/*/*"))


def compile_and_step(process, *words: str, local_rank: int = 0) -> None:
    fake, cache = process(local_rank)
    fake.compile(*words)
    cache.after_step()


def test_process_loads_the_files_of_its_local_rank(process):
    compile_and_step(process, "forward", "backward")
    compile_and_step(process, "other", local_rank=1)
    fake, _ = process()
    assert fake.loaded == ["forward", "backward"]


def test_file_is_written_once_and_replaced_by_one_with_more_code(process, tmp_path):
    compile_and_step(process, "forward")
    (path,) = files(tmp_path)
    written = path.stat().st_ino
    compile_and_step(process, "forward")
    assert path.stat().st_ino == written
    compile_and_step(process, "forward", "evaluation")
    (replaced,) = files(tmp_path)
    assert replaced != path
    # Another program of the run.
    compile_and_step(process, "unrelated")
    assert len(files(tmp_path)) == 2


def test_damaged_and_foreign_files_are_reported_and_removed(process, tmp_path, monkeypatch, capfd):
    compile_and_step(process, "forward")
    (path,) = files(tmp_path)
    content = path.read_bytes()
    for damaged in (content[:-1], content[:5], b"", content[:-1] + b"?"):
        path.write_bytes(damaged)
        fake, _ = process()
        assert fake.loaded == []
        assert "is damaged. This attempt compiles again." in capfd.readouterr().err
        assert files(tmp_path) == []
    fake, cache = process()
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"foreign", fake.save()[1]))
    fake.compile("forward")
    cache.after_step()
    fake, cache = process()
    assert "torch cannot read" in capfd.readouterr().err
    fake.compile("forward")
    cache.after_step()
    assert [file.read_bytes() for file in files(tmp_path)] == [content]


def test_files_of_another_torch_or_device_are_not_loaded(process, monkeypatch):
    compile_and_step(process, "first")
    for name, (module, attribute, value) in {
        "version": (torch, "__version__", "9.9"),
        "device": (compile_cache, "read_driver_facts", lambda: SimpleNamespace(names=["H100"])),
    }.items():
        with monkeypatch.context() as changed:
            changed.setattr(module, attribute, value)
            fake, _ = process()
            assert fake.loaded == []
            compile_and_step(process, name)
            fake, _ = process()
            assert fake.loaded == [name]
    fake, _ = process()
    assert fake.loaded == ["first"]


def test_files_of_earlier_versions_count(process, tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 100)
    for version in ("9.8", "9.9"):
        monkeypatch.setattr(torch, "__version__", version)
        compile_and_step(process, version * 10)
    (path,) = files(tmp_path)
    assert "torch-9.9" in path.parent.name


def test_total_size_is_bounded(process, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 100)
    for word in ("a" * 30, "b" * 30):
        compile_and_step(process, word)
    assert len(files(tmp_path)) == 1
    fake, cache = process()
    assert fake.loaded == ["b" * 30]
    fake.compile("c" * 200)
    cache.after_step()
    assert "it takes 200 B, more than 100 B. The next attempt compiles again." in capfd.readouterr().err
    assert not cache.is_active
    assert len(files(tmp_path)) == 1


def test_folder_that_cannot_be_written_ends_the_saves(process, tmp_path, capfd):
    (tmp_path / "compile-cache").write_text("a file")
    fake, cache = process()
    fake.compile("forward")
    cache.after_step()
    assert "cannot save the compiled code of this rank" in capfd.readouterr().err
    assert not cache.is_active


def test_other_nodes_wait_for_the_file_of_the_first(process, tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "_OTHER_NODES_DELAY_S", 3600)
    fake, cache = process()
    cache._ranks = SimpleNamespace(local_rank=0, node_rank=1)
    fake.compile("forward")
    cache.after_step()
    assert files(tmp_path) == []
    cache._due_at = 0
    cache.after_step()
    assert len(files(tmp_path)) == 1


OF_TORCH = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"


@pytest.mark.parametrize(("folder", "is_users"), [("/shared", True), (OF_TORCH, False)])
def test_folder_of_the_user_is_left_to_torch(tmp_path, monkeypatch, folder, is_users):
    monkeypatch.setattr(sys, "meta_path", finders := list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "torch._inductor.compile_fx", raising=False)
    CompileCache().install(RunDir(tmp_path), ranks(), {"TORCHINDUCTOR_CACHE_DIR": folder})
    assert isinstance(finders[0], ImportWatcher) is not is_users
