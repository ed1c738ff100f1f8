"""Download of another Slurm version from the package mirror of this machine, without installing it.

Its programs run in a private mount namespace, in which the unpacked packages overlay `/usr`. Their C library
is newer than that of the machine, so the machine's own programs, such as Python, also run there.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import SpecError, UserError
from hpctrain.sandbox.layout import SandboxLayout, sandbox_lock

#: Parent of one folder per version. Not in root's home, because other users' jobs run these programs.
CACHE = Path("/var/cache/hpctrain/slurm")

#: Debian's releases from the oldest; `sid` never becomes a release.
_SUITES = ("bookworm", "trixie", "forky", "sid")
#: Names that a package source may use for a release.
_ALIASES = ("oldstable", "stable", "testing", "unstable")
#: The client comes first, so that its commands are known.
_PACKAGES = ("slurm-client", "slurmctld", "slurmd", "slurmdbd", "munge")
_VERSION = re.compile(r"\d\d\.\d\d(\.\d+)?")

#: Exists in `/usr` only in the mount namespace.
_MARK = "usr/.hpctrain-slurm"

_REQUIRED_BYTES = 600_000_000
_COMMAND_LIMIT_S = 300.0
_LOCK_LIMIT_S = 900.0

_LAUNCHER = """\
#!/bin/sh
# Runs a command with Slurm {version}, whose files lie over those of /usr.
# The links to this file have the names of Slurm's commands. No variables: they could be the command's own.
case ${{0##*/}} in
{name}) ;;
*)
    set -- "/usr/bin/${{0##*/}}" "$@"
    # Another cluster: run the installed command.
    /bin/grep -qsx ClusterName={cluster} "$SLURM_CONF" || exec "$@"
    ;;
esac
# Jobs of the sandbox already see these files.
[ -e {mark} ] && exec "$@"
if [ "$(/usr/bin/id -u)" = 0 ]; then
    set -- --propagation=slave /bin/sh -c {mount} sh "$@"
else
    # Mount as root of a user namespace, and run the command as the user again.
    set -- /usr/bin/unshare --map-user="$(/usr/bin/id -u)" --map-group="$(/usr/bin/id -g)" "$@"
    set -- --map-root-user /bin/sh -c {mount} sh "$@"
fi
exec /usr/bin/unshare --mount "$@"
"""


def matches_version(version: str, full: str) -> bool:
    """True if `version`, such as `26.05`, denotes the full version, such as `26.05.5`."""
    return bool(version) and f"{full}.".startswith(f"{version}.")


def download_slurm(version: str, cache: Path = CACHE) -> Path:
    """Return the folder with the unpacked packages of a Slurm version; download them the first time.

    The packages come from the mirror in this machine's package sources, and from a later Debian release.

    Args:
        version: such as `26.05` or `26.05.5`.
        cache: parent of the folders of all versions.

    Raises:
        SpecError: the version is neither in the cache nor on the mirror.
        UserError: this machine does not run Debian, its disk is full, the mirror does not respond, or a
            package cannot be unpacked.
    """
    if not _VERSION.fullmatch(version):
        raise SpecError(f"{version!r} is not a valid Slurm version. Use the form 26.05 or 26.05.5.")
    folder = cache / version
    if folder.exists():
        return folder
    codename = _codename()
    mirror = _mirror(codename)
    with sandbox_lock(cache, _LOCK_LIMIT_S):
        if folder.exists():
            return folder
        if (free := shutil.disk_usage(cache).free) < _REQUIRED_BYTES:
            raise UserError(
                f"Slurm {version} needs {_REQUIRED_BYTES / 1e6:.0f} MB in {cache}, but only "
                f"{free / 1e6:.0f} MB are free. Free some space, or make {cache} a link to a larger disk."
            )
        found = {}
        for suite in _SUITES[_SUITES.index(codename) + 1 :]:
            with tempfile.TemporaryDirectory(dir=cache) as temporary:
                apt = _Apt(Path(temporary), f"deb {mirror} {suite} main")
                found[suite] = apt.find_version()
                if matches_version(version, found[suite]):
                    _unpack(apt.download()).rename(folder)
                    return folder
    offers = ", ".join(f"{full} ({suite})" for suite, full in found.items())
    raise SpecError(f"{mirror} does not offer Slurm {version}. Available versions: {offers or 'none'}.")


def link_commands(plan: SandboxLayout, packages: Path) -> None:
    """Create the launcher of a sandbox and its folder of Slurm's commands, and configure the plugins.

    Args:
        plan: layout of the sandbox.
        packages: folder from `download_slurm`.

    Raises:
        UserError: this process may not mount.
    """
    mount = f'/bin/mount -t overlay overlay -o lowerdir={packages}/usr:/usr /usr && exec "$@"'
    text = _LAUNCHER.format(
        version=plan.shape.slurm,
        name=plan.launcher.name,
        cluster=plan.name,
        mark=f"/{_MARK}",
        mount=shlex.quote(mount),
    )
    plan.launcher.write_text(text, encoding="utf-8")
    plan.launcher.chmod(0o755)
    plan.commands.mkdir()
    for name in (packages / "commands").read_text(encoding="utf-8").split():
        (plan.commands / name).symlink_to(plan.launcher)
    # The same folder of /usr also contains the installed plugins.
    (plugins,) = packages.glob("usr/lib/*/slurm-wlm")
    with plan.conf.open("a", encoding="utf-8") as conf:
        conf.write(f"PluginDir={plugins}\n")
    done = subprocess.run([plan.launcher, "true"], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise UserError(
            f"Slurm {plan.shape.slurm} requires an overlay mount in a private namespace, which this machine "
            f"does not allow: {done.stderr.strip()}. If this is a container, start it with --privileged."
        )


class _Apt:
    """The apt-get client with separate sources, lists and packages, and no package considered installed."""

    def __init__(self, folder: Path, source: str) -> None:
        self._folder = folder
        for path in (folder / "lists/partial", folder / "cache/archives/partial"):
            path.mkdir(parents=True)
        (folder / "sources.list").write_text(f"{source}\n", encoding="utf-8")
        (folder / "status").touch()
        settings = {
            "Dir::Etc::SourceList": folder / "sources.list",
            "Dir::Etc::SourceParts": "-",
            "Dir::State::Lists": folder / "lists",
            "Dir::State::Status": folder / "status",
            "Dir::Cache": folder / "cache",
            "Acquire::Retries": 1,
            "Acquire::http::Timeout": 20,
            "Acquire::https::Timeout": 20,
            "APT::Update::Error-Mode": "any",
            "APT::Sandbox::User": "root",
        }
        self._options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]

    def find_version(self) -> str:
        """Return the Slurm version that the source offers; empty if it offers none."""
        _run(["apt-get", *self._options, "update"])
        policy = _run(["apt-cache", *self._options, "policy", _PACKAGES[0]])
        candidate = re.search(r"Candidate: ([\d.]+)", policy)
        return candidate[1] if candidate else ""

    def download(self) -> list[Path]:
        """Download the packages and all their dependencies; return their files, Slurm's client first."""
        command = ["install", "--yes", "--download-only", "--no-install-recommends", *_PACKAGES]
        _run(["apt-get", *self._options, *command])
        files = (self._folder / "cache/archives").glob("*.deb")
        return sorted(files, key=lambda file: (not file.name.startswith(f"{_PACKAGES[0]}_"), file.name))


def _unpack(packages: Sequence[Path]) -> Path:
    """Unpack into a folder beside the packages, and complete it."""
    folder = packages[0].with_name("unpacked")
    for number, package in enumerate(packages):
        _run(["dpkg-deb", "--extract", str(package), str(folder)])
        if number == 0:
            commands = sorted(path.name for path in (folder / "usr/bin").iterdir())
            (folder / "commands").write_text("\n".join(commands), encoding="utf-8")
    # An installation would do this by update-alternatives. Some daemons start only under these names.
    for program in (folder / "usr/sbin").glob("*-wlm"):
        program.with_name(program.name.removesuffix("-wlm")).symlink_to(program.name)
    (folder / _MARK).touch()
    return folder


def _codename() -> str:
    try:
        codename = platform.freedesktop_os_release().get("VERSION_CODENAME", "unknown")
    except OSError:
        codename = "unknown"
    if codename not in _SUITES:
        raise UserError(
            f"Another Slurm version requires Debian {_SUITES[0]} or newer, but this machine runs {codename}."
        )
    return codename


def _mirror(codename: str) -> str:
    """Return the mirror of the machine's own release."""
    form = "$(RELEASE) $(COMPONENT) $(REPO_URI)"
    targets = _run(["apt-get", "indextargets", "--format", form, "Created-By: Packages"]).splitlines()
    for release, component, mirror in (line.split(maxsplit=2) for line in targets):
        if release in (codename, *_ALIASES) and component == "main":
            return mirror
    raise UserError(
        f"The APT sources of this machine contain no mirror of {codename} main. Add one (see "
        "`man sources.list`)."
    )


def _run(command: Sequence[str]) -> str:
    environ = {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMMAND_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]} did not finish within {_COMMAND_LIMIT_S:.0f} s") from None
    except FileNotFoundError:
        raise UserError(f"Another Slurm version requires {command[0]}, which is not installed.") from None
    if done.returncode:
        errors = [
            line for line in done.stderr.splitlines() if line.startswith("E: ")
        ] or done.stderr.splitlines()
        raise UserError(f"{command[0]} failed with exit code {done.returncode}: {' '.join(errors[:3])}")
    return done.stdout
