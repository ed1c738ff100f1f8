"""Pace of the programs, and the hang of one rank in the first attempt."""

import os
import time

STEPS = 60
HANG_AT = 12


def sleep_forever():
    time.sleep(1000)


def pace(step: int) -> None:
    """Wait a little before a step. With HANG=1, rank 3 of the first attempt never reaches its twelfth."""
    time.sleep(0.05)
    attempt, rank = os.environ["HPCTRAIN_ATTEMPT"], os.environ["RANK"]
    if os.environ.get("HANG") == "1" and (attempt, rank, step) == ("0", "3", HANG_AT):
        sleep_forever()


def folder() -> str:
    path = os.path.join(os.environ["HPCTRAIN_RUN_DIR"], "checkpoints")
    os.makedirs(path, exist_ok=True)
    return path


def finish(step: int) -> None:
    if os.environ["RANK"] == "0":
        print(f"finished after {step} steps", flush=True)
