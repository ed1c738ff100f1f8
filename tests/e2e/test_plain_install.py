"""The wheel, installed by name from a local index without extras, and used by an ordinary user.

Nothing is downloaded: the dependencies are links to packages in the environment of the tests.
"""

import functools
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path
from typing import Any

import pytest
from helpers import REPOSITORY, SCRIPTS
from helpers.commands import run_command
from helpers.processes import assert_no_process_left
from helpers.training_runs import LAST_STEP, RUN_LIMIT_S, Run, preempt
from helpers.unprivileged_user import UnprivilegedUser
from helpers.waiting import wait_for
from packaging.requirements import Requirement

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]

#: Print the help of all commands, and import all modules.
USE_ALL = """
import importlib, pkgutil, sys
from click.testing import CliRunner
import hpctrain
from hpctrain.cli.common import walk_commands
from hpctrain.cli.main import cli
from hpctrain.errors import UserError

for name, _ in walk_commands(cli):
    result = CliRunner().invoke(cli, [*name.split(), "--help"])
    assert result.exit_code == 0, (name, result.output)
for module in pkgutil.walk_packages(hpctrain.__path__, "hpctrain."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            print(error)
from hpctrain.telemetry.loggers.logger import find_loggers

for kind in sys.argv[1:]:
    try:
        find_loggers(kind)
    except UserError as error:
        print(error)
"""


class Installation:
    """A user's project folder, with a space in its name, and an environment with the wheel."""

    def __init__(self, user: UnprivilegedUser, index_url: str) -> None:
        self.user, self.project = user, user.home / "my project"
        find_python = "import sys; print(sys._base_executable)"
        python = user.run([user.python, "-c", find_python]).stdout.strip()
        user.run([python, "-m", "venv", "--without-pip", self.project / "venv"])
        self.python = self.project / "venv/bin/python"
        (site,) = self.project.glob("venv/lib/*/site-packages")
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install"]
        run_command([*pip, "--no-deps", "--index-url", index_url, "--quiet", "hpctrain"], timeout=120)
        (installed,) = distributions(name="hpctrain", path=[str(site)])
        self.linked: set[str] = set()
        _link_requirements(installed, site, self.linked)
        base = _requirements(installed)
        self.extras = {
            extra: [package.name for package in _requirements(installed, extra) if package not in base]
            for extra in installed.metadata.get_all("Provides-Extra") or ()
        }

    def run(self, *argv: str | Path, env: Any = None, **options: Any) -> Any:
        # The tests add the repository to this variable.
        return self.user.run(["env", "--unset=PYTHONPATH", *argv], env, **options)

    def call_hpctrain(self, args: Sequence[str], env: Mapping[str, str], **options: Any) -> Any:
        return self.run(self.project / "venv/bin/hpctrain", *args, env=env, **options)


def _requirements(package: Distribution, extra: str = "") -> list[Requirement]:
    required = map(Requirement, package.requires or ())
    return [item for item in required if item.marker is None or item.marker.evaluate({"extra": extra})]


def _link_requirements(package: Distribution, site: Path, linked: set[str]) -> None:
    """Link all packages that a package requires, directly or not, from the environment of the tests."""
    for requirement in _requirements(package):
        if (name := re.sub("[-_.]+", "-", requirement.name.lower())) in linked:
            continue
        linked.add(name)
        required = distribution(name)
        for top in {file.parts[0] for file in required.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(required.locate_file(top))).resolve())
        _link_requirements(required, site, linked)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "hpctrain")]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def installation(index: Path) -> Iterator[Installation]:
    # The listing of a folder of wheels is the page of a project in a package index.
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(index))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, UnprivilegedUser() as user:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Installation(user, f"http://127.0.0.1:{server.server_port}/")
        server.shutdown()


def test_only_declared_packages_are_installed(installation):
    """Their dependencies are linked, but no package that only the development needs."""
    names = "import importlib.metadata as m; print(*(p.name for p in m.distributions()))"
    found = installation.run(installation.python, "-c", names).stdout.split()
    installed = {re.sub("[-_.]+", "-", name.lower()) for name in found}
    assert installed == {"hpctrain", *installation.linked}
    assert {"numpy", "torch"} <= installed
    spec = (
        "from importlib.util import find_spec; print(*map(find_spec, ('pytest', 'hypothesis', 'lightning')))"
    )
    assert installation.run(installation.python, "-c", spec).stdout.split() == ["None"] * 3


def test_older_torch_that_is_installed_is_kept(index, tmp_path):
    (wheel,) = index.glob("hpctrain/*.whl")
    run_command([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"])
    (site,) = tmp_path.glob("venv/lib/*/site-packages")
    (package,) = distributions(name="hpctrain", path=[str(wheel)])
    _link_requirements(package, site, {"torch"})
    torch = site / "torch-2.6.0.dist-info"
    torch.mkdir()
    (torch / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.6.0\n")
    pip = [sys.executable, "-m", "pip", "--python", str(tmp_path / "venv/bin/python"), "install"]
    result = run_command([*pip, "--dry-run", "--quiet", "--no-index", "--report=-", wheel], timeout=120)
    assert [item["metadata"]["name"] for item in json.loads(result.stdout)["install"]] == ["hpctrain"]


def test_missing_packages_are_named(installation):
    """Every command prints its help, and every feature of an extra names the packages to install."""
    loggers = ("tensorboard", "wandb", "mlflow", "neptune")
    printed = installation.run(installation.python, "-c", USE_ALL, *loggers, timeout=120).stdout
    commands = {line for text in printed.splitlines() for line in re.findall("pip install ([^`'.]*)", text)}
    extras = {"lightning", "huggingface", "accelerate", *loggers}
    assert commands == {" ".join(installation.extras[extra]) for extra in extras}
    assert len(printed.splitlines()) == len(extras), printed


def test_run_of_two_ranks_with_linked_packages_survives_a_kill_and_a_preemption(installation, slurm):
    for name in ("train_classifier.py", "bit_flips.py"):
        shutil.copy(SCRIPTS / name, installation.project)
    run = Run(installation.project / "a run", slurm.env, installation.call_hpctrain)
    script = installation.project / "train_classifier.py"
    shape = ["--nodes=2", "--gpus-per-node=1", "--time=30", f"--run-dir={run.path}"]
    run.hpctrain("submit", *shape, str(script), "--step-s=0.2", "--checkpoint-every=6", "--slow-attempts=2")
    run.wait_for_step(8)  # after the first checkpoint
    run.kill_rank(1)
    wait_for(lambda: len(run.events("resumed")) == 1, RUN_LIMIT_S, "the second attempt")
    run.wait_for_step(run.events("resumed")[0]["step"] + 2)
    preempt(slurm.env, nodes=len(slurm.nodes), seconds=0)
    assert run.wait() == 0, run.describe()
    assert sorted(run.losses()) == list(range(1, LAST_STEP + 1))
    assert (run.dir.attempts(), len(run.events("requeue"))) == ([0, 1, 2], 1)
    run.hpctrain("report", str(run.path))
    assert {path.stat().st_uid for path in run.path.rglob("*")} == {installation.user.uid}
    assert_no_process_left(run.path)
