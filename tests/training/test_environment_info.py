"""Checksums of the code in the record of an attempt."""

import sys
from types import ModuleType

import pytest

from hpctrain.rundir import CODE_VARIABLE
from hpctrain.training.observe.environment_info import hash_code


def load(monkeypatch, file, text="x = 1\n") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    module = ModuleType(file.stem)
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, f"own_{file.stem}", module)


@pytest.mark.slow
def test_script_and_its_own_modules_are_hashed_relative_to_their_folder(tmp_path, monkeypatch):
    """The run folder, with the code snapshot, is often inside the working directory."""
    snapshot = tmp_path / "runs" / "r" / "code" / "submission-000"
    load(monkeypatch, snapshot / "pkg" / "model.py")
    load(monkeypatch, tmp_path / "beside.py", "x = 2\n")
    load(monkeypatch, tmp_path / "lib" / "site-packages" / "installed.py")
    (snapshot / "train.py").write_text("x = 1\n")
    monkeypatch.setattr(sys, "argv", [str(snapshot / "train.py")])
    monkeypatch.chdir(tmp_path)
    found = hash_code({CODE_VARIABLE: str(snapshot)})
    assert list(found) == ["beside.py", "pkg/model.py", "train.py"]
    assert found["train.py"] == found["pkg/model.py"] != found["beside.py"]
    (snapshot / "train.py").write_text("x = 3\n")
    assert hash_code({CODE_VARIABLE: str(snapshot)})["train.py"] != found["train.py"]
