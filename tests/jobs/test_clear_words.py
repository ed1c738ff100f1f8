"""Mistakes that used to pass, or were answered in words that led nowhere."""

from __future__ import annotations

import pytest

from hpctrain.errors import SpecError
from hpctrain.jobs.executor import Executor
from hpctrain.jobs.options.resolved_options import resolve_options


@pytest.fixture
def settle(tmp_path):
    def settle(options=None, *assignments):
        environ = {"HPCTRAIN_SITE_CONFIG": ""}
        return resolve_options(options or {}, assignments=assignments, cwd=tmp_path, environ=environ).options

    return settle


def test_a_file_of_options_that_is_none_is_named(settle, tmp_path):
    (tmp_path / "hpctrain.yaml").symlink_to("nowhere.yaml")
    with pytest.raises(SpecError, match=r"Cannot read .*hpctrain\.yaml': No such file"):
        settle()
    (tmp_path / "hpctrain.yaml").unlink()
    (tmp_path / "hpctrain.yaml").mkdir()
    with pytest.raises(SpecError, match=r"Cannot read .*hpctrain\.yaml': Is a directory"):
        settle()


def test_profiles_within_a_profile_are_no_option(settle, tmp_path):
    (tmp_path / "hpctrain.yaml").write_text("profiles:\n  a:\n    profiles: {}\n")
    with pytest.raises(SpecError, match="'profiles' is a section of configuration files"):
        settle()


def test_set_without_a_value_takes_a_variable_back(settle, tmp_path):
    (tmp_path / "hpctrain.yaml").write_text("env: {X: 1, Y: 2}\n")
    assert settle(None, "env.X=")["env"] == {"Y": "2"}


def test_a_flag_of_sbatch_is_a_truth_value_in_python(prepared):
    assert "#SBATCH --contiguous\n" in prepared(sbatch={"contiguous": True}).script
    assert "contiguous" not in prepared(sbatch={"contiguous": False}).script


def test_a_variable_that_is_set_for_each_rank_is_refused(prepared):
    with pytest.raises(SpecError, match="hpctrain sets the variable RANK for each rank, so --env RANK=3"):
        prepared(env={"RANK": "3"})


def test_a_run_folder_has_a_name(prepared):
    with pytest.raises(SpecError, match="--run-dir is '/', which has no folder name"):
        prepared(run_dir="/")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"gpus_per_node": "x"}, "--gpus-per-node is 'x'"), ({"nodes": "4:2"}, "the minimum is 4")],
)
def test_an_executor_refuses_a_value_when_it_is_given(tmp_path, options, words):
    executor = Executor(tmp_path)
    with pytest.raises(SpecError, match=words):
        executor.update_parameters(**options)
