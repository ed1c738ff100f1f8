"""Fixtures of all tests: a Slurm cluster per session, and a check for leftovers of each test."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from string import ascii_lowercase
from types import FrameType

import pytest
import pytest_timeout
from helpers import REPOSITORY, fork_server
from helpers.accounting_slurm import AccountingSandbox, need_accounting
from helpers.commands import skip_or_fail
from helpers.slurm_versions import need_slurm_version, up_with_version
from helpers.waiting import deadline_in, scaled
from hypothesis import settings
from packaging.version import Version
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from hpctrain import sandbox
from hpctrain.errors import UserError
from hpctrain.sandbox.slurm_sandbox import check_requirements

_SANDBOX_PREFIX = "pytest-"

# A busy machine may delay any example.
settings.register_profile("any load", settings(), deadline=None)
settings.load_profile("any load")

#: Every test in these folders starts ranks.
_FOLDERS_WITH_RANKS = ("e2e", "examples")

#: Variables that pytest and torch set by themselves.
_SET_BY_TOOLS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")

#: Time limit for finished processes to end, on an idle machine.
_PROCESS_EXIT_TIMEOUT_S = 5.0

#: Helpers that Python and torch keep until the process ends.
_RESIDENT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests that take minutes, too")
    parser.addoption("--slurm-version", help="Slurm version of all clusters: installed, 24.11, …")


def pytest_configure(config: pytest.Config) -> None:
    version = config.getoption("--slurm-version")
    if version not in (None, "installed"):
        sandbox.up = partial(up_with_version, slurm=version)
    # Background jobs of a shell without job control ignore SIGINT, and so do their children.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_FUNCTION = re.compile(r"^def (\w+)\((.*?)\)", re.MULTILINE | re.DOTALL)


class SharedSlurmScheduling(LoadScopeScheduling):
    """Schedules tests by file, because they may share a run, but those on Slurm in two groups and first."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        if "[slurm" in test or test.partition("[")[0] in _functions_on_slurm(REPOSITORY / file):
            return f"slurm, {file.split('/')[1] == 'jobs'}"
        return file


@cache
def _functions_on_slurm(file: Path) -> set[str]:
    """Return the functions of a file that use Slurm, directly or by a fixture of the file."""
    functions = {name: set(re.findall(r"\w+", words)) for name, words in _FUNCTION.findall(file.read_text())}
    found, grown = {"slurm", "accounting"}, True
    while grown:
        new = {name for name, words in functions.items() if words & found} - found
        found, grown = found | new, bool(new)
    return found


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> SharedSlurmScheduling | None:
    return SharedSlurmScheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if {"slurm", "accounting"}.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("slurm")
        if item.path.parent.name in _FOLDERS_WITH_RANKS:
            item.add_marker("ranks")
    if Version(metadata.version("torch")) < Version("2.8"):  # refused, which a test of the strategies checks
        too_new = pytest.mark.skip(reason="the strategy needs torch 2.8")
        for item in items:
            is_named = re.search("zero[23]|fsdp|fully_shard|pipeline|stage", item.nodeid.partition("::")[2])
            if is_named or item.get_closest_marker("fully_sharded"):
                item.add_marker(too_new)
    if config.getoption("--long") or "long" in config.getoption("-m"):
        return
    excluded = {"long"} if os.environ.get("CI") else {"long", "extended"}
    deselected = [item for item in items if excluded.intersection(mark.name for mark in item.iter_markers())]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]


def pytest_runtest_setup(item: pytest.Item) -> None:
    fork_server.may_start = item.get_closest_marker("ranks") is not None
    if item.get_closest_marker("slurm"):
        if (version := item.config.getoption("--slurm-version")) not in (None, "installed"):
            need_slurm_version(version)
        _need_slurm()
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and torch sees none")


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool:
    """Scale the time limit of a test by the load at its end. Never end the process."""
    if threading.current_thread() is not threading.main_thread():
        return True
    start = time.monotonic()

    def on_alarm(_number: int, _frame: FrameType | None) -> None:
        __tracebackhide__ = True
        left = start + scaled(settings.timeout) - time.monotonic()
        if left > 0:
            signal.setitimer(signal.ITIMER_REAL, left)
        else:
            pytest_timeout.timeout_sigalrm(item, settings)

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True


@pytest.fixture(scope="session")
def slurm() -> Iterator[sandbox.Sandbox]:
    """A real cluster of 4 nodes × 2 GPUs and 8 CPUs; a preemption kills after 30 s, a cancel after 5 s.

    Tests share it: cancel what you submitted, restart what you killed.
    """
    yield from _sandbox(f"{_SANDBOX_PREFIX}{os.getpid()}")


@pytest.fixture(scope="session")
def accounting() -> Iterator[sandbox.Sandbox]:
    """Like `slurm`, with slurmdbd and its database: a cluster on which `sacct` works."""
    need_accounting()
    yield from _sandbox(f"{_SANDBOX_PREFIX}a{os.getpid()}", AccountingSandbox)


def _sandbox(name: str, kind: type[sandbox.Sandbox] = sandbox.Sandbox) -> Iterator[sandbox.Sandbox]:
    _need_slurm()
    _remove_abandoned()
    # Scripts of users compute ports from job ids, and the clusters of several test processes share the hosts.
    first_job = 1 + 500 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    settings = ["KillWait=5", "Licenses=solver:4,viewer", f"FirstJobId={first_job}"]
    box = sandbox.up(name, kind=kind, nodes=4, gpus_per_node=2, cpus_per_node=8, settings=settings)
    try:
        yield box
    finally:
        box.down()


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    """Fail a test that leaves an environment variable or a child process, and remove it."""
    variables, children = _variables(), _children()
    yield
    if (unfinished_training := sys.modules.get("hpctrain.runtime.unfinished_training")) is not None:
        unfinished_training._has_stopped = False
    current = _variables()
    changed = sorted(
        key for key in variables.keys() | current.keys() if variables.get(key) != current.get(key)
    )
    for key in changed:
        os.environ.pop(key, None)
        if key in variables:
            os.environ[key] = variables[key]
    deadline = deadline_in(_PROCESS_EXIT_TIMEOUT_S)
    while remaining := {pid: argv for pid, argv in _children().items() if pid not in children}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for pid in remaining:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert not changed, f"the test changed the environment: {', '.join(changed)}"
    assert not remaining, f"the test left child processes: {remaining}"


def _need_slurm() -> None:
    try:
        check_requirements()
    except UserError as error:
        skip_or_fail(str(error))


def _remove_abandoned() -> None:
    """Take down the sandboxes of killed test sessions."""
    for name in sandbox.list_names():
        pid = name.removeprefix(_SANDBOX_PREFIX).lstrip(ascii_lowercase)
        if name.startswith(_SANDBOX_PREFIX) and pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            sandbox.down(name)


def _variables() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in _SET_BY_TOOLS}


def _children() -> dict[int, str]:
    """Return our living children and their command lines; an empty dict without /proc."""
    if sys.platform != "linux":
        return {}
    children = {}
    for thread in Path("/proc/self/task").iterdir():
        try:
            pids = (thread / "children").read_text().split()
        except OSError:
            continue
        for pid in pids:
            try:
                argv = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            # A zombie has no command line: it has ended, and the owner of its Popen waits for it.
            if argv and not any(resident in argv for resident in _RESIDENT):
                children[int(pid)] = argv.strip()
    return children
