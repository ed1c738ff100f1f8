"""The script of a run whose ranks call a function: join the other ranks, call it, write down what it returns.

The worker runs it by its path, as any script. What it calls lies in the run folder, and is read anew in every
attempt: nothing that a rank changed is carried over, unless the function has a method `checkpoint`, which
says what to call in its place next time (submitit's protocol). That method is called after the function
has left, never inside a signal handler, and on all ranks.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hpctrain.checkpoint.manifest import committed_steps
from hpctrain.cluster import Ranks, detect
from hpctrain.errors import EXIT_CONTINUE, UserError
from hpctrain.files import write_atomic
from hpctrain.pickles import Call, Parcel, dumps
from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDir
from hpctrain.runtime.code_copy import import_from_copy
from hpctrain.runtime.failure import mark_final
from hpctrain.runtime.leaving import leave_group
from hpctrain.runtime.process_group import Team, join
from hpctrain.runtime.signals import LeftAtOnce, listen
from hpctrain.runtime.stop_notes import settle_stop


def main() -> None:
    """Call the function of this rank's run."""
    run, attempt = RunDir(Path(os.environ[RUN_DIR_VARIABLE])), int(os.environ[ATTEMPT_VARIABLE])
    ranks = detect(os.environ)
    parcel = Parcel.read(run.continuation if run.continuation.exists() else run.function)
    own_folder = str(Path(__file__).parent)
    sys.path[:] = dict.fromkeys([*parcel.sys_path, *(path for path in sys.path if path != own_folder)])
    import_from_copy(os.environ)
    for name, value in _submitit_variables(run, ranks, os.environ).items():
        os.environ.setdefault(name, value)
    team = _make_group_ready(ranks)
    try:
        call = parcel.open()
        value = _result_of(call, parcel, run, team)
        data = dumps(value, call.name, [("result", value)])
    except Exception as error:
        if _is_final(error, parcel, run):
            mark_final(error)
        _keep_exception(error, run.raised(attempt, ranks.rank))
        raise
    path = run.result(attempt, ranks.rank)
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, data)
    # It has returned, whatever it was told meanwhile.
    settle_stop()


def _submitit_variables(run: RunDir, ranks: Ranks, environ: Mapping[str, str]) -> dict[str, str]:
    """What submitit.JobEnvironment reads, where a function may look who it is. Slurm sets most of it."""
    return {
        "SUBMITIT_EXECUTOR": "slurm",
        "SUBMITIT_FOLDER": str(run.path),
        "SLURM_NTASKS": str(ranks.world_size),
        "SLURM_JOB_NUM_NODES": str(ranks.num_nodes),
        "SLURM_JOB_NODELIST": environ["SLURM_STEP_NODELIST"],
    }


def _make_group_ready(ranks: Ranks) -> Team:
    """Make the process group, also for a single rank: what the function does then works on any number."""
    team = join(ranks, os.environ)
    if not team.is_distributed:
        backend = "cpu:gloo,cuda:nccl" if team.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        atexit.register(leave_group)
    return team


def _result_of(call: Call, parcel: Parcel, run: RunDir, team: Team) -> Any:
    """What the function returns.

    Raises:
        SystemExit: with code 75, where it is to be continued.
        RuntimeError: it exits with an error.
    """
    try:
        return call()
    except LeftAtOnce:
        if team.ranks.world_size == 1:
            _keep_continuation(call, parcel, run, team)
        elif _checkpoint_of(call) is not None:
            print(
                f"hpctrain: the ranks left wherever they were, so {call.name}.checkpoint() is not called and "
                "the function will start anew. Have it call hpctrain.should_stop(), and sys.exit(75) then."
            )
        raise
    except SystemExit as leaving:
        if leaving.code == EXIT_CONTINUE:
            _keep_continuation(call, parcel, run, team)
            raise
        if leaving.code not in (None, 0):
            raise RuntimeError(f"{call.name}() called sys.exit({leaving.code!r})") from leaving
        return None


def _is_final(error: Exception, parcel: Parcel, run: RunDir) -> bool:
    """Whether another start would come to the same end.

    It may not where a link or a device was at fault, or where there is something to go on from.
    """
    if isinstance(error, UserError):
        return True
    may_pass = isinstance(error, (dist.DistError, torch.AcceleratorError))
    return not (parcel.again or may_pass or run.continuation.exists() or _has_checkpoint(run))


def _has_checkpoint(run: RunDir) -> bool:
    """Whether there is a whole checkpoint of the `Trainer`'s, or anything of the function's own."""
    if next(committed_steps(run.checkpoints), None) is not None:
        return True
    names = [path.name for path in run.checkpoints.glob("*")]
    return any(not name.startswith((".", "step-")) for name in names)


def _checkpoint_of(call: Call) -> Callable[..., Any] | None:
    for name in ("__submitit_checkpoint__", "checkpoint"):
        if (method := getattr(call.function, name, None)) is not None:
            return method  # type: ignore[no-any-return]
    return None


def _keep_continuation(call: Call, parcel: Parcel, run: RunDir, team: Team) -> None:
    """Ask the function what to call next time, and have rank 0 write it down. All ranks must call this."""
    checkpoint = _checkpoint_of(call)
    if checkpoint is None:
        return
    with listen():  # Who tells us to stop once more has to wait for this.
        following = checkpoint(*call.args, **call.kwargs)
        if team.ranks.is_main and following is None:
            print(f"hpctrain: {call.name}.checkpoint() returned None, so the run ends here.")
            run.cancel_request.touch()
        elif team.ranks.is_main:
            then = Call(following.function, tuple(following.args), dict(following.kwargs))
            Parcel(then.to_bytes(), parcel.sys_path, parcel.again).write(run.continuation)
        if dist.is_initialized():
            team.barrier()


def _keep_exception(error: Exception, path: Path) -> None:
    """Write the exception down for whoever submitted the function, where it can be pickled."""
    with suppress(Exception):
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, dumps(error, "", []))


if __name__ == "__main__":
    from hpctrain.runtime import function

    function.main()
