"""Private parts of torch: as expected in the installed version, and imported by one module only."""

import ast
from pathlib import Path

import pytest
import torch
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from hpctrain import torch_compat

PACKAGE = Path(torch_compat.__file__).parent
#: The heartbeat of a hung rank must not import anything.
ALLOWED = {"torch_compat.py", "heartbeat.py"}


def private_imports(path: Path) -> list[str]:
    imports = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch")]
        else:
            continue
        imports += [name for name in names if any(part.startswith("_") for part in name.split("."))]
    return imports


@pytest.mark.slow
def test_no_other_module_imports_private_parts_of_torch():
    private = {path.name: private_imports(path) for path in PACKAGE.rglob("*.py") if path.name not in ALLOWED}
    assert {name: imports for name, imports in private.items() if imports} == {}
    assert private_imports(PACKAGE / "torch_compat.py")


def test_worker_info_of_a_loader_worker_can_be_set(monkeypatch):
    monkeypatch.setattr(torch_compat.dataloader_worker, "_worker_info", "this one")
    assert torch.utils.data.get_worker_info() == "this one"


@pytest.mark.ranks
@on_ranks(world_size=1)
def test_fully_shard_adds_only_known_attributes():
    # A process group of this process would remain in torch's caches, and a fork in another thread would hang.
    module = nn.Linear(2, 2)
    before = set(vars(module))
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    assert isinstance(module, FSDPModule)
    assert type(module).__mro__[2] is nn.Linear
    assert module in torch_compat.fsdp_states
    added = set(vars(module)) - before
    assert {name for name in added if not name.startswith(torch_compat.FSDP_ATTRIBUTES)} == set()


@pytest.mark.skipif(not hasattr(torch.compiler, "save_cache_artifacts"), reason="needs torch 2.7")
def test_artifacts_of_the_compiler_are_counted():
    from torch.compiler._cache import CacheArtifactManager, CacheInfo

    assert CacheArtifactManager.need_serialize() is False
    assert all(
        isinstance(keys, list) for keys in getattr(CacheInfo(), "artifacts", vars(CacheInfo())).values()
    )


def test_iterators_of_data_loaders_count_batches_in_an_attribute():
    iterator = iter(torch.utils.data.DataLoader(range(4)))
    assert isinstance(iterator, torch_compat.DataLoaderIterator)
    next(iterator)
    assert vars(iterator)["_num_yielded"] == 1
