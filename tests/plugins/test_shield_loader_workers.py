"""Workers of a plain DataLoader survive the stop signals of a job, and end with their rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import signal, sys, time
from torch.utils.data import DataLoader
from hpctrain.training.data.shield_loader_workers import shield_loader_workers
shield_loader_workers()
received = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda number, _: received.append(number))
batches = iter(DataLoader(range(100), num_workers=2, multiprocessing_context="fork"))
next(batches)
print("ready", flush=True)
while len(received) < 2:
    time.sleep(0.01)
time.sleep(0.5)
assert sorted(received) == [signal.SIGUSR2, signal.SIGTERM]
print(sum(len(batch) for batch in batches) if sys.argv[1] == "all" else len(next(batches)))
"""


@pytest.mark.parametrize(("how", "printed"), [("all", "99"), ("some", "1")])
def test_workers_ignore_signals_of_the_job_and_end_with_their_rank(how, printed):
    begun = time.monotonic()
    command = [sys.executable, "-c", SCRIPT, how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout.readline() == "ready\n"
        for number in (signal.SIGTERM, signal.SIGUSR2):
            os.killpg(process.pid, number)
        output, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert (process.returncode, output.strip()) == (0, printed)
    assert time.monotonic() - begun < 30
