"""Options of `submit` under the names of sbatch, torchrun and submitit."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import to_builtins

from hpctrain.cli.main import cli
from hpctrain.cli.resume import _program
from hpctrain.errors import SpecError
from hpctrain.jobs.options.find_replacement import find_replacement
from hpctrain.jobs.options.resolved_options import resolve_options


def resolve(tmp_path: Path, options: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    environ = {"HOME": str(tmp_path), "HPCTRAIN_SITE_CONFIG": ""}
    return dict(resolve_options(options, cwd=tmp_path, environ=environ, **kwargs).options)


@pytest.mark.parametrize("args", [["-N", "2"], ["-N2"], ["--nodes", "2"]])
def test_short_names_of_sbatch_work(args: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    result = CliRunner().invoke(cli, ["submit", "--backend=local", *args, "--dry-run", str(script)])
    assert result.exit_code == 0, result.output
    assert "#SBATCH --nodes=2\n" in result.stdout


@pytest.mark.parametrize(
    ("flag", "advice"),
    [
        ("--gpus", "Use --gpus-per-node"),
        ("--job-name", "Use --name"),
        ("--nproc-per-node", "Use --ntasks-per-node"),
        ("-G", "Use --gpus-per-node"),
        ("--output", "--run-dir"),
        ("--notify-on", "Use --set notify_on=VALUE"),
        ("--wandb", "Trainer(loggers"),
        ("--master-port", "hpctrain chooses"),
    ],
)
def test_foreign_options_are_explained_without_a_suggestion(flag: str, advice: str) -> None:
    result = CliRunner().invoke(cli, ["submit", flag, "1", "train.py"])
    assert result.exit_code == 2
    assert advice in result.output
    assert "Did you mean" not in result.output


def test_options_may_have_underscores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["submit", "--show-config", "--json", "--ntasks_per_node=3", "--name=a_b", "train_it.py"]
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 0, result.output
    values = {row["option"]: row["value"] for row in json.loads(result.stdout)}
    assert (str(values["ntasks_per_node"]), values["name"]) == ("3", "a_b")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["env", "train.py"], "'env' is a command. Put -- before it: hpctrain submit … -- env …"),
        (
            ["--", "no-such-command"],
            "Command 'no-such-command' not found: it is neither on PATH nor a file in",
        ),
        (["-m", "no.such.module"], "Module 'no.such.module' (-m) not found: it is neither in"),
        (["-m", "json.no_such_tool"], "Module 'json.no_such_tool' (-m) not found"),
    ],
)
def test_program_that_does_not_exist_is_refused(tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["submit", "--backend=local", *args])
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(("name", "ranks"), [("torchrun", 2), ("torchrun", 1), ("train", 2)])
def test_launcher_that_would_run_once_per_rank_gets_a_warning(tmp_path, monkeypatch, name, ranks):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).touch(mode=0o755)
    options = ["--dry-run", "--backend=local", f"--ntasks-per-node={ranks}"]
    result = CliRunner().invoke(cli, ["submit", *options, "--", f"./{name}", "train.py"])
    assert result.exit_code == 0, result.output
    warning = "hpctrain runs torchrun 2 times per node, once per rank, but torchrun also starts ranks."
    assert (warning in result.stderr) == ((name, ranks) == ("torchrun", 2))


@pytest.mark.parametrize(
    ("args", "call"),
    [
        (["-m", "json.tool", "--", "a"], ["-m", "json.tool", "--", "a"]),
        (["--nodes=1", "--", "env", "-m"], ["--", "env", "-m"]),
        (["train.py", "--", "-m"], ["train.py", "--", "-m"]),
    ],
)
def test_program_and_arguments_are_those_of_the_command_line(tmp_path, monkeypatch, args, call):
    specs = []

    def stop(submission, *_, **__):
        specs.append(submission.spec)
        raise SpecError("not submitted")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hpctrain.jobs.submit.submit_prepared.submit_prepared", stop)
    (tmp_path / "train.py").touch()
    CliRunner().invoke(cli, ["submit", "--backend=local", *args])
    assert [word.removeprefix(f"{tmp_path}/") for word in _program(to_builtins(specs[0]))] == call


def test_foreign_options_are_explained_in_python(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no option 'num_gpus'. Use --gpus-per-node"):
        resolve(tmp_path, {"num_gpus": 1})
    assert find_replacement("no-such-option") == ""
