import importlib
import re
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hpctrain.cli import on_login_node
from hpctrain.cli.main import cli
from hpctrain.errors import UserError
from hpctrain.remote.login_node import LoginNode, shell_path


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, list[str]]]:
    """Return the cluster and the arguments that a command line names; nothing is run."""
    found = []
    monkeypatch.setattr(
        on_login_node, "run_on_login_node", lambda name, args: found.append((name, args)) or 0
    )

    def parse(*args: str) -> tuple[str, list[str]]:
        cli.main(list(args), standalone_mode=False)
        return found.pop()

    return parse


@pytest.mark.parametrize(
    "line",
    [
        "--on a status run --json",
        "status run --on a --json",
        "status run --json --on=a",
        "--on=a list run --json",
    ],
)
def test_the_option_may_stand_before_or_after_a_command(parsed: Callable[..., object], line: str):
    assert parsed(*line.split()) == ("a", ["list" if "list" in line else "status", "run", "--json"])


def test_words_after_a_script_belong_to_it(parsed: Callable[..., object]):
    assert parsed("submit", "--on", "a", "t.py", "--on", "x") == ("a", ["submit", "t.py", "--on", "x"])


@pytest.mark.parametrize(
    ("line", "is_noted"),
    [
        ("submit none.py --on c", True),
        ("submit --nodes 2 --on=c none.py", True),
        ("submit none.py --only c", False),
        ("submit -- none --on c", False),
    ],
)
def test_misplaced_option_is_noted(tmp_path, monkeypatch, line, is_noted):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, line.split())
    assert result.exit_code == 2
    note = "Note: `--on` only selects a cluster if it directly follows `hpctrain` or `hpctrain submit`."
    assert (note in result.stderr) is is_noted


@pytest.mark.parametrize(
    "line",
    [
        "submit --on a -- prog --on x",
        "shell --on a -- prog --on x",
        "attach run --on a -- prog --on x",
        "exec --on a prog --on x",
    ],
)
def test_words_of_a_program_belong_to_it(parsed: Callable[..., object], line: str):
    assert parsed(*line.split()) == ("a", line.replace("--on a ", "").split())


def test_an_option_at_the_wrong_place_of_submit_is_explained():
    with pytest.raises(click.UsageError, match="directly after the command"):
        cli.main(["submit", "--nodes", "2", "--on", "a", "t.py"], standalone_mode=False)


def test_commands_of_a_cluster_need_one():
    with pytest.raises(click.UsageError, match="hpctrain --on CLUSTER pull"):
        cli.main(["pull", "run"], standalone_mode=False)


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("submit --backend local --follow t.py", {"backend": "local", "follow": True}),
        ("submit t.py --backend local --follow --help --show-config", {}),
        ("submit -- prog --follow", {}),
        ("submit --show-config t.py", {"show_config": True}),
        ("submit --bad-option", {}),
        ("submit --help", {"help": True}),
        ("resume run -h", {"help": True}),
        ("sweep --over a=1 --backend local t.py", {"backend": "local"}),
        ("sweep resume run --backend local", {"backend": "local"}),
        ("sweep status run", {}),
        ("resume run --follow --backend local", {"backend": "local", "follow": True}),
        ("logs run -f", {"follow": True}),
        ("exec prog -f", {}),
    ],
)
def test_options_before_a_script(monkeypatch, line: str, options: dict[str, object]):
    for name in ("submit", "resume"):
        # click keeps the help option of the first call of a command, which may be that of another test.
        command = importlib.import_module(f"hpctrain.cli.{name}").command
        monkeypatch.setattr(command, "_help_option", None)
    values = on_login_node._parse_options(line.split())
    names = ("backend", "follow", "help", "show_config")
    assert {name: value for name, value in values.items() if name in names and value} == options


def test_help_of_submit_needs_no_cluster(capsys: pytest.CaptureFixture[str]):
    cli.main(["submit", "--on", "gone.invalid", "--help"], standalone_mode=False)
    assert "Submit SCRIPT as a run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "quoted"),
    [
        ("~/my project", "~/'my project'"),
        ("$SCRATCH/x", '"${SCRATCH:?is not set}"/x'),
        ("${SCRATCH}/my x", "\"${SCRATCH:?is not set}\"/'my x'"),
        ("/a b/~c", "'/a b/~c'"),
        ("a", "a"),
    ],
)
def test_only_home_and_variables_are_replaced(path: str, quoted: str):
    assert shell_path(path) == quoted


@pytest.mark.parametrize("path", ["$(reboot)/x", "/scratch/$USER/x", "~other/x", "$A/$B"])
def test_other_replacements_are_refused(path: str):
    with pytest.raises(UserError, match=re.escape(repr(path))):
        shell_path(path)


def test_each_project_has_its_own_python(tmp_path: Path):
    environ = {"HOME": str(tmp_path)}
    first, second = (LoginNode("a", tmp_path / name, environ) for name in ("one", "two"))
    submitting = LoginNode("a", tmp_path / "one", environ)
    first.python = "/env/one"
    first.remember()
    # A command that began before keeps the Python that `setup` has named meanwhile.
    submitting.remember()
    second.remember()
    assert LoginNode("a", tmp_path / "one", environ).python == "/env/one"
    assert LoginNode("a", tmp_path / "two", environ).python is None


def test_folders_of_projects_differ_and_are_remembered(tmp_path: Path):
    environ = {"HOME": str(tmp_path)}
    for parent in ("one", "two"):
        (tmp_path / parent / "project" / ".git").mkdir(parents=True)
    first = LoginNode("a", tmp_path / "one" / "project", environ)
    assert first.folder == "hpctrain/project"
    first.remember()
    second = LoginNode("a", tmp_path / "two" / "project", environ)
    assert second.folder.startswith("hpctrain/project-")
    second.folder = "/scratch/two"
    second.remember()
    (tmp_path / "two" / "project" / "sub").mkdir()
    again = LoginNode("a", tmp_path / "two" / "project" / "sub", environ)
    assert again.folder == "/scratch/two"
    assert "cd /scratch/two/sub " in again.hpctrain(["list"])
    assert LoginNode("b", tmp_path / "two" / "project", environ).folder == "hpctrain/project"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(([f"--on={host}", "list"], "is not a valid host name") for host in ("-oProxyCommand=x", "a b", "")),
        (["--on", "alpha", "serve"], "ssh -L 8000:127.0.0.1:8000 alpha"),
    ],
)
def test_command_that_cannot_run_on_a_cluster_is_refused(arguments, message):
    result = CliRunner().invoke(cli, arguments)
    assert (result.exit_code, result.stderr.count(message)) == (2, 1)
