import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpctrain.errors import SpecError
from hpctrain.files import make_folder
from hpctrain.jobs.options.option_parser import parse_sbatch_option
from hpctrain.jobs.options.spec_builder import build_spec
from hpctrain.jobspec.job_directives import directives_after_start, job_directives
from hpctrain.records.submit_successor import JobChanges, submit_successor
from hpctrain.rundir import RunDir
from hpctrain.slurm.batch_header import directive_lines, parse_batch_header, quote_directive
from hpctrain.slurm.job_array import MAX_TASKS, JobArray


def test_node_files_are_read_at_the_submission(tmp_path):
    """A later job of the run is submitted in another folder, and excludes further nodes."""
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists/nodes").write_text("n1  # the fast one\n\nn[2-3],n5\n# n6\n")

    def directives(**options: object) -> dict[str, str]:
        shape = {"backend": "slurm", "cwd": tmp_path, "python": "/usr/bin/python3"}
        return build_spec("train.py", [], options, **shape).directives

    assert directives(sbatch={"exclude": "lists/nodes"}) == {"exclude": "n1,n[2-3],n5"}
    assert directives(sbatch={"nodelist": f"{tmp_path}/lists/nodes"}, nodes=9) == {"nodelist": "n1,n[2-3],n5"}
    assert directives(sbatch={"bbf": "b.txt", "container": "../c"}) == {
        "bbf": str(tmp_path / "b.txt"),
        "container": str(tmp_path.parent / "c"),
    }
    with pytest.raises(SpecError, match=r"--exclude '.*/lists/gone' contains a slash, .* No such file"):
        directives(sbatch={"exclude": "lists/gone"})


@pytest.mark.parametrize(
    ("dependency", "lasting"), [("afterok:1", {}), ("afterok:1?singleton", {"dependency": "singleton"})]
)
def test_options_that_delay_the_start_hold_for_the_first_job_only(dependency, lasting):
    """A deadline holds for the run."""
    lasting = {"deadline": "now+1day", "account": "a", **lasting}
    starts = {"begin": "now+1hour", "hold": "", "dependency": dependency}
    assert directives_after_start({**starts, **lasting}) == lasting
    assert directives_after_start(lasting) == lasting


def test_successor_of_an_array_task_starts_without_delay(make_spec, tmp_path, fake_slurm):
    run = RunDir(tmp_path / "r").task(3)
    make_folder(run.path)
    starts = {"begin": "now+1hour", "hold": "", "dependency": "afterok:1", "deadline": "now+1day"}
    spec = make_spec(run_dir=str(run.path), array_task=3, directives=starts)
    # Its squeue only knows the deadline of the predecessor.
    fake_slurm.answer("squeue", "2040-01-01T00:00:00\n")
    fake_slurm.answer("scontrol")
    assert submit_successor(run, spec, "9_3", 0, fake_slurm.environ, JobChanges()) == "17_3"
    calls = (fake_slurm.folder / "calls").read_text()
    options = "--dependency=afterany:9_3 --begin=now --deadline=2040-01-01T00:00:00 --array=3"
    assert re.search(rf"^sbatch .*{re.escape(options)} ", calls, re.MULTILINE)
    assert "scontrol release 17\n" in calls


texts = st.text(st.characters(exclude_categories=["Cs"], min_codepoint=0x20, exclude_characters="\x7f"))


@given(texts)
@example("packhetjob")
@example("a # b")
@example("\\")
def test_quoted_values_are_read_back_by_sbatch(value):
    """test_directives_live.py compares with sbatch itself."""
    header = parse_batch_header(f"#!/bin/sh\n#SBATCH --comment={quote_directive(value)}\n", "job.sbatch")
    assert header.directives == (("comment", value, 2),)


@pytest.mark.parametrize(
    ("fields", "lines"),
    [
        ({"directives": {"gres": "nvme:1"}}, ["gres=nvme:1"]),
        ({"gpus_per_node": 2, "directives": {"gres": "nvme:1"}}, ["gres=gpu:2,nvme:1"]),
        (
            {"gpus_per_node": 2, "gpu_request_style": "gpus-per-node", "directives": {"gres": "nvme:1"}},
            ["gpus-per-node=2", "gres=nvme:1"],
        ),
    ],
)
def test_gpus_are_requested_with_other_generic_resources(make_spec, fields, lines):
    requested = directive_lines(job_directives(make_spec(**fields)))
    assert [line.removeprefix("#SBATCH --") for line in requested if "gpu" in line or "gres" in line] == lines


def test_each_array_task_has_a_log_in_its_own_folder(make_spec):
    directives = job_directives(make_spec(array="0-3%2", run_dir="/home/me/100%j"))
    assert (directives["array"], directives["output"]) == ("0-3%2", "/home/me/100%%j/task-%a/logs/slurm.log")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("nodes", "2", "Use --nodes"),
        ("array", "0-3", "Use --array"),
        ("cpus-per-gpu", "3", "Use --cpus-per-task"),
        ("signal", "B:USR1", "Use --stop-before-limit"),
        ("gpus", "2", "Use --gpus-per-node"),
        ("test-only", "", "Use --dry-run"),
        ("outpu", "x", "no option 'outpu'"),
        ("hlod", "x", "Did you mean 'hold'"),
        ("comment=x --uid", "", "no option"),
        ("hold", "maybe", "'maybe', but this flag of sbatch accepts no value"),
        ("qos", [1], "must be a string"),
        ("qos", True, "must be a string"),
    ],
)
def test_unknown_sbatch_options_and_those_that_hpctrain_sets_are_refused(name, value, message):
    with pytest.raises(SpecError, match=message):
        parse_sbatch_option(name, value, f"--sbatch {name}")


@pytest.mark.parametrize(
    ("name", "value", "parsed"),
    [
        ("hint", "nomultithread", ("sbatch.hint", "nomultithread")),
        ("mem_per_cpu", 0, ("sbatch.mem-per-cpu", "0")),
        ("hold", "true", ("sbatch.hold", "")),
        ("contiguous", "", ("sbatch.contiguous", "")),
        ("contiguous", False, ("sbatch.contiguous", None)),
        ("exclusive", "user", ("sbatch.exclusive", "user")),
        ("mail_type", ["END", "FAIL"], ("sbatch.mail-type", "END,FAIL")),
        ("profile", "task", ("sbatch.profile", "task")),
    ],
)
def test_sbatch_options_are_passed_and_flags_have_no_value(name, value, parsed):
    assert parse_sbatch_option(name, value, name) == parsed


@pytest.mark.parametrize(
    ("text", "indices", "throttle"),
    [
        ("0-3", (0, 1, 2, 3), 0),
        ("7", (7,), 0),
        ("0-19%4", tuple(range(20)), 4),
        ("1,3,5-7", (1, 3, 5, 6, 7), 0),
        ("0-30:10%1", (0, 10, 20, 30), 1),
        ("3,1,1-2", (1, 2, 3), 0),
    ],
)
def test_array_is_parsed(text, indices, throttle):
    assert JobArray.parse(text) == JobArray(indices, throttle)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is neither a number nor a range"),
        ("a", "'a' is neither a number nor a range"),
        ("0-", "'0-' is neither a number nor a range"),
        ("-3", "'-3' is neither a number nor a range"),
        ("3-1", "'3-1' is empty"),
        ("0-4:0", "'0-4:0' has a step of 0"),
        ("0-3%", "'' after % is not a positive number"),
        ("0-3%0", "'0' after % is not a positive number"),
        ("0-3%x", "'x' after % is not a positive number"),
        ("0-3%1%2", "'1%2' after % is not a positive number"),
        ("٣", "neither a number nor a range"),
        (f"0-{MAX_TASKS}", f"more than {MAX_TASKS} tasks"),
        ("0-99999999999", "Slurm's highest task number is 4000000"),
    ],
)
def test_invalid_array_is_refused(text, message):
    with pytest.raises(SpecError, match=message):
        JobArray.parse(text)
