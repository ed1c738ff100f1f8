"""Detection of a process group."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from hpctrain.runtime.program.process_group_check import has_process_group


@pytest.mark.parametrize("name", ["torch.distributed", "torch.distributed.distributed_c10d"])
def test_partially_imported_torch_has_no_process_group(name, monkeypatch):
    """The heartbeat thread may ask while the script imports torch."""
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert has_process_group() is False
