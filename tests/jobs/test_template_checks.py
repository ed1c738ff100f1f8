"""User templates that would not do what they seem to."""

import pytest

from hpctrain.errors import SpecError

_HEAD = '{% extends "cpu.sbatch.j2" %}\n'


@pytest.fixture
def prepare_template(prepared, tmp_path):
    def prepare_template(text, **options):
        (tmp_path / "mine.j2").write_text(_HEAD + text)
        return prepared(template="./mine.j2", **options)

    return prepare_template


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% block lanch %}x{% endblock %}", "Line 2 .* extends has no block 'lanch'. .*'launch'"),
        ("{% block launch %}{% endblock %}", "does not start the supervisor"),
        ("{% block directives %}#SBATCH --nodes=3\n{% endblock %}", r"--nodes=3'.* submitted with --nodes=2"),
        ("{% block directives %}#SBATCH -N 3\n{% endblock %}", "-N 3'.* submitted with --nodes=2"),
        ("{% block directives %}#SBATCH --signal=USR1@9\n{% endblock %}", "--signal"),
        ("{% block directives %}#SBATCH -G 8\n{% endblock %}", "cannot set --gpus. Use --gpus-per-node"),
        (
            "{% block directives %}#SBATCH --wrap true\n{% endblock %}",
            "a template cannot set --wrap. Pass the script",
        ),
    ],
)
def test_faulty_template_is_refused(prepare_template, text, message):
    with pytest.raises(SpecError, match=message):
        prepare_template(text, nodes=2)


@pytest.mark.parametrize(
    "text",
    [
        "{% block directives %}#SBATCH --nodes=2\n#SBATCH --constraint=new\n{% endblock %}",
        "{% block launch %}date\n{{ super() }}{% endblock %}",
    ],
)
def test_valid_template_is_accepted(prepare_template, text):
    assert "hpctrain.supervisor" in prepare_template(text, nodes=2).script


def test_non_python_script_is_refused(prepared, tmp_path):
    (tmp_path / "t.sh").write_text("echo\n")
    (tmp_path / "train").write_text("#!/usr/bin/perl\nprint\n")
    (tmp_path / "ok").write_text("#!/usr/bin/env python3\nprint()\n")
    with pytest.raises(SpecError, match=r"ends in \.sh, but every rank runs it with Python"):
        prepared(script="t.sh")
    (tmp_path / "job.sh").write_text("#SBATCH --nodes=2\nsrun true\n#SBATCH --exclusive\n")
    with pytest.raises(SpecError, match=r"no #! line, .* Begin the script with #!/bin/bash\.$"):
        prepared(script="job.sh")
    with pytest.raises(SpecError, match="begins with #!/usr/bin/perl"):
        prepared(script="train")
    assert prepared(script="ok").notes == prepared(script="train.py").notes
    # sbatch accepts Python scripts, too.
    (tmp_path / "job.sbatch").write_text("#!/opt/bin/python\n#SBATCH --nodes=2\nprint()\n")
    assert any("#SBATCH lines of job.sbatch have no" in note for note in prepared(script="job.sbatch").notes)
