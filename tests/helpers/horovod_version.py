"""Compare the torch that Horovod was built for with the installed one."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch


def is_horovod_loadable() -> bool:
    if (spec := find_spec("horovod")) is None or spec.origin is None:
        return False
    metadata = json.loads(Path(spec.origin).with_name("metadata.json").read_text())
    return metadata["pytorch"] == torch.__version__


needs_horovod = pytest.mark.skipif(
    not is_horovod_loadable(), reason="Horovod is not built for this torch (scripts/install_horovod.sh)"
)
