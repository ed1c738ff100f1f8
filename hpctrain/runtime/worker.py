"""The process of each rank: `python -P -m hpctrain.runtime.worker [ENVIRONMENT] '[SCRIPT, ARG, ...]'`.

It finds out its rank, sends its output to the rank's log, and runs the user's script as `__main__`, with
the variables that `env://` and torchrun scripts expect. It knows nothing of training, and imports no torch.

The script and its arguments come as one word, in JSON: to srun a word such as a lone `:` has a meaning.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from hpctrain.cluster import ENVIRONMENT_VARIABLE, Ranks, detect
from hpctrain.cluster.leftovers import end_leftovers
from hpctrain.errors import EXIT_CONTINUE
from hpctrain.output import make_lenient
from hpctrain.rundir import ATTEMPT_VARIABLE, LINE_VARIABLE, RUN_DIR_VARIABLE, WAIT_VARIABLE, RunDir
from hpctrain.runtime.code_copy import import_from_copy
from hpctrain.runtime.failure import write_failure
from hpctrain.runtime.leaving import let_gloo_rest
from hpctrain.runtime.lifeline import die_with_parent, die_with_supervisor
from hpctrain.runtime.line import Line, talk
from hpctrain.runtime.log_times import note_log_times
from hpctrain.runtime.node_sampler import NodeSampler
from hpctrain.runtime.signals import be_deaf_at_the_end, is_leaving, leave_on_stop
from hpctrain.runtime.stop_notes import STOP_SIGNALS, note_stops, told_to_stop
from hpctrain.runtime.telling import beat, tell
from hpctrain.runtime.waiting import wait_for_the_word

#: Exit codes of a script that was told to stop and did. Whether it had come to its end nobody can tell from
#: 0; a complete one ends at once when it is started again.
_LEFT_AS_TOLD = (0, *(128 + number for number in STOP_SIGNALS))


def main(argv: list[str]) -> NoReturn:
    """Run the script that the last word of `argv` names, with its arguments, as this process's rank.

    A word before it names the environment that tells the rank: Slurm's, or that of an agent of torchrun.
    """
    *environment, words = argv
    be_deaf_at_the_end()
    leave_on_stop()
    note_stops()
    die_with_supervisor(os.environ)
    if environment:
        # An agent cannot end its ranks any more when it is killed itself.
        die_with_parent()
    run, attempt = RunDir(Path(os.environ[RUN_DIR_VARIABLE])), int(os.environ[ATTEMPT_VARIABLE])
    # Srun and the local launcher speak Slurm's language; what an outer torchrun or the user's shell left
    # behind must not tell a rank that it is alone.
    os.environ.pop(ENVIRONMENT_VARIABLE, None)
    told_by = environment[0] if environment else "slurm"
    ranks = _know_ranks(told_by)
    script, *args = json.loads(words)
    where, ahead = os.environ.pop(LINE_VARIABLE, None), os.environ.pop(WAIT_VARIABLE, None)
    log = run.rank_log(attempt, ranks.rank)
    open_line, printed = partial(Line, where or "", ranks, attempt), b""
    if ahead is not None:
        line = open_line()
        word = wait_for_the_word(line, json.loads(ahead), script)
        os.environ.update(word.variables)
        ranks, printed = _know_ranks(told_by), word.printed
        open_line = partial(_same, line)
    _redirect_output(log, printed)
    note_log_times(run.log_times(attempt, ranks.node_rank), ranks.rank)
    if ranks.local_rank == 0:
        end_leftovers(os.environ[RUN_DIR_VARIABLE], attempt)
    sampler = NodeSampler(run, ranks, os.environ)
    faulthandler.enable()
    # The supervisor asks so where a rank cannot answer: one that runs native code, and holds Python's lock.
    faulthandler.register(signal.SIGQUIT)
    sys.argv = [script, *args]
    import_from_copy(os.environ)
    # As `python SCRIPT` does; this interpreter was started with -P, so no other folder stands first.
    sys.path.insert(0, str(Path(script).resolve().parent))
    if where is not None:
        talk(open_line, partial(beat, dict(os.environ)), partial(tell, run, attempt, ranks))
    words_of_exit: object = None
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        words_of_exit = leaving.code
    except BaseException as error:  # noqa: BLE001 (a rank ends here, and says of what)
        traceback.print_exception(error)
        if is_leaving():
            _exit_now(EXIT_CONTINUE, sampler)
        write_failure(run.failure(attempt, ranks.rank), error, log, os.environ)
        _exit_now(1, sampler)
    code = _exit_code(words_of_exit)
    if code != 0 and is_leaving():
        code = EXIT_CONTINUE
    if code == EXIT_CONTINUE:
        _exit_now(code, sampler)
    if (told := told_to_stop()) and code in _LEFT_AS_TOLD:
        print(f"hpctrain: {told.name} came, and the script left with exit code {code}: to be continued.")
        _exit_orderly(EXIT_CONTINUE, sampler)
    if code != 0:
        problem = RuntimeError(f"the script called sys.exit({words_of_exit!r})")
        write_failure(run.failure(attempt, ranks.rank), problem, log, os.environ)
        _exit_now(code, sampler)
    _exit_orderly(0, sampler)


def _know_ranks(told_by: str) -> Ranks:
    """Who this process is, which the environment then tells the script, too."""
    ranks = detect({**os.environ, ENVIRONMENT_VARIABLE: told_by})
    os.environ.update(ranks.torch_variables())
    return ranks


def _same(line: Line) -> Line:
    return line


def _redirect_output(log: Path, printed: bytes) -> None:
    """Send stdout and stderr, of native code too, to the end of `log`, line by line, behind `printed`.

    Where that cannot be opened, the disk being full perhaps, they go on to where the launcher's go.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError as error:
        make_lenient()
        print(f"hpctrain: {log} cannot be opened: {error.strerror}. What this rank prints goes here.")
        return
    with suppress(OSError):
        os.write(fd, printed)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    make_lenient()


def _exit_code(code: object) -> int:
    """The exit code that `sys.exit(code)` stands for; a text is printed, as Python does."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _exit_orderly(code: int, sampler: NodeSampler) -> NoReturn:
    """Leave as any script of Python does."""
    sampler.end()
    let_gloo_rest()
    sys.exit(code)


def _exit_now(code: int, sampler: NodeSampler) -> NoReturn:
    """Leave without the interpreter's clean-up, which may wait for peers that will not answer any more."""
    sampler.end()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
