"""Each plugin names the packages to install if its library is missing. Nothing else imports the library."""

import importlib
import sys

import pytest
from helpers.commands import run_command


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "extra", "packages"),
    [
        ("lightning", "lightning", "lightning"),
        ("transformers", "huggingface", "accelerate transformers"),
        ("accelerate", "accelerate", "accelerate"),
    ],
)
def test_error_names_the_packages(library, extra, packages, monkeypatch):
    monkeypatch.delitem(sys.modules, f"hpctrain.{extra}", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module(f"hpctrain.{extra}")
    assert f"hpctrain.{extra} requires " in str(error.value)
    assert f"Run `pip install {packages}`." in str(error.value)


@pytest.mark.slow
def test_building_blocks_import_no_framework():
    code = (
        "import hpctrain, sys; hpctrain.Checkpointer; hpctrain.StatefulBatchSampler; hpctrain.log_metrics; "
        "print(*{'lightning', 'transformers', 'accelerate', 'torchdata'} & sys.modules.keys())"
    )
    assert run_command([sys.executable, "-c", code]).stdout.strip() == ""
