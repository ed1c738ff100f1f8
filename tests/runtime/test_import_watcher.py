"""Calls after an import: once, also if the first import fails, or if the module is already imported."""

import importlib
import sys

import pytest

from hpctrain.runtime.program.import_watcher import call_after_import


def test_function_is_called_once_after_the_first_import_that_succeeds(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    (tmp_path / "fails_at_first.py").write_text(
        f"import os\nif not os.path.exists({str(tmp_path / 'tried')!r}):\n"
        f"    open({str(tmp_path / 'tried')!r}, 'w').close()\n    raise ImportError('no driver')\nvalue = 3\n"
    )
    values = []
    call_after_import("fails_at_first", lambda module: values.append(module.value))
    with pytest.raises(ImportError, match="no driver"):
        importlib.import_module("fails_at_first")
    assert values == []
    importlib.import_module("fails_at_first")
    assert values == [3]
    call_after_import("fails_at_first", lambda module: values.append(module.value + 1))
    assert values == [3, 4]
