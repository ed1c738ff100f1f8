"""Mistakes in options that were once accepted or reported unclearly."""

from __future__ import annotations

import pytest

from hpctrain.errors import SpecError
from hpctrain.jobs.options.resolved_options import resolve_options


@pytest.fixture
def resolve(tmp_path):
    def resolve(options=None, *assignments):
        environ = {"HPCTRAIN_SITE_CONFIG": ""}
        return resolve_options(options or {}, assignments=assignments, cwd=tmp_path, environ=environ).options

    return resolve


def test_unreadable_config_file_is_reported(resolve, tmp_path):
    (tmp_path / "hpctrain.yaml").symlink_to("nowhere.yaml")
    with pytest.raises(SpecError, match=r"Cannot read .*hpctrain\.yaml': No such file"):
        resolve()
    (tmp_path / "hpctrain.yaml").unlink()
    (tmp_path / "hpctrain.yaml").mkdir()
    with pytest.raises(SpecError, match=r"Cannot read .*hpctrain\.yaml': Is a directory"):
        resolve()


def test_profiles_inside_a_profile_are_refused(resolve, tmp_path):
    (tmp_path / "hpctrain.yaml").write_text("profiles:\n  a:\n    profiles: {}\n")
    with pytest.raises(SpecError, match="'profiles' is a section of configuration files"):
        resolve()


def test_set_with_empty_value_removes_a_variable(resolve, tmp_path):
    (tmp_path / "hpctrain.yaml").write_text("env: {X: 1, Y: 2}\n")
    assert resolve(None, "env.X=")["env"] == {"Y": "2"}


def test_variable_set_per_rank_is_refused(prepared):
    with pytest.raises(SpecError, match="hpctrain sets the variable RANK for each rank, so --env RANK=3"):
        prepared(env={"RANK": "3"})


def test_run_folder_without_a_name_is_refused(prepared):
    with pytest.raises(SpecError, match="--run-dir is '/', which has no folder name"):
        prepared(run_dir="/")
