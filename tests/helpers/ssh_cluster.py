"""Clusters on this machine: real sshd instances with a home folder, users and second factor of their own.

Each sshd runs in a mount namespace with a copy of /etc, so that the machine is not changed. A proxy in front
of it can cut connections.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from helpers import REPOSITORY
from helpers.commands import run_command, skip_or_fail
from helpers.fork_server import free_port
from helpers.terminal import Terminal
from helpers.waiting import wait_for
from hpctrain.remote.ssh_connection import SshConnection

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def need_ssh() -> None:
    problem = None
    if os.geteuid() != 0:
        problem = "needs root, for sshd"
    elif missing := [
        name for name in ("sshd", "ssh", "rsync", "unshare") if not shutil.which(name, path=_PATH)
    ]:
        problem = f"needs {', '.join(missing)} (Debian: apt-get install openssh-server rsync util-linux)"
    elif run_command(["unshare", "--mount", "true"], {"PATH": _PATH}, check=False).returncode:
        problem = "needs mount namespaces, which this machine does not let us make"
    skip_or_fail(problem)


class Laptop:
    def __init__(self, folder: Path) -> None:
        self.home, self.project = folder / "laptop", folder / "laptop" / "project"
        self.project.mkdir(parents=True)
        (self.home / "bin").mkdir()
        self.config = self.home / "ssh_config"
        self.config.touch()
        # ssh finds ~/.ssh/config by the user, not by HOME.
        ssh = self.home / "bin" / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.config} "$@"\n')
        ssh.chmod(0o755)
        # Paths of sockets have at most 107 bytes.
        self.sockets = Path(tempfile.mkdtemp(prefix="ssh-"))
        self.key = self.home / "key"
        run_command(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key])
        self.env = {
            "HOME": str(self.home),
            "PATH": f"{self.home / 'bin'}:{os.environ['PATH']}",
            "XDG_RUNTIME_DIR": str(self.sockets),
            "XDG_STATE_HOME": "",
        }

    def hpctrain(
        self, *args: str, check: bool = True, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "hpctrain", *args]
        return run_command(argv, self.env, cwd=self.project, check=check, timeout=timeout)

    def on_terminal(
        self, *args: str, answers: Sequence[tuple[str, str]] = (), timeout: float = 60
    ) -> tuple[str, int]:
        """Run hpctrain on a terminal, answering its prompts; return the output and the exit code."""
        argv = [sys.executable, "-m", "hpctrain", *args]
        with Terminal(argv, self.project, self.env) as terminal:
            for prompt, answer in answers:
                terminal.expect(prompt, timeout)
                terminal.send(f"{answer}\n")
            code = terminal.wait(timeout)
            return terminal.output, code


class SshCluster:
    """An sshd on 127.0.0.1, as a host of the laptop's configuration."""

    def __init__(
        self, laptop: Laptop, name: str, *, key: bool = True, password: str = "", code: str = ""
    ) -> None:
        """Describe a host that accepts the laptop's `key`, a password, or also a code after the key."""
        self.laptop, self.name = laptop, name
        self.folder = laptop.home.parent / name
        self.home = self.folder / "home"
        self.home.mkdir(parents=True)
        (self.home / ".ssh").mkdir(mode=0o700)
        if key:
            shutil.copy(f"{laptop.key}.pub", self.home / ".ssh" / "authorized_keys")
        self._write_etc(password, code)
        self._uses_pam = "yes" if code else "no"
        run_command(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / "host_key"])
        self.write_profile(PATH=f"{Path(sys.executable).parent}:$PATH", PYTHONPATH=str(REPOSITORY))
        self._methods = "publickey,keyboard-interactive" if code else "any"
        self.port = free_port()

    def write_profile(self, **variables: str) -> None:
        """Set what a login shell exports. It also prints, as many sites do."""
        lines = [f'export {name}="{value}"' for name, value in variables.items()]
        profile = ["echo Welcome", "echo to the cluster >&2", "unset BASH_ENV", *lines]
        (self.home / ".bash_profile").write_text("\n".join(profile) + "\n")

    def _write_etc(self, password: str, code: str) -> None:
        # A copy of the folder, because mounts on its files would end when useradd replaces those files.
        etc = self.folder / "etc"
        run_command(["cp", "-a", "/etc", etc])
        hashed = run_command(["openssl", "passwd", "-6", password]).stdout.strip() if password else "*"
        users = {"passwd": f"root:x:0:0:root:{self.home}:/bin/bash", "shadow": f"root:{hashed}:1::::::"}
        for name, line_of_root in users.items():
            lines = (etc / name).read_text().splitlines()
            others = [line for line in lines if not line.startswith("root:")]
            (etc / name).write_text("\n".join([line_of_root, *others]) + "\n")
        check = self.folder / "check_code"
        check.write_text(f'#!/bin/sh\nread -r code\n[ "$code" = "{code}" ]\n')
        check.chmod(0o755)
        auth = f"pam_exec.so expose_authtok quiet {check}" if code else "pam_deny.so"
        # pam_exec ignores setcred, which must not fail.
        kinds = ("auth", "account", "session")
        rules = [f"auth requisite {auth}", *(f"{kind} required pam_permit.so" for kind in kinds)]
        (etc / "pam.d" / "sshd").write_text("\n".join(rules) + "\n")

    def start(self, *, tmpfs: str = "") -> None:
        """Start sshd; the home folder is a file system of that size if `tmpfs` is set."""
        config = self.folder / "sshd_config"
        config.write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.folder / 'host_key'}\nPidFile none\n"
            f"PermitRootLogin yes\nStrictModes no\nUsePAM {self._uses_pam}\n"
            f"AuthenticationMethods {self._methods}\nKbdInteractiveAuthentication {self._uses_pam}\n"
            f"AuthorizedKeysFile {self.home}/.ssh/authorized_keys\nMaxStartups 100\n"
        )
        mounts = [f"mount --bind {self.folder / 'etc'} /etc"]
        if tmpfs:
            saved = self.folder / "saved"
            mounts += [f"cp -a {self.home} {saved}", f"mount -t tmpfs -o size={tmpfs} tmpfs {self.home}"]
            mounts += [f"cp -a {saved}/. {self.home}"]
        sshd = shutil.which("sshd", path=_PATH)
        script = " && ".join(["mkdir -p /run/sshd", *mounts, f"exec {sshd} -D -e -f {config}"])
        with open(self.folder / "sshd.log", "ab") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
                env={"PATH": _PATH},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.point_to(self.port)
        wait_for(lambda: _answers(self.port), 20, f"sshd, which logs to {self.folder / 'sshd.log'}")

    def point_to(self, port: int, option: str = "") -> None:
        """Let the laptop connect to this port, such as that of a proxy, with one more option."""
        block = (
            f"Host {self.name}\n HostName 127.0.0.1\n Port {port}\n User root\n"
            f" IdentityFile {self.laptop.key}\n IdentitiesOnly yes\n"
            f" StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n {option}\n"
        )
        others = self.laptop.config.read_text().split("Host ")[1:]
        kept = [f"Host {other}" for other in others if not other.startswith(f"{self.name}\n")]
        self.laptop.config.write_text("".join([*kept, block]))

    def close_connection(self) -> None:
        command = SshConnection(self.name, self.laptop.env).command("")
        control = next(word for word in command if word.startswith("ControlPath="))
        run_command(["ssh", "-o", control, "-O", "exit", self.name], self.laptop.env, check=False)

    def stop(self) -> None:
        self.close_connection()
        self._process.terminate()
        self._process.wait(10)


class CuttingProxy:
    """A TCP proxy that cuts each connection after a number of bytes from the cluster, or on request."""

    def __init__(self, target: int, limit_bytes: int | None = None) -> None:
        self._target, self._limit_bytes = target, limit_bytes
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                upstream = socket.create_connection(("127.0.0.1", self._target))
                self._pairs.add((client, upstream))
                for ends in ((client, upstream, None), (upstream, client, self._limit_bytes)):
                    threading.Thread(target=self._copy, args=ends, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, left: int | None) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if left is not None and (left := left - len(data)) < 0:
                    break
                target.sendall(data)
        _shut_down(source, target)

    def cut(self) -> None:
        _shut_down(*(end for pair in self._pairs for end in pair))

    def close(self) -> None:
        self._server.close()
        self.cut()


def _shut_down(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def started(cluster: SshCluster, *, tmpfs: str = "") -> Iterator[SshCluster]:
    """Start a cluster, and stop it afterwards. The home folder is a file system of the size `tmpfs`."""
    cluster.start(tmpfs=tmpfs)
    try:
        yield cluster
    finally:
        cluster.stop()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
