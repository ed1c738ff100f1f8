from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import SpecError
from hpctrain.jobs.spec import JobSpec

# What a process can be given: everything but NUL and lone surrogates.
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))


@given(args=st.lists(words), value=words, script=words)
def test_every_word_that_a_process_can_get_is_read_back_untouched(args, value, script):
    spec = JobSpec(
        script="/" + script,
        args=tuple(args),
        env={"VALUE": value},
        name="n",
        run_id="r",
        run_dir="/r",
        backend="local",
        python="/p",
        workdir="/w",
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "spec.yaml")
        spec.save(path)
        assert JobSpec.load(path) == spec


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nodes": 0}, "at least 1 node, but nodes is 0"),
        ({"nodes": -1}, "nodes is -1"),
        ({"gpus_per_node": -1}, "gpus_per_node is -1"),
        ({"gpus_per_node": 2, "tasks_per_node": 4}, "4 ranks .* and 2 GPUs"),
        ({"cpus_per_task": 0}, "cpus_per_task is 0"),
        ({"max_failures": 0}, "max_failures is 0"),
        ({"backend": "cloud"}, "no backend 'cloud'"),
        ({"time_limit_s": 60.0, "signal_lead_s": 60}, "60 s .* 60 s"),
        ({"signal_lead_s": 70000}, "70000 s"),
        ({"env": {"A B": "1"}}, "'A B'"),
        ({"env": {"A": "\x00"}}, "NUL"),
        ({"args": ("\x00",)}, "NUL"),
        ({"args": ("\udcff",)}, "UTF-8"),
        ({"run_dir": "/a\nb"}, "run folder .* control character"),
        ({"run_dir": "runs/1"}, "absolute"),
        ({"name": "a\nb"}, "job name"),
        ({"name": ""}, "empty"),
        ({"template": "/a\nb.j2"}, "template"),
        ({"directives": {"comment": "a\n#SBATCH --uid=0"}}, "value of --comment"),
    ],
)
def test_what_cannot_be_is_refused_with_the_values_in_question(make_spec, fields, words):
    with pytest.raises(SpecError, match=words):
        make_spec(**fields)


def test_defaults_depend_on_what_is_given(make_spec):
    assert make_spec(nodes=2, gpus_per_node=4).world_size == 8
    assert make_spec(nodes=3).world_size == 3
    assert make_spec().signal_lead_s == 120
    assert make_spec(time_limit_s=60.0).signal_lead_s == 20


@pytest.mark.parametrize("text", ["", "[]", "nodes: [", "nodez: 1", "script: /x"])
def test_a_damaged_specification_is_named(tmp_path, text):
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=r"spec\.yaml"):
        JobSpec.load(path)
