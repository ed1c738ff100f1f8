import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import SpecError
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.jobspec.restart_policy import parse_rule_changes

# Everything that a process can receive: all characters but NUL and lone surrogates.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))


@given(args=st.lists(texts), value=texts, script=texts, limit=st.none() | st.integers(2, 10**18).map(float))
def test_every_text_round_trips(args, value, script, limit):
    spec = JobSpec(
        script="/" + script,
        args=tuple(args),
        env={"VALUE": value, "NO": "1e3"},
        cpu_binding="none",
        restart_policy={"gpu-oom": {"retries": 0, "exclude": 2}},
        time_limit_s=limit,
        stop_before_limit_s=1 if limit is None else 0,
        name="n",
        run_id="r",
        run_dir="/r",
        backend="local",
        python="/p",
        workdir="/w",
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "spec.yaml")
        path.write_text(spec.text())
        assert load_spec(path) == spec


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nodes": 0}, "--nodes is 0, but must be at least 1"),
        ({"gpus_per_node": -1}, "--gpus-per-node is -1"),
        ({"gpus_per_node": 2, "ntasks_per_node": 4}, "2 GPUs .* and 4 ranks"),
        ({"stage": {"a/b": "/s"}}, "'a/b', the name of the copy of '/s' \\(--stage\\), is not valid"),
        ({"stage": {".code": "/s"}}, "'.code', the name of the copy"),
        ({"spare_nodes": -1}, "--spare-nodes is -1, but must be at least 0"),
        ({"restart_policy": {"omm": {"retries": 0}}}, "Unknown kind 'omm'"),
        (
            {"restart_policy": {"oom": {"": 0}}},
            "--restart-policy oom is missing a field.* FIELD is one of retries, repeats",
        ),
        ({"restart_policy": {"oom": {"retry": 0}}}, "--restart-policy oom has no field 'retry'"),
        ({"restart_policy": {"oom": {"retries": -1}}}, "--restart-policy oom.retries is -1"),
        ({"program": "modul"}, "Unknown program 'modul'. Choose from script, module, command, batch"),
        ({"time_limit_s": 60.0, "stop_before_limit_s": 60}, "60 s .* 60 s"),
        ({"env": {"A B": "1"}}, "'A B'"),
        ({"env": {"RANK": "3"}}, "hpctrain sets the variable RANK for each rank, so --env RANK=3"),
        ({"env": {"A": "\x00"}}, "NUL"),
        ({"args": ("\x00",)}, "NUL"),
        ({"args": ("\udcff",)}, "UTF-8.* Change it"),
        ({"script": "/\udcff"}, "path of the script .* UTF-8.* Rename it"),
        ({"run_dir": "/a\nb"}, "run folder .* control character"),
        ({"name": "a\nb"}, "job name"),
        ({"name": ""}, "empty"),
        ({"template": "/a\nb.j2"}, "template"),
        ({"directives": {"comment": "a\n#SBATCH --uid=0"}}, "value of --comment"),
        ({"gpus_per_node": 1, "gpu_type": "h:1"}, "'h:1' is not a valid GPU type"),
        ({"gpu_type": "h100"}, "type h100 was requested, but the number of GPUs is 0"),
        ({"array": "x"}, "neither a number nor a range"),
        ({"run_dir": "/a\\b"}, "contains a backslash, which Slurm removes"),
        ({"directives": {"gres": "nvme:1,gpu:h100:2"}}, "--gres nvme:1,gpu:h100:2 requests GPUs"),
    ],
)
def test_invalid_spec_is_refused_with_the_values(make_spec, fields, message):
    with pytest.raises(SpecError, match=message):
        make_spec(**fields)


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5"])
def test_rule_change_needs_a_number(text):
    with pytest.raises(SpecError, match=r"--restart-policy oom\.retries is"):
        parse_rule_changes({"oom.retries": text})
    assert parse_rule_changes({"oom.retries": "0", "oom.exclude": "2"}) == {
        "oom": {"retries": 0, "exclude": 2}
    }


def test_defaults_depend_on_other_fields(make_spec):
    assert make_spec(nodes=2, gpus_per_node=4).world_size == 8
    assert make_spec(nodes=3).world_size == 3
    assert make_spec().stop_before_limit_s == 120
    assert make_spec(time_limit_s=60.0).stop_before_limit_s == 20


@pytest.mark.parametrize("text", ["", "[]", "nodes: [", "nodez: 1", "script: /x"])
def test_damaged_spec_is_reported(tmp_path, text):
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=r"spec\.yaml"):
        load_spec(path)
