"""Ranks in containers, with fake runtimes (`fake_container.py`): neither real one is available to tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPOSITORY, SCRIPTS
from helpers.commands import environment, run_command
from helpers.waiting import wait_for

from hpctrain.errors import RunFailed, SpecError
from hpctrain.jobs.runs.run import Run
from hpctrain.jobs.submit.complete_options import complete_options
from hpctrain.jobs.submit.prepare import prepare_submission
from hpctrain.jobs.submit.submit_prepared import submit_prepared
from hpctrain.jobspec.container import Container
from hpctrain.slurm.site_facts import SiteConventions
from hpctrain.supervisor.launch.container_command import containerize

pytestmark = pytest.mark.ranks

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import hpctrain, hpctrain.cluster, helper
name = f"seen-{os.environ['HPCTRAIN_ATTEMPT']}-{os.environ['RANK']}.json"
Path(os.environ["HPCTRAIN_RUN_DIR"], name).write_text(
    json.dumps({
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "hpctrain": hpctrain.__file__,
        "helper": helper.__file__,
        "args": sys.argv[1:],
        "data": Path("/data/x.txt").read_text() if os.path.isdir("/data") else None,
        "writable": os.path.isdir("/data") and os.access("/data", os.W_OK),
        "secret": os.path.exists(sys.argv[1]),
    })
)
if os.environ["HPCTRAIN_ATTEMPT"] == sys.argv[2]:
    time.sleep(600)
"""


class ContainerProject:
    """A project, an image, and fake runtimes on the PATH."""

    def __init__(self, folder: Path) -> None:
        self.project = folder / "my project"
        self.project.mkdir()
        (self.project / "train.py").write_text(SCRIPT)
        (self.project / "helper.py").touch()
        self.secret = folder / "secret"
        self.secret.touch()
        self.data = folder / "data"
        self.data.mkdir()
        (self.data / "x.txt").write_text("data")
        self.image = folder / "torch.img"
        image_env = {
            # The interpreter of these tests has PyTorch; hpctrain is hidden in it.
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "A": "image",
            "B": "image",
            "C": "image",
            "ONLY": "image",
            "RANK": "7",
            "SLURM_PROCID": "9",
            "HPCTRAIN_ATTEMPT": "5",
            "CUDA_VISIBLE_DEVICES": "image",
        }
        hidden = [str(folder), str(REPOSITORY / "hpctrain"), "/opt"]
        self.image.write_text(json.dumps({"env": image_env, "hidden": hidden}))
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("apptainer", "srun"):
            program = self.bin / name
            fake = SCRIPTS / "fake_container.py"
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{fake}" {name} "$@"\n')
            program.chmod(0o755)

    def submit(self, env, *args: str, script: str = "train.py", program="script", **options) -> Run:
        variables = {**env, "PATH": f"{self.bin}:{os.environ['PATH']}", "B": "host", "C": "host"}
        submission = prepare_submission(
            script,
            [str(self.secret), *args],
            {
                "run_dir": "runs/r",
                "container_image": self.image,
                "container_mounts": [f"{self.data}:/data:ro"],
                "container_env": ["B"],
                "env": {"A": "given $(x) '\""},
                **options,
            },
            environ=environment(variables),
            cwd=self.project,
            python=sys.executable,
            program=program,
        )
        return submit_prepared(submission)[0]

    def check(self, run: Run, attempt: int, rank: int) -> dict[str, str]:
        """Check what a rank saw; return its variables."""
        seen = json.loads((run.dir.path / f"seen-{attempt}-{rank}.json").read_text())
        env = seen["env"]
        assert (env["A"], env["B"], env["C"], env["ONLY"]) == ("given $(x) '\"", "host", "image", "image")
        assert (env["RANK"], env["HPCTRAIN_ATTEMPT"]) == (str(rank), str(attempt))
        assert seen["hpctrain"] == "/opt/hpctrain/hpctrain/__init__.py"
        assert seen["cwd"] == str(self.project)
        assert seen["helper"] == str(self.project / "helper.py")
        assert (seen["data"], seen["writable"], seen["secret"]) == ("data", False, False)
        return env


@pytest.fixture
def project(tmp_path) -> ContainerProject:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("the container that only pretends needs `unshare --mount`, which is not allowed here")
    return ContainerProject(tmp_path)


def test_ranks_run_in_fake_apptainer(project):
    run = project.submit({}, "none", backend="local", ntasks_per_node=2)
    run.wait(timeout=120)
    for rank in (0, 1):
        env = project.check(run, 0, rank)
        assert env["CUDA_VISIBLE_DEVICES"] == ""
        assert not [name for name in env if name.startswith("APPTAINERENV_")]


@pytest.mark.extended
def test_ranks_run_and_are_requeued_in_fake_pyxis(project, slurm):
    run = project.submit(slurm.env, "0", backend="slurm", nodes=2, gpus_per_node=2)
    wait_for(
        lambda: all((run.dir.path / f"seen-0-{rank}.json").exists() for rank in range(4)), 60, "attempt 0"
    )
    run.requeue()
    run.wait(timeout=120)
    devices = [project.check(run, 1, rank)["CUDA_VISIBLE_DEVICES"] for rank in range(4)]
    assert all(set(device.split(",")) <= {"0", "1"} for device in devices)


def test_ranks_run_in_fake_apptainer_under_slurm(project, slurm):
    run = project.submit(slurm.env, "none", backend="slurm", nodes=2, container_runtime="apptainer")
    run.wait(timeout=120)
    assert [project.check(run, 0, rank)["SLURM_PROCID"] for rank in (0, 1)] == ["0", "1"]


def test_missing_runtime_on_the_path_of_the_job_is_reported(project):
    run = project.submit({}, "none", backend="local", setup=["export PATH=/usr/bin:/bin"])
    with pytest.raises(RunFailed, match=r"Neither apptainer nor singularity is on the PATH.*--module"):
        run.wait(timeout=120)


@pytest.fixture
def make(make_spec, tmp_path):
    def call(runtime="pyxis", **fields):
        names = {"image", "mounts", "env", "python"}
        container = {name: fields.pop(name) for name in names & fields.keys()}
        container = Container(**{"image": "ubuntu", "runtime": runtime, **container})
        return make_spec(container=container, **fields)

    return call


def test_pyxis_options_have_mounts_and_variables(make):
    spec = make(mounts=("/scratch:/scratch", "/other:/home/me"), env=("HF_HOME",), gpus_per_node=2)
    containerized = containerize(spec, ["true"], ["MASTER_ADDR"], "")
    assert containerized.command == ["true"]
    options = dict(option.split("=", 1) for option in containerized.srun_options)
    assert options["--container-image"] == "ubuntu"
    assert options["--container-workdir"] == "/home/me"
    # The user's mount wins over ours at the same target; paths inside another mount need none.
    package = f"{REPOSITORY / 'hpctrain'}:/opt/hpctrain/hpctrain:ro"
    assert options["--container-mounts"].split(",") == ["/other:/home/me", package, "/scratch:/scratch"]
    names = options["--container-env"].split(",")
    assert {"MASTER_ADDR", "HF_HOME", "SLURM_PROCID", "CUDA_VISIBLE_DEVICES"} <= set(names)


def test_singularity_command_and_variables(make, tmp_path):
    (tmp_path / "singularity").write_text("#!/bin/sh\nexec /usr/bin/env\n")
    (tmp_path / "singularity").chmod(0o755)
    spec = make("apptainer", gpus_per_node=1, nodes=2)
    containerized = containerize(spec, ["true"], ["A"], str(tmp_path))
    assert containerized.srun_options == ()
    shell, c, line, _, *argv = containerized.command
    assert (shell, c) == ("/bin/sh", "-c")
    assert "/usr/bin/env" not in line  # a separate process, whose command line would show the values
    assert argv[:3] == [str(tmp_path / "singularity"), "exec", "--nv"]
    assert argv[-4:] == ["--pwd", "/home/me", "docker://ubuntu", "true"]
    result = subprocess.run(
        containerized.command, env={"A": "a 'b' $c"}, capture_output=True, text=True, check=True
    )
    seen = [line for line in result.stdout.splitlines() if line.startswith("SINGULARITYENV_")]
    assert seen == ["SINGULARITYENV_A=a 'b' $c"]


@pytest.mark.parametrize(
    ("image", "pyxis", "apptainer"),
    [
        ("ubuntu", "ubuntu", "docker://ubuntu"),
        ("pytorch/pytorch:2.10", "pytorch/pytorch:2.10", "docker://pytorch/pytorch:2.10"),
        ("docker://ubuntu:24.04", "ubuntu:24.04", "docker://ubuntu:24.04"),
        (
            "docker://nvcr.io/nvidia/pytorch:25.03",
            "nvcr.io#nvidia/pytorch:25.03",
            "docker://nvcr.io/nvidia/pytorch:25.03",
        ),
        (
            "nvcr.io#nvidia/pytorch:25.03",
            "nvcr.io#nvidia/pytorch:25.03",
            "docker://nvcr.io/nvidia/pytorch:25.03",
        ),
        ("localhost/x", "localhost#x", "docker://localhost/x"),
        ("registry:5000/x", "registry:5000#x", "docker://registry:5000/x"),
        ("/images/x.sqsh", "/images/x.sqsh", "/images/x.sqsh"),
    ],
)
def test_image_name_is_converted_for_each_runtime(image, pyxis, apptainer):
    assert Container(image=image, runtime="pyxis").image_name == pyxis
    assert Container(image=image, runtime="apptainer").image_name == apptainer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"container_image": "x.img"}, "--container-image. not found"),
        ({"container_image": "./x"}, "--container-image. not found"),
        ({"container_image": "ubuntu", "container_runtime": "pyxis"}, "pyxis is a Slurm plugin"),
        ({"container_image": "ubuntu", "container_runtime": "docker"}, "must be auto, pyxis or apptainer"),
        ({"container_image": "ubuntu", "container_mounts": ["/a:b"]}, "The path 'b' .* is relative"),
        ({"container_image": "ubuntu", "container_mounts": ["/a:/b:rx"]}, "not of the form SRC:DST"),
        (
            {"container_image": "ubuntu", "container_env": ["A=b"]},
            "not a valid name of an environment variable",
        ),
        ({"container_image": "ubuntu", "run_dir": "a:b"}, "cannot be mounted"),
        ({"container_mounts": ["/a:/b"]}, "--container-image is not given"),
        ({"container_runtime": "apptainer"}, "--container-image is not given"),
    ],
)
def test_unsupported_container_options_are_refused(prepared, options, message):
    with pytest.raises(SpecError, match=message):
        prepared(**options)


@pytest.mark.parametrize(
    ("available", "image", "runtime"),
    [
        (("pyxis", "apptainer"), "ubuntu", "pyxis"),
        (("singularity",), "ubuntu", "apptainer"),
        (("pyxis", "enroot"), "library://x", "apptainer"),
    ],
)
def test_auto_chooses_the_runtime_of_the_site(tmp_path, available, image, runtime):
    options = {"container_image": image}
    complete_options(options, "slurm", SiteConventions(containers=available), None, tmp_path, {})
    assert options["container_runtime"] == runtime
    habits = SiteConventions(containers=("enroot",))
    with pytest.raises(SpecError, match="No container runtime found on this machine"):
        complete_options({"container_image": "x"}, "slurm", habits, None, tmp_path, {})


def check_interactive(project, run: Run, env) -> None:
    """Check that a shell like the run, and one beside its rank 1, are in the container."""
    variables = {**env, "PATH": f"{project.bin}:{os.environ['PATH']}", "B": "host"}
    wait_for(lambda: (run.dir.path / "seen-0-1.json").exists(), 60, "the ranks")
    show = ["--", "sh", "-c", 'echo "$RANK|$A|$B|$ONLY|$PWD|$(cat /data/x.txt)"; exit 7']
    hpctrain = [sys.executable, "-P", "-m", "hpctrain"]
    for words, rank in (["attach", run.dir.path, "--rank=1"], "1"), (["shell", "--like", run.dir.path], "7"):
        shown = run_command([*hpctrain, *words, *show], variables, cwd=project.project, check=False)
        assert shown.returncode == 7, shown.stderr
        assert shown.stdout == f"{rank}|given $(x) '\"|host|image|{project.project}|data\n"
    run.cancel()
    run.wait_for_end(60)


@pytest.mark.long
def test_shells_in_fake_pyxis(project, slurm):
    check_interactive(project, project.submit(slurm.env, "0", backend="slurm", nodes=2), slurm.env)
