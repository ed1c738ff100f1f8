"""Merging of options from files and the command line, and errors in files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import SpecError
from hpctrain.jobs.options.resolved_options import COMMAND_LINE_SOURCE, ResolvedOptions, resolve_options


class ConfigFiles:
    """A site, a user and a project in a folder; tests write their configuration files."""

    def __init__(self, folder: Path) -> None:
        self.site = folder / "site"
        self.user = folder / "config" / "hpctrain" / "config.yaml"
        self.repository = folder / "repository"
        self.cwd = self.repository / "deep" / "deeper"
        self.project = self.repository / "hpctrain.yaml"
        self.environ = {
            "HPCTRAIN_SITE_CONFIG": str(self.site),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "HOME": str(folder / "home"),
        }
        for path in (self.site, self.user.parent, self.cwd, self.repository / ".git"):
            path.mkdir(parents=True)

    def resolve(self, *assignments: str, **options: Any) -> ResolvedOptions:
        return resolve_options(
            options,  # type: ignore[arg-type]
            source=COMMAND_LINE_SOURCE,
            assignments=assignments,
            cwd=self.cwd,
            environ=self.environ,
        )


@pytest.fixture
def files(tmp_path: Path) -> ConfigFiles:
    return ConfigFiles(tmp_path)


def sources(settings: ResolvedOptions) -> dict[str, str]:
    return {
        key: str(value.source) for key, value in settings.values.items() if value.source.words != "default"
    }


def test_later_sources_win_and_each_value_has_its_source(files):
    """Every layer also sets everything that the layers above it set."""
    names = ["name", "account", "qos", "partition", "constraint", "comment", "reservation", "begin"]
    layers = iter(range(1, 8))

    def text(**more: str) -> str:
        own_names = names[next(layers) - 1 :]
        return "".join(f"{name}: x{len(own_names)}\n" for name in own_names)

    (files.site / "a.yaml").write_text(text())
    (files.site / "b.yaml").write_text(text())
    files.user.write_text(text())
    project = text()
    profile = "".join(f"    {line}\n" for line in text().splitlines())
    files.project.write_text(f"{project}profiles:\n  fast:\n{profile}")
    config = files.cwd / "mine.yaml"
    config.write_text(text())
    command_line = dict.fromkeys(names[next(layers) - 1 :], "x2")
    settings = files.resolve("begin=x1", profile="fast", config="mine.yaml", **command_line)
    assert settings.options["name"] == "x8"
    assert [settings.options["sbatch"][name] for name in names[1:]] == [f"x{i}" for i in range(7, 0, -1)]
    assert sources(settings) == {
        "name": f"{files.site}/a.yaml:1",
        "sbatch.account": f"{files.site}/b.yaml:1",
        "sbatch.qos": f"{files.user}:1",
        "sbatch.partition": f"{files.project}:1",
        "sbatch.constraint": f"{files.project}:8 (profile fast)",
        "sbatch.comment": f"{config}:1",
        "sbatch.reservation": "command line",
        "sbatch.begin": "--set",
        "profile": "command line",
        "config": "command line",
    }


def test_variables_of_sbatch_are_weaker_than_files(files):
    files.environ |= {
        "SBATCH_ACCOUNT": "mine",
        "SBATCH_PARTITION": "slow",
        "SBATCH_QOS": "long",
        "SBATCH_TIMELIMIT": "60",
        "SBATCH_JOB_NAME": "mine",
        "SBATCH_MEM_PER_NODE": "1G",
        "SBATCH_EXCLUSIVE": "user",
        "SBATCH_OVERCOMMIT": "1",
        "SBATCH_MEM_BIND": "local",
        "SLURM_JOB_ID": "1",
    }
    files.user.write_text("partition: fast\nqos:\n")
    settings = files.resolve(mem_per_cpu="2G")
    assert settings.options["sbatch"] == {
        "account": "mine",
        "exclusive": "user",
        "mem-per-cpu": "2G",
        "overcommit": "",
        "partition": "fast",
    }
    assert (settings.options["time"], settings.options["name"]) == (60, "mine")
    assert sources(settings)["sbatch.account"] == "SBATCH_ACCOUNT"
    assert "account" not in settings.without_variables().options["sbatch"]
    assert settings.describe_sources("--time is bad") == "--time comes from SBATCH_TIMELIMIT"


def test_mapping_entries_are_merged_and_later_ones_win(files):
    files.user.write_text("env: {A: user, B: user, C: user}\nsbatch: {hint: compute_bound}\n")
    files.project.write_text("env:\n  B: project\n  C:\n")
    settings = files.resolve("env.D=a=b", "env.E=", "sbatch.hold=", env={"A": "line"})
    assert settings.options["env"] == {"A": "line", "B": "project", "D": "a=b"}
    assert settings.options["sbatch"] == {"hint": "compute_bound", "hold": ""}
    assert sources(settings)["env.B"] == f"{files.project}:2"


def test_restart_policy_entries_may_be_nested(files):
    files.user.write_text("restart_policy: {oom: {retries: 0, exclude: 1}, killed: {retries: 9}}\n")
    files.project.write_text("restart_policy:\n  killed:\n    retries: 20\n  gpu.exclude: 0\n")
    settings = files.resolve(
        "restart_policy.oom.exclude=2", restart_policy={"python": {"repeats": 0}, "hang.retries": 4}
    )
    changed = {"oom.retries": "0", "oom.exclude": "2", "killed.retries": "20", "gpu.exclude": "0"}
    assert settings.options["restart_policy"] == {**changed, "python.repeats": "0", "hang.retries": "4"}
    assert sources(settings)["restart_policy.killed.retries"] == f"{files.project}:3"
    assert sources(settings)["restart_policy.oom.retries"] == f"{files.user}:1"


@pytest.mark.parametrize("source", ["file", "--set"])
def test_empty_value_removes_an_earlier_one(files, source):
    files.user.write_text("qos: long\nenv: {A: b}\nnodes: 3\n")
    if source == "file":
        files.project.write_text("qos:\nenv: null\nnodes: ~\n")
        settings = files.resolve()
    else:
        settings = files.resolve("qos=", "env=", "nodes=")
    assert "sbatch" not in settings.options
    assert "env" not in settings.options
    assert settings.options["nodes"] == 1
    assert str(settings.values["nodes"].source) == "default"


def test_values_in_files_are_parsed_by_option_type_not_by_yaml(files):
    files.project.write_text(
        "time: 12:30:00\naccount: 0123\nname: on\nmem: 1_0\ngpus_per_node: h100:8\nbegin: 2026-12-01\n"
        "exclusive: user\nenv: {FLAG: yes, N: 1.0, EMPTY: ''}\n"
    )
    assert {key: value for key, value in files.resolve().options.items() if key != "backend"} == {
        "nodes": 1,
        "time": "12:30:00",
        "name": "on",
        "gpus_per_node": "h100:8",
        "sbatch": {"account": "0123", "mem": "1_0", "begin": "2026-12-01", "exclusive": "user"},
        "env": {"FLAG": "yes", "N": "1.0", "EMPTY": ""},
        "runs_dir": "runs",
        "spare_nodes": 0,
        "scale_up_after": 600,
        "node_check": "auto",
        "gpu_request_style": "gres",
        "max_failures": 3,
        "standby_workers": 30,
        "hang_timeout": 300,
        "notify_stall_after": 900,
        "resume_mode": "auto",
        "mpi": "none",
        "cpu_binding": "auto",
        "independent_ranks": False,
        "code_snapshot_limit": 200,
        "container_runtime": "auto",
        "container_python": "python3",
        "stage_environment": False,
    }


def test_relative_paths_in_a_file_start_at_its_folder(files):
    files.project.write_text("template: ./mine.j2\nrun_dir: out\n")
    settings = files.resolve()
    assert settings.options["template"] == f"{files.repository}/./mine.j2"
    assert settings.options["run_dir"] == f"{files.repository}/out"
    files.project.write_text("template: ddp\nrun_dir: ~/runs/a\n")
    settings = files.resolve()
    assert settings.options["template"] == "ddp"
    assert settings.options["run_dir"] == f"{files.environ['HOME']}/runs/a"


class TestConfigSearchPath:
    def test_nearest_project_file_is_used(self, files):
        files.project.write_text("qos: root\n")
        (files.cwd.parent / "hpctrain.yaml").write_text("nodes: 2\n")
        assert "sbatch" not in files.resolve().options
        assert files.resolve().options["nodes"] == 2

    def test_files_above_the_repository_are_ignored(self, files):
        (files.repository.parent / "hpctrain.yaml").write_text("nodes: 9\n")
        assert files.resolve().options["nodes"] == 1

    def test_outside_a_repository_only_the_working_folder_is_searched(self, files):
        (files.repository / ".git").rmdir()
        files.project.write_text("nodes: 9\n")
        assert files.resolve().options["nodes"] == 1
        (files.cwd / "hpctrain.yaml").write_text("nodes: 2\n")
        assert files.resolve().options["nodes"] == 2

    def test_user_config_defaults_to_home(self, files):
        del files.environ["XDG_CONFIG_HOME"]
        path = Path(files.environ["HOME"], ".config", "hpctrain", "config.yaml")
        path.parent.mkdir(parents=True)
        path.write_text("nodes: 7\n")
        assert files.resolve().options["nodes"] == 7
        del files.environ["HOME"]
        assert files.resolve().options["nodes"] == 1

    def test_site_config_may_be_a_file_or_disabled(self, files):
        path = files.site / "a.yaml"
        path.write_text("nodes: 7\n")
        files.environ["HPCTRAIN_SITE_CONFIG"] = str(path)
        assert files.resolve().options["nodes"] == 7
        files.environ["HPCTRAIN_SITE_CONFIG"] = ""
        assert files.resolve().options["nodes"] == 1
        files.environ["HPCTRAIN_SITE_CONFIG"] = str(files.site / "nothing")
        with pytest.raises(SpecError, match="nothing': No such file"):
            files.resolve()


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: b\n", 1, "unknown option 'a'. Choose from nodes, "),
        ("gpus-per-node: 8\n", 1, "unknown option 'gpus-per-node'. Use --gpus-per-node"),
        ("profile: {}\n", 1, "'profile' is only accepted on the command line, as --profile"),
        ("profilse: {}\n", 1, "Did you mean 'profiles'"),
        ("profiles:\n  a:\n    profiles: {}\n", 3, "'profiles' is a section of configuration files"),
        ("profiles:\n  a:\n    nodse: 3\n", 3, r".profile a.: unknown option 'nodse'. Did you mean 'nodes'"),
        ("\ncpus_per_task: many\n", 2, "cpus_per_task is 'many', but must be an integer"),
        ("gpu_request_style: grse\n", 1, "gpu_request_style is 'grse', but must be gres or gpus-per-node"),
        ("qos: ''\n", 1, "qos is empty"),
        ("run_dir: ''\n", 1, "run_dir is empty"),
        ("qos: [[a], b]\n", 1, "qos is a list, but must be a single value"),
        ("qos: {a: b}\n", 1, "qos is a mapping, but"),
        ("env: [A]\n", 1, "env must be a mapping"),
        ("env:\n  A: [1]\n", 2, "env.A is a list, but"),
        ("env:\n  A: {B: c}\n", 2, "env.A is a mapping, but"),
        ("restart_policy:\n  oom:\n    retries: [1]\n", 3, "restart_policy.oom.retries is a list, but"),
        ("nodes: 1\nqos: a\nnodes: 2\n", 3, "duplicate key 'nodes', already set on line 1"),
        ("[1]: 2\n", 1, "a key is a list or a mapping"),
        ("- a\n", 1, "the file must be a mapping"),
        ("profiles: {a: [b]}\n", 1, "the profile 'a' must be a mapping"),
        ("nodes: 1\nqos: [\n", 3, "is not valid YAML: "),
        ("nodes: 1\n\tqos: a\n", 2, "is not valid YAML: "),
        ("nodes: 1\n---\nnodes: 2\n", 2, "is not valid YAML: "),
    ],
)
def test_error_in_a_file_is_reported_with_its_line(files, text, line, message):
    files.project.write_text(text)
    with pytest.raises(SpecError, match=message) as caught:
        files.resolve()
    assert str(caught.value).startswith(f"{files.project}:{line}")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("nodes", "not of the form KEY=VALUE"),
        ("nodse=2", "unknown option 'nodse'. Did you mean 'nodes'"),
        ("profile=x", "on the command line, as --profile"),
        ("env=A", "not of the form env.NAME=VALUE"),
        ("env.=A", "not of the form env.NAME=VALUE"),
        ("nodes.a=1", "not of the form nodes=VALUE"),
    ],
)
def test_invalid_assignment_is_reported(files, assignment, message):
    with pytest.raises(SpecError, match=message):
        files.resolve(assignment)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile": "fsat"}, "Unknown profile 'fsat' .--profile.. Did you mean 'fast'"),
        ({"profile": "x", "config": "empty.yaml"}, "Choose from fast"),
        ({"config": "nowhere.yaml"}, "nowhere.yaml': No such file"),
        ({"config": "."}, "Cannot read .*: Is a directory"),
    ],
)
def test_invalid_options_are_reported(files, options, message):
    (files.cwd / "empty.yaml").write_text("")
    files.user.write_text("profiles: {fast: {nodes: 2}}")
    with pytest.raises(SpecError, match=message):
        files.resolve(**options)


def test_error_names_the_files_of_the_options_involved(prepared: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "hpctrain.yaml").write_text("stop_before_limit: 90\n# all day\ntime: 1\nqos: x\n")
    with pytest.raises(SpecError) as caught:
        prepared()
    path = tmp_path / "hpctrain.yaml"
    assert str(caught.value).endswith(
        f"(--stop-before-limit comes from {path}:1; --time comes from {path}:3)"
    )
    with pytest.raises(SpecError, match=r"\(--time comes from .*:3\)$"):
        prepared(stop_before_limit=80)
