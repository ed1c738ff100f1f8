"""Names, paths, arguments and variables with any characters, from the command to the ranks of a real job."""

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
from helpers.commands import environment
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpctrain.jobs.submit.prepare import prepare_submission
from hpctrain.jobs.submit.submit_prepared import submit_prepared

#: As a supervisor, start the ranks once, without a store; as a rank, record what arrived.
_LAUNCHER = """#!{python}
import json, os, queue, sys
from pathlib import Path
sys.path[:0] = {path!r}
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.rundir import RunDir

if sys.argv[1] == "-m":
    from hpctrain.supervisor.launch.step_launchers import SrunLauncher
    from hpctrain.supervisor.launch.job_step import StepEnded

    run = RunDir(Path(sys.argv[3]))
    spec = load_spec(run.spec)
    events = queue.SimpleQueue()
    command = [spec.python, "rank", json.dumps([spec.script, *spec.args])]
    variables = {{"HPCTRAIN_ATTEMPT": "0", "OUT": str(run.path / "seen.json")}}
    step = SrunLauncher(spec, os.environ).start(command, variables, events.put)
    while not isinstance(events.get(timeout=120), StepEnded):
        pass
    step.close()
    run.log_event("finished", 0, state="COMPLETED", exit_code=0)
else:
    script, *args = json.loads(sys.argv[2])
    seen = {{"script": script, "args": args, "cwd": os.getcwd(), "env": dict(os.environ)}}
    Path(os.environ["OUT"]).write_text(json.dumps(seen))
"""

_CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\x00")
#: Texts that a process can receive.
texts = st.text(_CHARACTERS, max_size=60)
#: Texts that can be file names and lines of a script.
names = st.text(
    st.characters(exclude_categories=["Cs"], min_codepoint=0x20, exclude_characters="\x7f/"),
    min_size=1,
    max_size=40,
).filter(lambda name: name.strip(".") and len(name.encode()) < 200)

#: The path of a run folder must not contain a backslash.
folders = names.filter(lambda name: "\\" not in name)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("launcher") / "python"
    path.write_text(_LAUNCHER.format(python=sys.executable, path=sys.path))
    path.chmod(0o755)
    return str(path)


@pytest.mark.extended
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    args=st.lists(texts, max_size=30),
    values=st.lists(texts, max_size=20),
    name=names,
    script=names,
    folder=folders,
    run_dir=folders,
)
@example(
    args=["--", "-x", "--nodes=9", "%j %x %%", "new\nline\r\n", "'\"`$(false)\\", "", " ", "x" * 100_000],
    values=["-n 9", "é\n\"'\\", "#SBATCH --hold", "%a", "$HOME;exit", "y" * 130_000, *["z" * 90_000] * 5],
    name="-%j %x 100% %u\\",
    script="--help",
    folder="-C %A_%a 'q' \"d\"",
    run_dir="-%N %n%t$(false)😀",
)
def test_ranks_receive_exactly_what_was_given(
    slurm, tmp_path, launcher, args, values, name, script, folder, run_dir
):
    cwd = Path(tempfile.mkdtemp(dir=tmp_path), folder)
    cwd.mkdir()
    path = cwd / script
    path.write_text("")
    env = {f"VALUE_{i}": value for i, value in enumerate(values)}
    options = {"name": name, "run_dir": f"runs/{run_dir}", "env": env, "backend": "slurm"}
    submission = prepare_submission(
        path.name, args, options, environ=environment(slurm.env), cwd=cwd, python=launcher
    )
    run, _ = submit_prepared(submission)
    run.wait(timeout=120)
    seen = json.loads((run.dir.path / "seen.json").read_text())
    assert (seen["script"], seen["args"], seen["cwd"]) == (str(path), args, str(cwd))
    assert {key: seen["env"][key] for key in env} == env
    assert seen["env"]["SLURM_JOB_NAME"] == name
    assert seen["env"]["OUT"] == os.path.join(cwd, "runs", run_dir, "seen.json")
    assert run.dir.slurm_log.exists()
