"""Slurm versions other than the installed one, downloaded from the package mirror of this machine.

Its programs run in a private mount namespace, in which the unpacked packages overlay `/usr`. Their C library
is newer than that of the machine, so the machine's own programs, such as Python, also run there.
"""

import os
import platform
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from helpers.commands import skip_or_fail
from hpctrain import sandbox
from hpctrain.errors import UserError
from hpctrain.sandbox import Sandbox, installed_version, up
from hpctrain.sandbox.layout import SandboxLayout, sandbox_lock

#: The last has a smoke test in `make test`; `make test-slurm-versions` runs many tests with each.
SLURM_VERSIONS = ("24.11", "26.05")
#: Parent of one folder per version. Not in root's home, because other users' jobs run these programs.
CACHE = Path("/var/cache/hpctrain/slurm")

#: Debian's releases from the oldest; `sid` never becomes a release.
_SUITES = ("bookworm", "trixie", "forky", "sid")
#: Names that a package source may use for a release.
_ALIASES = ("oldstable", "stable", "testing", "unstable")
_PACKAGES = ("slurm-client", "slurmctld", "slurmd", "slurmdbd", "munge")

#: Exists in `/usr` only in the mount namespace.
_MARK = "usr/.hpctrain-slurm"

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

    Raises:
        UserError: the version is neither in the cache nor in a later Debian release on this machine's mirror.
    """
    folder = cache / version
    if folder.exists():
        return folder
    codename = platform.freedesktop_os_release().get("VERSION_CODENAME", "unknown")
    if codename not in _SUITES:
        raise UserError(f"needs Debian {_SUITES[0]} or newer, not {codename}")
    mirror = _mirror(codename)
    with sandbox_lock(cache, _LOCK_LIMIT_S):
        for suite in () if folder.exists() else _SUITES[_SUITES.index(codename) + 1 :]:
            with tempfile.TemporaryDirectory(dir=cache) as temporary:
                options = _apt_options(Path(temporary), f"deb {mirror} {suite} main")
                _run(["apt-get", *options, "update"])
                policy = _run(["apt-cache", *options, "policy", _PACKAGES[0]])
                candidate = re.search(r"Candidate: ([\d.]+)", policy)
                if candidate and matches_version(version, candidate[1]):
                    install = ["install", "--yes", "--download-only", "--no-install-recommends", *_PACKAGES]
                    _run(["apt-get", *options, *install])
                    _unpack(Path(temporary, "cache/archives")).rename(folder)
                    break
    if not folder.exists():
        raise UserError(f"{mirror} does not offer Slurm {version}")
    return folder


def link_commands(plan: SandboxLayout, version: str, packages: Path) -> None:
    """Create the launcher of a sandbox and its folder of Slurm's commands, and configure the plugins."""
    mount = f'/bin/mount -t overlay overlay -o lowerdir={packages}/usr:/usr /usr && exec "$@"'
    names = {"version": version, "name": plan.launcher.name, "cluster": plan.name}
    plan.launcher.write_text(_LAUNCHER.format(mark=f"/{_MARK}", mount=shlex.quote(mount), **names))
    plan.launcher.chmod(0o755)
    plan.commands.mkdir()
    for name in (packages / "commands").read_text().split():
        (plan.commands / name).symlink_to(plan.launcher)
    # The same folder of /usr also contains the installed plugins.
    (plugins,) = packages.glob("usr/lib/*/slurm-wlm")
    with plan.conf.open("a") as conf:
        conf.write(f"PluginDir={plugins}\n")
    _run([str(plan.launcher), "true"])


def _apt_options(folder: Path, source: str) -> list[str]:
    """Return options with separate sources, lists and packages, and no package considered installed."""
    for path in (folder / "lists/partial", folder / "cache/archives/partial"):
        path.mkdir(parents=True)
    (folder / "sources.list").write_text(f"{source}\n")
    (folder / "status").touch()
    settings = {
        "Dir::Etc::SourceList": folder / "sources.list",
        "Dir::Etc::SourceParts": "-",
        "Dir::State::Lists": folder / "lists",
        "Dir::State::Status": folder / "status",
        "Dir::Cache": folder / "cache",
        "Acquire::http::Timeout": 20,
        "APT::Update::Error-Mode": "any",
        "APT::Sandbox::User": "root",
    }
    return [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]


def _unpack(archives: Path) -> Path:
    """Unpack all packages into a folder beside them, and complete it."""
    folder = archives / "unpacked"
    # The client comes first, so that its commands are known.
    packages = sorted(archives.glob("*.deb"), key=lambda file: not file.name.startswith(f"{_PACKAGES[0]}_"))
    for number, package in enumerate(packages):
        _run(["dpkg-deb", "--extract", str(package), str(folder)])
        if number == 0:
            commands = sorted(path.name for path in (folder / "usr/bin").iterdir())
            (folder / "commands").write_text("\n".join(commands))
    # An installation would do this by update-alternatives. Some daemons start only under these names.
    for program in (folder / "usr/sbin").glob("*-wlm"):
        program.with_name(program.name.removesuffix("-wlm")).symlink_to(program.name)
    (folder / _MARK).touch()
    return folder


def _mirror(codename: str) -> str:
    form = "$(RELEASE) $(COMPONENT) $(REPO_URI)"
    targets = _run(["apt-get", "indextargets", "--format", form, "Created-By: Packages"]).splitlines()
    for release, component, mirror in (line.split(maxsplit=2) for line in targets):
        if release in (codename, *_ALIASES) and component == "main":
            return mirror
    raise UserError(f"the APT sources of this machine contain no mirror of {codename} main")


def _run(command: Sequence[str]) -> str:
    environ = {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"{error}: {getattr(error, 'stderr', '')}") from error
    return done.stdout


def need_slurm_version(version: str) -> None:
    """Skip the test if the mirror cannot be reached or is not Debian's; with CI=true, fail."""
    try:
        download_slurm(version)
    except UserError as error:
        skip_or_fail(f"Slurm {version} is not available: {error}")


def up_with_version(
    name: str, *, slurm: str = "", kind: type[Sandbox] = Sandbox, settings: Sequence[str] = (), **options: Any
) -> Sandbox:
    """Start a sandbox with a Slurm version, which is downloaded the first time; empty: the installed one."""
    if not slurm or matches_version(slurm, installed_version()):
        return up(name, kind=kind, settings=settings, **options)
    packages = download_slurm(slurm)

    class VersionedSandbox(kind):
        def prepare(self) -> None:
            link_commands(self, slurm, packages)
            super().prepare()

    # With 3 s, Slurm 24.11 regards healthy nodes as lost.
    return up(name, kind=VersionedSandbox, settings=["SlurmdTimeout=5", *settings], **options)


@contextmanager
def new_cluster(name: str, *, slurm: str = "", **options: Any) -> Iterator[Sandbox]:
    """Start a cluster for the block, with a Slurm version if given."""
    name = f"{name}-{os.getpid()}"
    if slurm:
        need_slurm_version(slurm)
    # `--slurm-version` replaces `sandbox.up`.
    start = partial(up_with_version, slurm=slurm) if slurm else sandbox.up
    try:
        yield start(name, **options)
    finally:
        sandbox.down(name)
