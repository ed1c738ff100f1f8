"""Configuration files on the command line: `init`, `--show-config` and `--profile`."""

import json
import re

import pytest
import yaml

from hpctrain.jobs.options.config_files import config_template
from hpctrain.jobs.options.option_table import all_options

#: They start many processes or trainings, so `make test-fast` leaves them out.
pytestmark = pytest.mark.slow

#: A line of the starter file that only needs its # removed; prose has one space after the #.
COMMENTED_OUT = re.compile(r"^#(?=\S|  )", re.MULTILINE)


def test_init_writes_a_file_without_effect_and_never_overwrites(hpctrain, tmp_path):
    submit = ("submit", "--dry-run", "--backend", "local", "--run-dir", "r", "train.py")
    before = hpctrain(*submit).stdout
    assert hpctrain("init").stdout.startswith("Wrote hpctrain.yaml. ")
    text = (tmp_path / "hpctrain.yaml").read_text()
    assert text == config_template()
    assert hpctrain(*submit).stdout == before
    repeated = hpctrain("init")
    assert repeated.returncode == 2
    assert "'hpctrain.yaml' already exists and was not changed" in repeated.stderr
    assert (tmp_path / "hpctrain.yaml").read_text() == text
    assert hpctrain("init", "other.yaml").returncode == 0


def test_init_file_has_every_option_and_can_be_uncommented(hpctrain, tmp_path):
    text = COMMENTED_OUT.sub("", config_template())
    examples = ["partition", "account", "qos", "constraint", "mem", "exclusive", "mail_type"]
    in_files = [name for name, option in all_options().items() if option.in_files]
    assert list(yaml.safe_load(text)) == [*in_files, *examples, "profiles"]
    for name in in_files:
        assert all_options()[name].help.split()[0] in text
    (tmp_path / "hpctrain.yaml").write_text(text)
    options = ("--dry-run", "--backend", "local", "--run-dir", "r")
    plain = hpctrain("submit", *options, "train.py")
    assert plain.returncode == 0, plain.stderr
    assert "--time" not in plain.stdout
    profile = hpctrain("submit", *options, "--profile", "debug", "train.py")
    assert "#SBATCH --time=00:10:00\n" in profile.stdout


def test_explain_shows_each_value_and_its_source(hpctrain, tmp_path):
    (tmp_path / "hpctrain.yaml").write_text("nodes: 2\nprofiles:\n  long:\n    time: 2-0\nenv:\n  A: b c\n")
    command = ["submit", "--show-config", "--profile=long", "--qos=x", "--set=comment=a b", "nowhere.py"]
    result = hpctrain(*command)
    assert result.returncode == 0, result.stderr
    rows = [re.split(r"  +", line) for line in result.stdout.splitlines()]
    assert rows[0] == ["option", "value", "source"]
    assert ["nodes", "2", "hpctrain.yaml:1"] in rows
    assert ["time", "2-0", "hpctrain.yaml:4 (profile long)"] in rows
    assert ["env.A", "b c", "hpctrain.yaml:6"] in rows
    assert ["qos", "x", "command line"] in rows
    assert ["comment", "a b", "--set"] in rows
    assert ["max_failures", "3", "default"] in rows
    assert ["name", "(the name of the script)", "default"] in rows
    assert not [row for row in rows if row[0] == "account"]
    by_name = {
        row["option"]: row for row in json.loads(hpctrain(*command[:2], "--json", *command[2:]).stdout)
    }
    assert by_name["time"] == {
        "option": "time",
        "value": "2-0",
        "default": "the limit of the partition",
        "source": "file",
        "file": str(tmp_path / "hpctrain.yaml"),
        "line": 4,
        "profile": "long",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hpctrain.yaml", "train.py"]


def test_flag_of_config_file_can_be_negated_on_the_command_line(hpctrain, tmp_path):
    (tmp_path / "hpctrain.yaml").write_text("exclusive: true\nsbatch: {hold: true}\n")
    command = ["submit", "--dry-run", "--backend", "local"]
    script = hpctrain(*command, "train.py").stdout
    assert "#SBATCH --exclusive\n" in script
    assert "#SBATCH --hold\n" in script
    script = hpctrain(*command, "--no-exclusive", "--set", "sbatch=", "train.py").stdout
    assert "--exclusive" not in script
    assert "--hold" not in script


def test_invalid_config_file_is_a_one_line_error_with_its_line(hpctrain, tmp_path):
    (tmp_path / "hpctrain.yaml").write_text("nodes: 2\ngpu_per_node: 8\n")
    result = hpctrain("submit", "train.py")
    assert result.returncode == 2
    assert result.stderr == (
        f"Error: {tmp_path}/hpctrain.yaml:2: unknown option 'gpu_per_node'. Did you mean 'gpus_per_node'?\n"
    )
