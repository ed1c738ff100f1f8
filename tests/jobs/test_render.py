from __future__ import annotations

import subprocess

import pytest

from hpctrain.errors import SpecError
from hpctrain.jobs.render import render

HOSTILE = [
    "a b",
    "a'b",
    'a"b',
    "$(touch pwned)",
    "`touch pwned`",
    "a;touch pwned",
    "#SBATCH --x",
    "a\\",
    "%j",
    "é 😀",
    "-m",
]


def test_the_script_says_what_made_it_and_ends_in_the_supervisor(make_spec):
    text = render(make_spec(gpus_per_node=2))
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert "hpctrain submit" in lines[1]
    assert lines[2].startswith("# By hand:  sbatch job.sbatch ")
    assert lines[-1] == "exec /usr/bin/python3 -m hpctrain.supervisor /home/me/runs/train-1"
    assert "NCCL_DEBUG" in text
    assert "CUDA_VISIBLE_DEVICES" in render(make_spec())


def test_by_hand_means_the_backend_of_the_run(make_spec):
    text = render(make_spec(backend="local"))
    assert "# By hand:  bash job.sbatch " in text
    assert "sbatch job.sbatch" not in text.replace(" bash job.sbatch", "")


@pytest.mark.parametrize("word", HOSTILE)
def test_no_name_is_ever_executed(make_spec, tmp_path, word):
    run_dir = tmp_path / word
    run_dir.mkdir()
    python = tmp_path / f"python {word}"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$3"\n')
    python.chmod(0o755)
    text = render(
        make_spec(run_dir=str(run_dir), python=str(python), name=word, script=f"/x/{word}\ntouch pwned")
    )
    (tmp_path / "job").write_text(text)
    done = subprocess.run(["bash", "job"], cwd=tmp_path, capture_output=True, text=True, timeout=10)
    assert (done.stdout, done.stderr) == (f"{run_dir}\n", "")
    assert not list(tmp_path.rglob("pwned"))


def test_own_template_extends_a_shipped_one(make_spec, tmp_path):
    mine = tmp_path / "mine.j2"
    mine.write_text(
        '{% extends "ddp.sbatch.j2" %}\n{% block setup %}\n{{ super() -}}\n'
        "module load {{ spec.name | quote }}\n{% endblock %}\n"
    )
    text = render(make_spec(name="a b", template=str(mine)))
    assert "module load 'a b'\n" in text
    assert "NCCL_DEBUG" in text


@pytest.mark.parametrize(
    ("source", "words"), [("{{ nodez }}", "nodez"), ("\n{% if %}", "Line 2"), ('{% include "x" %}', "x")]
)
def test_a_broken_template_is_named(make_spec, tmp_path, source, words):
    mine = tmp_path / "mine.j2"
    mine.write_text(source)
    with pytest.raises(SpecError, match=words) as caught:
        render(make_spec(template=str(mine)))
    assert "mine.j2" in str(caught.value)


def test_templates_ship_with_their_suffix():
    from hpctrain.jobs.render import SUFFIX, shipped_templates

    assert {path.name.removesuffix(SUFFIX) for path in shipped_templates().iterdir()} == {
        "base",
        "cpu",
        "ddp",
    }
