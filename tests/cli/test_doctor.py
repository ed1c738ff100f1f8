"""`hpctrain doctor`: output, profile file and exit code."""

import json
import os

import pytest
import yaml


def test_doctor_examines_a_real_site_and_writes_its_profile(hpctrain, slurm, tmp_path):
    before = sorted(tmp_path.iterdir())
    result = hpctrain("doctor", "--json", "--write", "site.yaml", env=slurm.env)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    standings = {(finding["topic"], finding["name"]): finding["standing"] for finding in report["findings"]}
    assert report["problems"] == 0
    assert standings["Slurm", "version"] == "ok"
    # Without accounting, and with the short limits of the sandbox.
    assert standings["Slurm", "accounting"] == standings["Slurm", "KillWait"] == "note"
    assert standings["Partitions", "preemptible (default)"] == "ok"
    assert standings["Jobs", "a plain job"] == standings["Jobs", "GPUs"] == "ok"
    assert standings["Runs folder", "locking"] == "ok"
    assert standings["This machine", "gloo"] == "ok"
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "site.yaml"])
    assert yaml.safe_load((tmp_path / "site.yaml").read_text()) == report["profile"]
    assert report["profile"]["site"]["habits"]["memory_option"] == "ignored"

    env = {**slurm.env, "HPCTRAIN_SITE_CONFIG": str(tmp_path / "site.yaml")}
    options = ("--dry-run", "--no-code-snapshot", "--time=30", "--gpus-per-node=2")
    submit = hpctrain("submit", *options, "train.py", env=env)
    assert submit.returncode == 0, submit.stderr
    lines = submit.stderr.splitlines()
    assert f"Estimated start: now, on {slurm.nodes[0]}, partition preemptible." in lines
    assert "Maximum cost: 1 GPU-hour (1 node × 2 GPUs × 00:30:00) per allocation." in lines


@pytest.fixture
def broken_torch(tmp_path) -> dict[str, str]:
    """Variables that make torch unimportable, which also saves the seconds of its import."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13 is missing')\n")
    return {"PYTHONPATH": str(tmp_path)}


@pytest.mark.slow
def test_doctor_without_slurm_exits_with_1_on_a_problem(hpctrain, broken_torch):
    result = hpctrain("doctor", env=broken_torch)
    assert result.returncode == 1
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["Slurm"]
    assert lines[1][:2] == ["ok", "none"]
    assert "runs will use this machine" in result.stdout
    assert "problem  torch" in result.stdout
    assert "cannot be imported: ImportError: libcudart.so.13 is missing" in result.stdout
    assert "→ No rank can start." in result.stdout
    assert result.stdout.splitlines()[-1].startswith("1 problem")
    refused = hpctrain("doctor", "--write", "site.yaml", env=broken_torch)
    assert refused.returncode == 2
    assert "Cannot write a site profile: Slurm is not available on this machine." in refused.stderr


def test_failed_query_is_one_finding(hpctrain, slurm, broken_torch, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text("#!/bin/sh\necho 'error: Access denied' >&2\nexit 1\n")
    (folder / "scontrol").chmod(0o755)
    env = {**slurm.env, **broken_torch, "PATH": f"{folder}:{os.environ['PATH']}"}
    findings = json.loads(hpctrain("doctor", "--json", env=env).stdout)["findings"]
    lines = [(finding["topic"], finding["value"], finding["standing"]) for finding in findings]
    reason = "(scontrol failed: error: Access denied)"
    assert lines[:2] == [
        ("Slurm", f"Cannot query Slurm's configuration {reason}", "note"),
        ("Slurm", f"Cannot query the partitions {reason}", "note"),
    ]
    assert ("Jobs", "accepted", "ok") in lines
