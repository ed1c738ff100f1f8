"""Checks of a submission before anything is written."""

import os

import pytest
from helpers.commands import environment

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs.submit.prepare import prepare_submission
from hpctrain.telemetry.sampling import nvml


def test_plain_submission_needs_only_a_script(prepared, tmp_path, script):
    spec = prepared().spec
    assert (spec.script, spec.name, spec.world_size) == (str(script), "train", 1)
    assert spec.run_dir == str(tmp_path / "runs" / spec.run_id)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"script": "/dev/null"}, "not a regular file"),
        ({"script": "train.py/x"}, "not found"),
        ({"nodes": "4:2"}, "minimum number of nodes is 4 and the maximum is 2"),
        ({"nodes": "0:2"}, "'0:2' is neither a number nor a range"),
        ({"nodes": "2-4"}, "'2-4' is neither a number nor a range"),
        ({"ntasks_per_node": 0}, "--ntasks-per-node is 0"),
        ({"stop_before_limit": 0}, "--stop-before-limit is 0"),
        ({"time": "1", "stop_before_limit": 60}, "60 s .*--time.* 60 s"),
        ({"time": "soon"}, "'soon' is not a valid duration"),
        ({"partition": ""}, "partition .* is empty"),
        ({"gpus_per_node": "h100"}, "'h100', but must be a number, such as 8, or a type"),
        ({"nodes": 1.5}, r"nodes .submit... is 1.5, but must be an integer"),
        ({"backend": "slrm"}, "'slrm', but must be auto, slurm or local"),
        ({"notify_on": ["end"]}, r"notify_on .* must be finish, failure or stall"),
        ({"template": "./mine"}, "mine. .--template. not found"),
        ({"run_dir": "/"}, "--run-dir is '/', which has no folder name"),
        ({"run_dir": "train.py"}, "is a file"),
        ({"run_dir": "train.py/run"}, "is not a folder"),
        ({"script": "x" * 300}, "Cannot read the script .*: File name too long"),
        ({"stage": "nowhere"}, "nowhere. .--stage. not found"),
        ({"stage": ["/usr:a", "/etc:a"]}, "Both '/usr' and '/etc' have the name 'a'"),
        (
            {"stage_environment": True, "container_image": "docker://a", "container_runtime": "apptainer"},
            "container image .* so it cannot be staged",
        ),
        ({"run_dir": "."}, "neither empty nor a run"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(prepared, tmp_path, options, message):
    from hpctrain.jobs.submit.submit_prepared import submit_prepared

    with pytest.raises(SpecError, match=message):
        submit_prepared(prepared(**options))
    assert os.listdir(tmp_path) == ["train.py"]


def test_options_reach_the_job_spec(prepared):
    spec = prepared(
        gpus_per_node="h100:1",
        gpu_request_style="gpus-per-node",
        exclusive="user",
        mem=100,
        nice=-3,
        mail_type="END,FAIL",
        sbatch={"hold": "", "hint": "compute_bound"},
        time=90,
    ).spec
    assert (spec.gpu_type, spec.gpus_per_node, spec.gpu_request_style) == ("h100", 1, "gpus-per-node")
    assert spec.time_limit_s == 5400
    assert spec.directives == {
        "mem": "100",
        "exclusive": "user",
        "nice": "-3",
        "mail-type": "END,FAIL",
        "hold": "",
        "hint": "compute_bound",
    }
    assert prepared(exclusive=True).spec.directives == {"exclusive": ""}
    assert prepared(exclusive=False).spec.directives == {}


def test_missing_interpreter_is_refused(tmp_path, script):
    for python in (tmp_path / "bin" / "python", script, tmp_path):
        with pytest.raises(SpecError, match=r"interpreter .* does not exist or is not executable"):
            prepare_submission(
                script, (), {"backend": "local"}, environ=environment(), cwd=tmp_path, python=str(python)
            )


def test_auto_falls_back_to_local_with_a_note(prepared, tmp_path):
    submission = prepared(backend="auto", environ={"PATH": str(tmp_path)})
    assert submission.spec.backend == "local"
    assert submission.notes == (
        "Slurm is not available (sbatch not found on PATH). Running on this machine.",
    )


def test_batch_script_needs_slurm_unless_the_backend_is_local(prepared, tmp_path):
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\ntrue\n")
    environ = {"PATH": str(tmp_path)}
    with pytest.raises(SchedulerError, match=r"sbatch not found on PATH.* use --backend local"):
        prepared(script="job.sbatch", backend="auto", environ=environ)
    assert prepared(script="job.sbatch", environ=environ).spec.backend == "local"


def test_script_that_is_not_text_is_refused(prepared, tmp_path):
    for name in ("ckpt_1.pt", "ckpt_2.pt"):
        (tmp_path / name).write_bytes(b"PK\x03\x04\0\0")
    with pytest.raises(SpecError, match=r"ckpt_2.pt' is not a text file.* batch script\.$"):
        prepared(script="ckpt_2.pt", checkpoints="ckpt_*.pt")
    # The shell has expanded a pattern.
    with pytest.raises(SpecError, match=r"is not a text file.* quote this pattern: --checkpoints"):
        prepared("job.sbatch", script="ckpt_2.pt", checkpoints="ckpt_1.pt")


def test_ranks_run_on_cpu_without_gpus(prepared, monkeypatch):
    monkeypatch.setattr(nvml, "count_gpus", lambda environ: 0)
    assert "4 ranks will run on CPUs" in prepared(nodes=2, gpus_per_node=2).notes[0]


def test_more_gpus_than_the_machine_has_are_refused(prepared, monkeypatch):
    monkeypatch.setattr(nvml, "count_gpus", lambda environ: 3)
    assert prepared(nodes=1, gpus_per_node=3).notes == ()
    with pytest.raises(SpecError, match=r"2 × 2 = 4 GPUs .* has 3"):
        prepared(nodes=2, gpus_per_node=2)


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"spare_nodes": 1}, "--spare-nodes has no effect: the run uses the local backend."),
        ({"resume_mode": "requeue"}, "--resume-mode has no effect: the run uses the local backend."),
        (
            {"nodes": "1:2", "scale_up_after": 1},
            "scale_up_after has no effect: the run uses the local backend",
        ),
        ({"notify_on": ["stall"]}, "notify_on has no effect: --notify is not given."),
        ({"notify_stall_after": 9}, "notify_stall_after has no effect: --notify is not given."),
        ({"gpu_request_style": "gres"}, "gpu_request_style has no effect:"),
        ({"launcher": "torchrun", "standby_workers": 9}, "--standby-workers has no effect: torchrun starts"),
    ],
)
def test_option_without_effect_is_noted(prepared, options, note):
    (actual,) = prepared(**options).notes
    assert actual.startswith(note)


@pytest.mark.parametrize(
    "options",
    [
        {"time": 9, "stop_before_limit": 5},
        {"notify": "true", "notify_on": "stall", "notify_stall_after": 9},
        {"launcher": "torchrun", "rdzv_backend": "c10d"},
        {"standby_workers": 9, "hang_timeout": 9, "node_check": "always"},
    ],
)
def test_option_with_effect_has_no_note(prepared, options):
    assert prepared(**options).notes == ()


def test_too_short_time_limit_is_noted(prepared):
    (note,) = prepared(time="8", stop_before_limit=400).notes
    assert "may have only 80 s to start and train. The time limit is 480 s (--time)" in note
    assert "stop and save 400 s before it (--stop-before-limit)." in note
    assert "Use --time 00:12:00 or more." in note
    assert "Use --time 00:07:00 or more." in prepared(time="1").notes[0]
    assert prepared(time="7").notes == ()


def test_config_file_may_set_options_that_other_jobs_need(prepared, tmp_path):
    (tmp_path / "hpctrain.yaml").write_text("rdzv_backend: c10d\nspare_nodes: 1\nnotify_on: stall\n")
    assert prepared().notes == ()
    with pytest.raises(SpecError, match=r"rdzv_backend requires torchrun, but srun .*--launcher torchrun"):
        prepared(rdzv_backend="c10d")


@pytest.mark.parametrize("args", ["notalist", ["--steps", None], ["--steps", ["60"]]])
def test_arguments_must_be_strings_numbers_or_paths(script, args, tmp_path):
    with pytest.raises(SpecError, match="must be a list of strings"):
        prepare_submission(
            script, args, {"backend": "local"}, environ=environment(), cwd=tmp_path, python="python"
        )
