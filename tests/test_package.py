"""Contents of a wheel, and scripts of an installation."""

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from helpers.commands import run_command

REPO = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of all files in a wheel that is built from this tree, offline."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=REPO,
        check=True,
        capture_output=True,
        timeout=60,
    )
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def test_wheel_has_every_template(wheel: list[str]) -> None:
    templates = {path.name for path in (REPO / "slurm_templates").iterdir()}
    assert templates == {
        f"{name}.sbatch.j2" for name in ("base", "batch", "cpu", "ddp", "ddp2", "torchrun", "plain")
    }
    assert {f"hpctrain/slurm_templates/{name}" for name in templates} <= set(wheel)


def test_wheel_has_type_marker_and_licence(wheel: list[str]) -> None:
    assert "hpctrain/py.typed" in wheel
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def test_console_script_starts() -> None:
    (script,) = (entry for entry in entry_points(group="console_scripts") if entry.name == "hpctrain")
    assert script.value == "hpctrain.cli.main:main"
    assert callable(script.load())


def test_demo_installs_no_development_packages(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPO / name, tmp_path)
    for target, extras in (("demo", "examples"), ("check", "examples,dev")):
        printed = run_command(["make", "--dry-run", target], cwd=tmp_path).stdout
        assert [line for line in printed.splitlines() if "make_venv" in line] == [
            f"scripts/make_venv.sh {extras}"
        ]
