"""`hpctrain env`: values and their sources."""

import json

import pytest
from click.testing import CliRunner

from hpctrain.cli.main import cli
from hpctrain.telemetry.sampling import nvml

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
TORCHRUN |= {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


def test_env_outside_a_job_describes_one_process(hpctrain):
    result = hpctrain("env")
    assert result.returncode == 0
    rows = {line[:18].strip(): line[18:].split() for line in result.stdout.splitlines()}
    assert (rows["rank"][0], rows["world size"][0], rows["environment"][0]) == ("0", "1", "local")
    assert rows["device"][0] == "cpu"
    assert all(len(columns) > 1 for columns in rows.values()), "each line has its source"


def test_json_has_value_and_source_of_each_fact(hpctrain):
    facts = json.loads(hpctrain("env", "--json", env=TORCHRUN).stdout)
    assert {name: fact["value"] for name, fact in facts.items() if name != "host"} == {
        "rank": 5,
        "local_rank": 1,
        "node_rank": 1,
        "num_nodes": 2,
        "world_size": 8,
        "local_world_size": 4,
        "master_addr": "n1",
        "master_port": 29500,
        "device": "cpu",
        "environment": "torchrun",
    }
    assert facts["rank"]["source"] == "RANK"
    assert facts["node_rank"]["source"] == "GROUP_RANK"
    assert facts["device"]["source"] == "CUDA_VISIBLE_DEVICES='' hides all GPUs"
    assert all(fact["source"] for fact in facts.values())


def test_contradictory_environment_exits_with_2(hpctrain):
    result = hpctrain("env", env={**TORCHRUN, "RANK": "8"})
    assert (result.returncode, result.stdout) == (2, "")
    assert "rank 8 (RANK)" in result.stderr


@pytest.mark.parametrize(
    ("num_gpus", "exit_code", "message"),
    [(4, 0, "cuda:1"), (2, 2, "4 ranks on this node (LOCAL_WORLD_SIZE), but only 2 GPUs")],
)
def test_env_shows_planned_device_with_fake_driver(monkeypatch, num_gpus, exit_code, message):
    monkeypatch.setattr(nvml, "count_gpus", lambda environ: num_gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    result = CliRunner().invoke(cli, ["env"], env=TORCHRUN)
    assert result.exit_code == exit_code
    assert message in result.output
    # Known facts are shown even without a device for the rank.
    assert "world size        8" in result.output
    facts = json.loads(CliRunner().invoke(cli, ["env", "--json"], env=TORCHRUN).stdout)
    assert (facts["rank"]["value"], facts["device"]["value"]) == (5, None if exit_code else "cuda:1")
