"""Explain exit codes, wait statuses and signals."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

from hpctrain.errors import EXIT_CONTINUE, RunFailed, SchedulerError, UserError
from hpctrain.text import signal_name

#: Exit codes of programs. hpctrain's own are in `hpctrain.errors`.
EXIT_CODES = {
    0: "success",
    1: "an error; for a Python script, an exception that was not caught",
    UserError.exit_code: f"in hpctrain: {UserError.__doc__} In other programs: wrong arguments",
    SchedulerError.exit_code: f"in hpctrain: {SchedulerError.__doc__}",
    RunFailed.exit_code: f"in hpctrain: {RunFailed.__doc__}",
    EXIT_CONTINUE: "the rank stopped as requested, and hpctrain continues the run from its last checkpoint",
    124: "`timeout` ended the program after its time limit",
    126: "the program was found, but cannot be executed; check its permissions",
    127: "the program was not found; check PATH, --module, --conda and --venv",
}
#: Causes of signals, and what to do.
SIGNALS: dict[int, str] = {
    signal.SIGABRT: "the program aborted itself, often after an error in C++ or NCCL; see its log",
    signal.SIGBUS: "a memory access failed, often because /dev/shm or a disk is full; use fewer data workers",
    signal.SIGCONT: "Slurm sends this signal before SIGTERM, so that suspended processes can stop",
    signal.SIGFPE: "an arithmetic error in native code, such as an integer division by zero",
    signal.SIGHUP: "the terminal or the parent process ended",
    signal.SIGILL: "the program has an instruction that this CPU lacks; build it for this type of node",
    signal.SIGINT: "interrupted with Ctrl-C",
    signal.SIGKILL: "killed without a chance to save: by the kernel because memory ran out, by Slurm "
    "at the end of a grace time, or by a user. If the job state is OUT_OF_MEMORY, use a larger --mem",
    signal.SIGPIPE: "the program wrote to a pipe whose reader had closed it",
    signal.SIGQUIT: "hpctrain sends this signal to hanging ranks, which then print their stacks",
    signal.SIGSEGV: "an invalid memory access in native code; look for a faulty C extension or driver",
    signal.SIGTERM: "a request to stop: a preemption, `scancel` or the time limit. hpctrain saves the state",
    signal.SIGUSR1: "user-defined; some tools use it as a warning before the time limit",
    signal.SIGUSR2: "hpctrain's request to save the state and stop before the time limit",
    signal.SIGXCPU: "the limit on CPU time was reached (ulimit -t)",
    signal.SIGXFSZ: "the limit on the file size was reached (ulimit -f)",
}
_CODE = re.compile(r"(\d{1,5})(?::(\d{1,2}))?", re.ASCII)


def explain_exit(field: str) -> Iterator[tuple[str, str]]:
    """Yield kind and meaning of an exit code (137), Slurm's ExitCode (0:9) or a signal (SIGKILL)."""
    names = {name: number for number in signal.Signals for name in (number.name, number.name[3:])}
    if number := names.get(field.upper()):
        reason = _explain_signal(number).partition(": ")[2]
        yield "signal", f"{reason}. Exit code {128 + number}, in Slurm 0:{number}"
    elif match := _CODE.fullmatch(field):
        code = int(match[1])
        if match[2] is not None:
            yield "ExitCode of Slurm", _explain_both(code, int(match[2]))
        elif code > 255:
            reason = _explain_both(code >> 8, code & 127)
            yield "wait status", f"{reason}. PBS also writes 256 + N if signal N ended the job"
        else:
            yield "exit code", _explain_code(code)


def _explain_both(code: int, number: int) -> str:
    """Explain an exit code with a signal, of which one is usually 0."""
    if (code, number) == (0, 53):
        return "Slurm could not open the output file or the folder of the job; check the path and the quota"
    reasons = [f"exit code {code}: {_explain_code(code)}"] if code or not number else []
    return ". ".join([*reasons, *([_explain_signal(number)] if number else [])])


def _explain_code(code: int) -> str:
    if 128 < code <= 128 + signal.SIGRTMAX:
        return _explain_signal(code - 128)
    return EXIT_CODES.get(code, "an error code defined by the program")


def _explain_signal(number: int) -> str:
    return f"{signal_name(number)}: {SIGNALS.get(number) or signal.strsignal(number) or 'unknown'}"
