"""The output that users parse: `--json`, exit codes and the run folder. It changes only on purpose.

    UPDATE_GOLDEN=1 .venv/bin/python -m pytest tests/cli/test_output_format.py

rewrites the stored format; `git diff` then shows what users have to adapt.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.commands import run_command

from hpctrain import errors

GOLDEN = Path(__file__).parent / "golden" / "output_format.json"
#: Fails in the first attempt, after the second checkpoint.
SCRIPT = """
import os
import torch
import hpctrain

class Model(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.num_calls = torch.nn.Linear(2, 1), 0

    def training_step(self, batch, batch_idx):
        self.num_calls += 1
        if os.environ["HPCTRAIN_ATTEMPT"] == "0" and os.environ["RANK"] == "0" and self.num_calls > 4:
            raise ValueError("on purpose")
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

trainer = hpctrain.Trainer(max_steps=6, checkpoint_every=2, memory_copies=False)
trainer.fit(Model(), torch.utils.data.TensorDataset(torch.ones(64, 2)))
"""
#: Parts of file names that differ between runs.
NUMBERS = [
    (r"step-\d+", "step-N"),
    (r"(rank|times)-\d+", r"\1-N"),
    (r"submission-\d+", "submission-N"),
    (r"__\d+_\d+", "__N_N"),
]


def shape(value: Any) -> Any:
    """Return the keys and types of a JSON value; of a list, those of all its entries together."""
    if isinstance(value, dict):
        return {key: shape(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        shapes = {json.dumps(shape(entry)) for entry in value}
        return [json.loads(text) for text in sorted(shapes)]
    return (
        "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
    )


def fits(found: Any, stored: Any) -> bool:
    """Return true if a shape is a stored one. Values may be null, and lists empty, in one of the two."""
    if "NoneType" in (found, stored):
        return True
    if isinstance(stored, dict):
        return found.keys() == stored.keys() and all(fits(found[key], stored[key]) for key in stored)
    if isinstance(stored, list):
        return not stored or all(any(fits(entry, other) for other in stored) for entry in found)
    return bool(found == stored)


def line_shapes(path: Path) -> list[Any]:
    """Return the shapes of the lines of a file, with the kind of each event."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    shapes = [shape(record) | {"kind": record.get("kind", "")} for record in records]
    return [json.loads(text) for text in sorted({json.dumps(one) for one in shapes})]


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("output")
    (folder / "train.py").write_text(SCRIPT)

    def hpctrain(*args: str) -> Any:
        return json.loads(
            run_command([sys.executable, "-m", "hpctrain", *args], cwd=folder, timeout=200).stdout
        )

    shapes: dict[str, Any] = {}
    options = ("--backend=local", "--ntasks-per-node=2", "--run-dir=runs/a")
    shapes["submit"] = shape(hpctrain("submit", *options, "--json", "train.py"))
    shapes["wait"] = shape(hpctrain("wait", "runs/a", "--json"))
    for command in ("status", "checkpoints", "report"):
        shapes[command] = shape(hpctrain(command, "runs/a", "--json"))
    for command in ("list", "env", "explain"):
        shapes[command] = shape(hpctrain(command, "--json"))
    shapes["submit --show-config"] = shape(hpctrain("submit", "--show-config", "--json", "train.py"))
    run = folder / "runs" / "a"
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    for pattern, replacement in NUMBERS:
        names = {re.sub(pattern, replacement, name) for name in names}
    newest = max(run.glob("checkpoints/step-*"))
    shapes["files"] = sorted(names)
    shapes["spec.yaml"] = shape(yaml.safe_load((run / "spec.yaml").read_text()))
    shapes["manifest.json"] = shape(json.loads((newest / "manifest.json").read_text()))
    for name in ("events.jsonl", "metrics.jsonl", "environment.jsonl"):
        shapes[name] = line_shapes(run / name)
    failure = run / "failures" / "attempt-000-rank-00000.json"
    shapes["failures"] = shape(json.loads(failure.read_text()))
    shapes["exit codes"] = {
        name: error.exit_code
        for name, error in sorted(vars(errors).items())
        if isinstance(error, type) and issubclass(error, errors.HpctrainError)
    }
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(shapes, indent=1) + "\n")
    return shapes


@pytest.mark.parametrize("name", json.loads(GOLDEN.read_text()) if GOLDEN.exists() else [])
def test_format_is_unchanged(formats, name):
    stored = json.loads(GOLDEN.read_text())[name]
    assert fits(formats[name], stored), (
        f"{name} has changed, which programs of users read. If it may change, run this test with "
        f"UPDATE_GOLDEN=1 and compare the stored shapes. New shape: {json.dumps(formats[name], indent=1)}"
    )


def test_all_formats_are_stored(formats):
    assert set(formats) == set(json.loads(GOLDEN.read_text()))
