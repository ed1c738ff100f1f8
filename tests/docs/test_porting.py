"""The diffs of the porting guide match scripts that run."""

import importlib.util
import re
import sys

import pytest
from helpers import REPOSITORY
from helpers.commands import run_command

SCRIPTS = REPOSITORY / "examples" / "porting"
SPEC = importlib.util.spec_from_file_location("diffs", REPOSITORY / "scripts" / "write_porting_diffs.py")


def test_guide_shows_the_current_diffs():
    diffs = importlib.util.module_from_spec(SPEC)
    SPEC.loader.exec_module(diffs)
    text = diffs.PAGE.read_text()
    names = sorted(path.name.removesuffix("_after.py") for path in SCRIPTS.glob("*_after.py"))
    assert sorted(re.findall(r"<!-- diff: (\w+) -->", text)) == names
    assert diffs.update_page(text) == text, "run scripts/write_porting_diffs.py"


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("script", sorted(path.stem for path in SCRIPTS.glob("*.py")))
def test_scripts_before_and_after_train_on_two_ranks(script, tmp_path):
    if script.startswith("huggingface"):
        pytest.importorskip("transformers")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = run_command(
        [*torchrun, SCRIPTS / f"{script}.py"], {"OMP_NUM_THREADS": "1"}, cwd=tmp_path, timeout=110
    )
    losses = [float(loss) for loss in re.findall(r"loss'?:? '?([0-9.e-]+)", result.stdout + result.stderr)]
    if script.endswith("after"):
        assert losses[-1] < losses[0] / 10
