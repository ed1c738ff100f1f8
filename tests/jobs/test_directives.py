from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpctrain.errors import SpecError
from hpctrain.jobs.directives import check_directive, directive_lines, directives_of, quote_directive

words = st.text(st.characters(exclude_categories=["Cs"], min_codepoint=0x20, exclude_characters="\x7f"))


def as_sbatch_reads(line: str) -> list[str]:
    """The arguments in a line after `#SBATCH`, by sbatch's rules; test_slurm_live.py asks sbatch itself."""
    assert not re.search("(pack|het)job", line, re.IGNORECASE), "the border between parts of a job"
    assert "\n" not in line
    arguments, current, quote, escaped = [], None, "", False
    for character in line + " ":
        if character.isspace() and not quote:
            escaped = False
            if current is not None:
                arguments.append(current)
            current = None
        elif escaped:
            current, escaped = (current or "") + character, False
        elif character == "\\":
            escaped = True
        elif quote:
            if character == quote:
                quote = ""
            else:
                current = (current or "") + character
        elif character in "\"'":
            quote = character
        elif character == "#":
            break
        else:
            current = (current or "") + character
    assert not quote, "unmatched quote"
    return arguments


@given(words)
@example("packhetjob")
@example("a # b")
@example("\\")
def test_sbatch_reads_back_what_was_quoted(value):
    assert as_sbatch_reads(f" --comment={quote_directive(value)}") == [f"--comment={value}"]


def test_plain_values_are_left_as_they_are():
    assert quote_directive("/home/me/runs/a-1_b.c") == "/home/me/runs/a-1_b.c"


def test_directives_of_a_job(make_spec):
    spec = make_spec(
        nodes=2,
        gpus_per_node=4,
        cpus_per_task=8,
        time_limit_s=3600.0,
        directives={"partition": "big", "exclusive": ""},
    )
    assert directive_lines(directives_of(spec)) == [
        "#SBATCH --job-name=train",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gres=gpu:4",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --time=01:00:00",
        "#SBATCH --chdir=/home/me/runs/train-1",
        "#SBATCH --output=/home/me/runs/train-1/logs/slurm.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --signal=USR2@120",
        "#SBATCH --export=ALL",
        "#SBATCH --partition=big",
        "#SBATCH --exclusive",
    ]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("nodes", "Use --nodes"),
        ("array", "not supported yet"),
        ("signal", "Use --signal-lead"),
        ("gres", "Use --gpus-per-node"),
        ("test-only", "Use --dry-run"),
        ("partitoin", "Did you mean 'partition'"),
        ("comment=x --uid", "no option"),
    ],
)
def test_reserved_and_unknown_directives_name_what_to_use(key, words):
    with pytest.raises(SpecError, match=words):
        check_directive(key)
