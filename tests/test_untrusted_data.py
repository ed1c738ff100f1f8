"""Unpickling: only files and pipes that the own user has written; every use is listed here."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpctrain

PACKAGE = Path(hpctrain.__file__).parent

#: By file: the number of uses, and their source. Never a socket, or a store that ranks share.
LISTED = {
    "records/call_payload.py": (2, "the call in the run folder, which the user has submitted"),
    "jobs/executor/job.py": (2, "results and exceptions in the run folder"),
    "telemetry/loggers/dispatcher.py": (2, "the pipe from the rank that has started the process"),
    "training/loop/spawn.py": (3, "files in a temporary folder that only its owner can read"),
}
#: These unpickle what peers send.
REFUSED = {
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list", "broadcast_object", "allgather_object", "PGTransport"),
}
MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
#: The options that keep these functions from unpickling everything.
SAFE_WITH = {
    "torch.load": ("weights_only", "True"),
    **dict.fromkeys(("np.load", "numpy.load"), ("allow_pickle", "False")),
}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield a module's calls with their dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def used_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module calls, or derives a class from."""
    yield from (name for name, _ in calls(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from map(ast.unparse, node.bases)


def unpickles(name: str) -> bool:
    module, _, function = name.rpartition(".")
    return module in MODULES and function in ("load", "loads", "Unpickler", "open")


@pytest.mark.slow
def test_every_use_of_pickle_is_listed():
    uses = Counter(
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for name in used_names(ast.parse(path.read_text(encoding="utf-8")))
        if unpickles(name)
    )
    assert uses == {path: count for path, (count, _) in LISTED.items()}


@pytest.mark.extended
@pytest.mark.slow
def test_nothing_is_unpickled_from_peers():
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in MODULES:
                # a call of a name that was imported directly would not be found
                assert not {alias.name for alias in node.names} & {"load", "loads", "Unpickler"}, path
        for name, call in calls(tree):
            assert name.rpartition(".")[2] not in REFUSED, f"{path}: {name} unpickles what peers send"
            if name in SAFE_WITH:
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                option, value = SAFE_WITH[name]
                assert options.get(option) == value, f"{path}: {name} without {option}={value}"
