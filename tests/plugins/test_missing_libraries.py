"""Each plugin names its extra if its library is missing, and nothing else imports the library."""

from __future__ import annotations

import sys

import pytest
from helpers.commands import run_command

IMPORT = """
import sys
sys.modules[sys.argv[1]] = None
try:
    __import__(f"hpctrain.{sys.argv[2]}")
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "extra"),
    [("lightning", "lightning"), ("transformers", "huggingface"), ("accelerate", "accelerate")],
)
def test_error_names_the_extra(library, extra):
    printed = run_command([sys.executable, "-c", IMPORT, library, extra]).stdout
    assert f"hpctrain.{extra} requires " in printed
    assert f"pip install 'hpctrain[{extra}]'" in printed


@pytest.mark.slow
def test_building_blocks_import_no_framework():
    code = (
        "import hpctrain, sys; hpctrain.Checkpointer; hpctrain.StatefulBatchSampler; hpctrain.log_metrics; "
        "print(*{'lightning', 'transformers', 'accelerate', 'torchdata'} & sys.modules.keys())"
    )
    assert run_command([sys.executable, "-c", code]).stdout.strip() == ""
