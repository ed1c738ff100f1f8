"""Terminal of the debugger of a rank on this host: `python -P -m … RUN_DIR ATTEMPT RANK`."""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hpctrain.cluster.processes import ProcessInfo, processes
from hpctrain.errors import RunFailed, UserError, WaitTimeout
from hpctrain.runtime.program.attach import require_rank
from hpctrain.runtime.program.child_relay import is_own_process
from hpctrain.runtime.program.debugger import debug_address, debug_signal

#: Time for the main thread to return to Python code.
_LIMIT_S = 30.0
#: Time in which a rank exits after its end, or the end of its supervisor.
_EXIT_S = 0.5


def main(argv: list[str]) -> NoReturn:
    """Run the command line described in the module docstring."""
    rank = argv[2]
    process = _debuggable(require_rank(*argv))
    if process is None:
        _exit(
            f"Rank {rank} cannot be debugged yet. Either the rank is still starting, or it is running a "
            "command whose Python program has not imported torch yet. Try again in a few seconds.",
            RunFailed.exit_code,
        )
    with socket.socket(socket.AF_UNIX) as listening:
        try:
            listening.bind(f"\0{debug_address(process.pid)}")
        except OSError:
            _exit(f"Rank {rank} is already being debugged.", UserError.exit_code)
        listening.listen()
        _interrupt(process)
        if (connected := _accept(listening)) is None:
            _exit(
                f"Rank {rank} did not stop within {_LIMIT_S:g} s, because its main thread is running native "
                "code. If the rank is waiting for another rank, debug that rank instead.",
                WaitTimeout.exit_code,
            )
        with connected:
            _converse(connected, process)
    # The statement at the prompt, or the end of the run, may have ended the rank.
    time.sleep(_EXIT_S)
    if not Path(f"/proc/{process.pid}").exists():
        _exit(f"Rank {rank} has exited.", RunFailed.exit_code)
    print(f"Detached. Rank {rank} continues.")
    sys.exit()


def _debuggable(rank: ProcessInfo) -> ProcessInfo | None:
    """Return the process of the rank that handles the signal of the debugger, or a program of its command."""
    if (number := debug_signal()) is None:
        return None
    own = processes()
    family = [rank]
    for process in family:
        with suppress(FileNotFoundError, ProcessLookupError):  # The process may exit at any moment.
            status = Path(f"/proc/{process.pid}/status").read_text()
            (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
            if int(caught, 16) >> (number - 1) & 1:
                return process
        family += [child for child in own if child.parent == process.pid]
    return None


def _interrupt(process: ProcessInfo) -> None:
    if (number := debug_signal()) is not None:
        process.signal(number)


def _accept(listening: socket.socket) -> socket.socket | None:
    """Return the connection of the rank; None if it does not connect in time."""
    deadline = time.monotonic() + _LIMIT_S
    while select.select([listening], [], [], max(0.0, deadline - time.monotonic()))[0]:
        connected, _ = listening.accept()
        if is_own_process(connected):
            return connected
        connected.close()
    return None


def _converse(connected: socket.socket, process: ProcessInfo) -> None:
    """Pass input to the debugger and its output to the terminal until it detaches. Ctrl-C stops the rank."""
    sources: list[int] = [connected.fileno(), sys.stdin.fileno()]
    while True:
        try:
            ready, _, _ = select.select(sources, [], [])
            if connected.fileno() in ready:
                if not (output := connected.recv(65536)):
                    return
                os.write(sys.stdout.fileno(), output)
            elif entered := os.read(sys.stdin.fileno(), 65536):
                connected.sendall(entered)
            else:
                connected.shutdown(socket.SHUT_WR)
                sources.pop()
        except KeyboardInterrupt:
            if sys.stdin.fileno() not in sources:
                return
            _interrupt(process)
        except ConnectionError:
            return


def _exit(message: str, code: int) -> NoReturn:
    print(f"Error: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
