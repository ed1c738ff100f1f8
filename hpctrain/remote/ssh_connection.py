"""Run commands and copy files on a login node with OpenSSH."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpctrain.errors import HpctrainError, UserError
from hpctrain.files import make_folder, make_private_folder

#: Exit code of ssh if the connection could not be opened, or was lost.
SSH_FAILED = 255

#: One login serves all commands until nothing has used the connection for 15 minutes. A connection without
#: an answer for 15 seconds counts as lost.
_OPTIONS = {
    "ControlMaster": "auto",
    "ControlPersist": "15m",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    "ConnectTimeout": "30",
    "LogLevel": "ERROR",
}
#: Bytes. macOS allows 103, and ssh appends 17 while it creates the socket.
_MAX_SOCKET_PATH = 86
_RECONNECT_LIMIT_S = 3600.0
#: Reports of ssh that another try will not change.
_PERMANENT = ("Permission denied", "Host key verification failed", "Too many authentication failures")

#: Messages of rsync: a failed system call, such as `No space left on device (28)`; a lost connection.
_REASON = re.compile(r": ([^:\n]+) \(\d+\)$", re.MULTILINE)
_FOLDER = re.compile(r"could not make way for new [a-z ]+: (.+)$", re.MULTILINE)
_LOST = re.compile(r"code 255|connection unexpectedly closed|Broken pipe|Connection reset")
#: Exit codes of rsync if the host cannot start its own rsync, and if files vanished during the copy.
_NOT_STARTED, _VANISHED = (126, 127), 24
#: Messages of a shell that cannot start a program.
_NOT_FOUND = "(command not found|not found|cannot execute|no such file|permission denied)"


class LoginNodeUnreachable(HpctrainError):
    """The login to a cluster failed, or the connection was lost."""

    exit_code = 3

    def __init__(self, message: str, *, is_permanent: bool = False) -> None:
        """`is_permanent` is true if another try cannot succeed, such as after a wrong password."""
        super().__init__(message)
        self.is_permanent = is_permanent


class SshConnection:
    """A host of `~/.ssh/config`. OpenSSH asks for passwords and second factors on the terminal."""

    def __init__(self, host: str, environ: Mapping[str, str]) -> None:
        if not host or host.startswith("-") or any(character.isspace() for character in host):
            raise UserError(
                f"{host!r} (--on) is not a valid host name. Use a host in ~/.ssh/config, such as mycluster."
            )
        self.host = host
        self.rsync_path = "rsync"
        options = {**_OPTIONS, "ControlPath": str(_socket_path(host, environ))}
        self._ssh = ["ssh", *(argument for item in options.items() for argument in ("-o", "=".join(item)))]

    def open(self) -> None:
        """Log in, unless an open connection exists."""
        with tempfile.NamedTemporaryFile("r", prefix="hpctrain-ssh-") as log:
            argv = [*self._ssh, "-E", log.name, "-T", self.host, "true"]
            try:
                code = subprocess.call(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            except FileNotFoundError:
                raise UserError("ssh not found on PATH. Install the OpenSSH client.") from None
            lines = [line for line in log.read().splitlines() if line]
        if code == SSH_FAILED:
            reason = lines[-1].rstrip(".\r") if lines else "ssh closed the connection"
            raise LoginNodeUnreachable(
                f"Cannot log in to {self.host}: {reason}. "
                f"Check the login with `ssh {shlex.quote(self.host)}`.",
                is_permanent=any(message in reason for message in _PERMANENT),
            )

    def reopen(self, report: Callable[[str], object]) -> None:
        """Log in again after a lost connection, for up to an hour."""
        report(f"The connection to {self.host} was lost. Reconnecting. Press Ctrl-C to stop.")
        deadline, pause_s = time.monotonic() + _RECONNECT_LIMIT_S, 0.5
        while True:
            try:
                self.open()
                return
            except LoginNodeUnreachable as error:
                if error.is_permanent or time.monotonic() > deadline:
                    raise
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 30.0)

    def command(self, script: str, *, terminal: bool = False) -> list[str]:
        """Return the local command that runs a shell script in a login shell of the host.

        Output of the files that the login shell reads, such as `~/.bash_profile`, is dropped.
        """
        login = f"bash -lc {shlex.quote(f'exec 1>&3 2>&4 3>&- 4>&-; {script}')}"
        quiet = f"exec sh -c {shlex.quote(f'exec 3>&1 4>&2 >/dev/null 2>&1; exec {login}')}"
        return [*self._ssh, "-t" if terminal else "-T", self.host, quiet]

    def run(self, script: str, content: str = "") -> subprocess.CompletedProcess[str]:
        """Run a script with `content` as its stdin, and return its output."""
        written = content.encode(errors="surrogateescape")
        result = subprocess.run(self.command(script), input=written, capture_output=True)
        self.check(result.returncode)
        out, err = (text.decode(errors="replace") for text in (result.stdout, result.stderr))
        return subprocess.CompletedProcess(script, result.returncode, out, err)

    def check(self, code: int, remedy: str = "Run the command again.") -> None:
        """Raise LoginNodeUnreachable if the exit code of ssh reports a lost connection."""
        if code == SSH_FAILED:
            raise LoginNodeUnreachable(f"The connection to {self.host} was lost. {remedy}")

    def find_rsync(self) -> None:
        """Find rsync on the PATH of a login shell, because rsync itself is not started in one."""
        self.rsync_path = self.run("command -v rsync").stdout.strip()
        if not self.rsync_path:
            raise UserError(f"rsync is not on the PATH of a login shell on {self.host}. Install rsync there.")

    def rsync(self, arguments: Sequence[str], content: str = "", *, may_vanish: bool = False) -> None:
        argv = ["rsync", "--protect-args", f"--rsync-path={shlex.quote(self.rsync_path)}"]
        argv += ["-e", shlex.join(self._ssh), *arguments]
        try:
            result = subprocess.run(
                argv, input=content, stderr=subprocess.PIPE, encoding="utf-8", errors="surrogateescape"
            )
        except FileNotFoundError:
            raise UserError("rsync not found on PATH. Install rsync on this machine.") from None
        # If writing to the ended command fails first, the exit code of rsync is another.
        failed = re.search(f"{re.escape(self.rsync_path)}: {_NOT_FOUND}", result.stderr, re.IGNORECASE)
        if result.returncode in _NOT_STARTED or failed:
            raise UserError(
                f"Cannot start {self.rsync_path} on {self.host} to copy files. Install rsync there."
            )
        if re.search("(unknown|unrecognized) option", result.stderr):
            raise UserError("rsync on this machine is too old to copy files. Install rsync 3.1 or newer.")
        if result.returncode and not (may_vanish and result.returncode == _VANISHED):
            # Not replaced with --force, because the folder may contain runs or data.
            if folder := _FOLDER.search(result.stderr):
                raise UserError(
                    f"{folder[1]!r} is a file here, but a folder on {self.host}. Rename or delete that "
                    "folder."
                )
            reasons = [reason for reason in _REASON.findall(result.stderr) if not _LOST.search(reason)]
            self.check(SSH_FAILED if not reasons and _LOST.search(result.stderr) else 0)
            reason = reasons[0] if reasons else result.stderr.strip() or f"exit code {result.returncode}"
            raise UserError(f"rsync cannot copy files between this machine and {self.host}: {reason}.")


def _socket_path(host: str, environ: Mapping[str, str]) -> Path:
    """Return the path of the socket for a host, as its name is configured now.

    ssh's own placeholder `%C` does not contain the jump host, so it can be equal for two hosts.
    """
    home = Path(environ.get("HOME", "~")).expanduser()
    config = home / ".ssh/config"
    changed_ns = config.stat().st_mtime_ns if config.exists() else 0
    name = f"hpctrain-{hashlib.sha256(f'{host} {changed_ns}'.encode()).hexdigest()[:16]}"
    folder = Path(environ.get("XDG_RUNTIME_DIR") or home / ".ssh")
    with suppress(OSError):
        make_folder(folder, private=True)
    if not os.access(folder, os.W_OK) or len(os.fsencode(folder / name)) > _MAX_SOCKET_PATH:
        folder = Path(tempfile.gettempdir(), f"hpctrain-{os.geteuid()}")
        make_private_folder(folder)
    return folder / name
