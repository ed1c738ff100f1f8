"""Separate hosts on one machine: each is a network namespace with a name, addresses and an /etc/hosts."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from helpers.commands import environment, run_command, skip_or_fail

_NETWORK, _NETWORK6 = "10.77.0", "fd77:"
_ETC = Path("/etc/netns")


def need_separate_hosts() -> None:
    problem = None
    if os.geteuid() != 0:
        problem = "needs root, for it makes network namespaces"
    elif missing := [name for name in ("ip", "unshare") if not shutil.which(name, path=_PATH)]:
        problem = f"needs {' and '.join(missing)} (Debian: apt-get install iproute2 util-linux)"
    elif run_command(["unshare", "--net", "--uts", "true"], {"PATH": _PATH}, check=False).returncode:
        problem = "needs network namespaces, which this machine does not let us make"
    skip_or_fail(problem)


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class SeparateHosts:
    """Hosts n1, n2, … on an isolated network. Use as a context manager."""

    def __init__(self, count: int) -> None:
        self._prefix = f"hpctrain-test-{os.getpid()}"
        self.names = [f"n{i}" for i in range(1, count + 1)]

    def address(self, host: str) -> str:
        return f"{_NETWORK}.{host.removeprefix('n')}"

    def address6(self, host: str) -> str:
        return f"{_NETWORK6}:{host.removeprefix('n')}"

    def __enter__(self) -> Self:
        try:
            hub = self._space("hub")
            self._ip("netns", "add", hub)
            self._ip("-n", hub, "link", "add", "bridge", "type", "bridge")
            self._ip("-n", hub, "link", "set", "bridge", "up")
            for name in self.names:
                self._add(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in ["hub", *self.names]:
            self._ip("netns", "delete", self._space(name), check=False)
            shutil.rmtree(_ETC / self._space(name), ignore_errors=True)

    def set_hosts(self, host: str, lines: Mapping[str, str]) -> None:
        """Make `host` resolve these names to these addresses, and no others."""
        folder = _ETC / self._space(host)
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **lines}.items())
        (folder / "hosts").write_text(text)
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")

    def start(
        self, host: str, argv: Sequence[str | Path], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.words(host, argv),
            env=environment({"PATH": _PATH, **(env or {})}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def words(self, host: str, argv: Sequence[str | Path]) -> list[str]:
        renamed = ["unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh"]
        return ["ip", "netns", "exec", self._space(host), *renamed, *map(str, argv)]

    def plug(self, host: str, *, plugged: bool) -> None:
        self._ip("-n", self._space("hub"), "link", "set", host, "up" if plugged else "down")

    def _add(self, name: str) -> None:
        space, hub = self._space(name), self._space("hub")
        self._ip("netns", "add", space)
        self._ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", name, "netns", hub)
        self._ip("-n", hub, "link", "set", name, "master", "bridge", "up")
        self._ip("-n", space, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
        self._ip("-n", space, "address", "add", f"{self.address6(name)}/64", "dev", "eth0", "nodad")
        for device in ("lo", "eth0"):
            self._ip("-n", space, "link", "set", device, "up")
        self.set_hosts(name, {other: self.address(other) for other in self.names})

    def _space(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _ip(self, *args: str, check: bool = True) -> None:
        run_command(["ip", *args], {"PATH": _PATH}, check=check)
