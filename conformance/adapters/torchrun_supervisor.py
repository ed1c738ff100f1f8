"""Let torchrun's tests start their scripts with `hpctrain submit`, whose options follow from torchrun's."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.testing._internal import common_utils

# Its name in the tests of older versions.
common_utils.sandcastle_skip_if = common_utils.skip_but_pass_in_sandcastle_if


def main(args: list[str]) -> None:
    options = torchrun.parse_args(args)
    config, program, program_args = torchrun.config_from_args(options)
    if options.run_path:
        program, program_args = sys.executable, [options.training_script, *options.training_script_args]
    hpctrain = [sys.executable, "-m", "hpctrain"]
    shape = [f"--nodes={config.min_nodes}", f"--ntasks-per-node={config.nproc_per_node}"]
    policy = [f"--max-failures={config.max_restarts + 1}", "--no-code-snapshot", "--env=TEST_SENTINEL_PARENT"]
    with tempfile.TemporaryDirectory() as folder:
        submit = [*hpctrain, "submit", "--backend=local", "--launcher=torchrun", "--follow"]
        submit += [*shape, *policy, f"--run-dir={folder}/run", "--", program, *map(str, program_args)]
        result = subprocess.run(submit, cwd=folder, capture_output=True, text=True, timeout=280)
    print(result.stdout, result.stderr, sep="")
    if result.returncode:
        raise ChildFailedError(str(program), {})


torchrun.main = main
