"""`hpctrain explain`: every kind of word has a meaning, and unknown words get a suggestion."""

import ctypes
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli.main import cli
from hpctrain.jobs.options.option_table import all_options
from hpctrain.jobspec.restart_policy import END_KINDS, EndKind
from hpctrain.slurm.pending_reasons import explain_reason
from hpctrain.slurm.states import RUN_STATES, SLURM_STATES, RunState

#: Reasons of a job that has ended, and of Slurm's parts for BlueGene and power saving.
UNUSED_REASONS = {
    *("NonZeroExitCode", "TimeLimit", "InactiveLimit", "OutOfMemory", "SystemFailure", "FrontEndDown"),
    *("BlockMaxError", "BlockFreeAction", "PowerNotAvail", "PowerReserved"),
}


def explain(*args: str) -> str:
    result = CliRunner().invoke(cli, ["explain", *args])
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("OUT_OF_MEMORY", ["(state of Slurm)", "Request more with --mem"]),
        ("oom", ["OUT_OF_MEMORY, OOM (state of Slurm)", "oom (failure kind)", "oom.retries"]),
        ("CANCELLED by 1000", ["(state of Slurm)", "(state of a run)", "hpctrain resume"]),
        ("(Priority)", ["(pending reason of Slurm)", "higher priority"]),
        ("ReqNodeNotAvail, UnavailableNodes:n1", ["in use, reserved or down"]),
        ("QOSMaxCpuPerUserLimit", ["your running jobs", "for CPUs", "sacctmgr show qos"]),
        ("QOSMaxSubmitJobPerUserLimit", ["as many submitted jobs as the QOS allows", "each array task"]),
        ("137", ["SIGKILL", "--mem"]),
        ("0:9", ["(ExitCode of Slurm)", "SIGKILL"]),
        ("271", ["exit code 1", "SIGTERM"]),
        ("0:53", ["output file"]),
        ("SIGKILL", ["(signal)", "Exit code 137, in Slurm 0:9"]),
        ("usr2", ["before the time limit"]),
        ("75", ["stopped as requested"]),
        ("3", ["The scheduler rejected a request"]),
        ("node_lost", ["node-lost (failure kind)", "starts all ranks again", "node-lost.retries"]),
        ("requeue", ["(restart action)", "another allocation"]),
        ("--time", ["--time, -t (option of hpctrain submit)", "Time limit of the job"]),
        ("-N", ["--nodes", "MIN:MAX"]),
    ],
)
def test_word_is_explained(word, parts):
    text = explain(word).lower()
    assert not [part for part in parts if part.lower() not in text]


def test_every_option_of_submit_and_every_enum_member_is_known():
    words = json.loads(explain("--json"))
    assert set(words["failure kind"]) == set(EndKind) == set(END_KINDS)
    assert set(words["state of a run"]) == set(RunState) == set(RUN_STATES)
    assert {option.flag for option in all_options().values()} <= {
        *words["option"],
        *words["option in configuration files"],
    }
    (meaning,) = json.loads(explain("signal", "--json"))
    assert (meaning["word"], meaning["kind"]) == ("signal", "failure kind")


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("prioritty", "Did you mean 'Priority'?"),
        ("OUT_OF_MEMRY", "Did you mean 'OUT_OF_MEMORY'?"),
        ("--tme", "Did you mean '--time'?"),
        ("oomm", "Did you mean 'oom'?"),
        ("xyzzy", "to list the known words"),
    ],
)
def test_unknown_word_gets_a_suggestion(word, hint):
    result = CliRunner().invoke(cli, ["explain", word])
    assert result.exit_code == 2
    assert hint in result.stderr


def test_states_and_reasons_of_the_installed_slurm_are_known():
    path = Path("/usr/lib/x86_64-linux-gnu/slurm-wlm/libslurmfull.so")
    if not path.exists():
        pytest.skip("Slurm's library is not installed")
    library = ctypes.CDLL(str(path), os.RTLD_LAZY)
    name, code, reason = library.job_state_string, library.job_state_string_compact, library.job_reason_string
    for function in (name, code, reason):
        function.restype = ctypes.c_char_p
    states = {
        name(state).decode(): code(state).decode() for state in (*range(12), *(1 << n for n in range(8, 32)))
    }
    states.pop("?", None)
    assert states == {word: SLURM_STATES[word].code for word in states}
    reasons = {reason(number).decode() for number in range(300)}
    unexplained = {word for word in reasons if not word.isdecimal() and explain_reason(word, "1") == word}
    assert unexplained <= UNUSED_REASONS
