"""Batch scripts. Those of one job per template and feature are stored in `golden/`.

    UPDATE_GOLDEN=1 .venv/bin/python -m pytest tests/jobs/test_render.py

rewrites them; `git diff` then shows the effect of a changed template.
"""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from helpers import REPOSITORY
from helpers.commands import environment, run_command

from hpctrain._version import __version__
from hpctrain.errors import SpecError
from hpctrain.jobs.submit.render import render
from hpctrain.jobs.submit.submit_prepared import submit_prepared
from hpctrain.jobspec.container import Container
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.launcher import TorchrunConfig
from hpctrain.jobspec.shell_setup import ShellSetup

GOLDEN = Path(__file__).parent / "golden"

SHELL = ShellSetup(modules=("cuda/12.4", "nccl 2"), setup=("ulimit -c 0", "export A='b c'"))

JOBS: dict[str, dict[str, Any]] = {
    "apptainer": {"container": Container(image="/home/me/torch.sif", runtime="apptainer")},
    "cpu": {"ntasks_per_node": 2},
    "cpu-shell": {"shell": SHELL, "cpus_per_task": 4, "directives": {"mem": "8G", "exclusive": ""}},
    "ddp": {"nodes": 2, "gpus_per_node": 2, "time_limit_s": 3600.0},
    "ddp-array": {"gpus_per_node": 1, "array": "0-3%2", "directives": {"partition": "urgent"}},
    "ddp-conda-name": {"gpus_per_node": 2, "python": "python", "shell": ShellSetup(conda="torch")},
    "ddp-conda-path": {"gpus_per_node": 2, "shell": ShellSetup(conda="/home/me/my envs/torch")},
    "ddp-gpus-per-node": {"gpus_per_node": 2, "gpu_request_style": "gpus-per-node"},
    "ddp-venv": {
        "gpus_per_node": 2,
        "python": "/home/me/it's/bin/python",
        "shell": ShellSetup(modules=("cuda",), venv="/home/me/it's"),
    },
    "ddp2": {"nodes": 2, "gpus_per_node": 2, "template": "ddp2"},
    "elastic": {"nodes": 4, "min_nodes": 2, "gpus_per_node": 2, "cpus_per_task": 4},
    "elastic-spare": {
        "nodes": 4,
        "min_nodes": 2,
        "spare_nodes": 1,
        "resume_mode": "successor",
        "stage": {"tokens": "/data/my tokens.bin"},
    },
    "elastic-cpu": {"nodes": 4, "min_nodes": 1, "ntasks_per_node": 2},
    "local": {"backend": "local", "nodes": 2, "ntasks_per_node": 2},
    "plain": {
        "template": "plain",
        "supervised": False,
        "nodes": 2,
        "gpus_per_node": 2,
        "env": {"NCCL_DEBUG": "INFO"},
    },
    "pyxis": {
        "nodes": 2,
        "gpus_per_node": 2,
        "container": Container(image="nvcr.io#nvidia/pytorch:25.03-py3", runtime="pyxis"),
    },
    "torchrun": {"nodes": 2, "gpus_per_node": 2, "cpus_per_task": 4, "torchrun": TorchrunConfig()},
    "torchrun-cpu-etcd": {
        "nodes": 2,
        "ntasks_per_node": 2,
        "torchrun": TorchrunConfig(rdzv_backend="etcd-v2", rdzv_endpoint="etcd:2379"),
    },
    "words": {"name": "a 'b' #c", "run_dir": "/home/me/run $(d) %j", "directives": {"comment": 'say "x"'}},
}

HOSTILE = [
    *("a b", "a'b", 'a"b', "$(touch pwned)", "`touch pwned`", "a;touch pwned", "#SBATCH --x", "a\\", "%j"),
    *("é 😀", "-m"),
]


@pytest.mark.parametrize("name", JOBS)
def test_scripts_match_the_golden_files(name):
    defaults = {"script": "/home/me/train.py", "name": "train", "run_id": "train-1", "backend": "slurm"}
    paths = {"run_dir": "/home/me/runs/train-1", "workdir": "/home/me", "python": "/usr/bin/python3"}
    script = render(JobSpec(**{**defaults, **paths, **JOBS[name]}))
    script = script.replace(f" {__version__} ", " VERSION ")
    stored = GOLDEN / f"{name}.sbatch"
    if os.environ.get("UPDATE_GOLDEN"):
        stored.write_text(script)
    assert script == stored.read_text()
    result = subprocess.run(["bash", "-n", stored], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")


def test_real_sbatch_accepts_every_script(slurm):
    refused = {}
    for name in JOBS:
        result = run_command(["sbatch", "--test-only", GOLDEN / f"{name}.sbatch"], slurm.env, check=False)
        if result.returncode or "to start at" not in result.stderr:
            refused[name] = result.stderr
    assert refused == {}


@pytest.mark.parametrize("word", HOSTILE)
def test_names_are_never_executed(make_spec, tmp_path, word):
    run_dir = tmp_path / word.replace("\\", "")  # a backslash is refused there
    run_dir.mkdir(exist_ok=True)
    python = tmp_path / f"python {word}"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$3"\n')
    python.chmod(0o755)
    text = render(
        make_spec(
            run_dir=str(run_dir),
            workdir=str(tmp_path),
            python=str(python),
            name=word,
            script=f"/x/{word}\ntouch pwned",
        )
    )
    (tmp_path / "job").write_text(text)
    result = subprocess.run(["bash", "job"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (result.stdout, result.stderr) == (f"{run_dir}\n", "")
    assert not list(tmp_path.rglob("pwned"))


def test_template_blocks_can_be_replaced_individually(make_spec, tmp_path):
    own_template = tmp_path / "mine.j2"
    own_template.write_text(
        '{% extends "torchrun.sbatch.j2" %}\n'
        "{% block modules %}\nmodule purge\n{{ super() }}{% endblock %}\n"
        "{% block environment %}\nsource my-env\n{% endblock %}\n"
    )
    shell = ShellSetup(modules=("cuda",), setup=("ulimit -c 0",))
    lines = render(make_spec(template=str(own_template), shell=shell, torchrun=TorchrunConfig())).splitlines()
    order = ["module purge", "module load cuda", "source my-env", "ulimit -c 0"]
    assert [line for line in lines if line in order] == order
    assert lines[-1].startswith("exec ")
    with pytest.raises(SpecError, match="requires --launcher torchrun"):
        render(make_spec(template=str(own_template)))


@pytest.mark.parametrize(
    ("shell", "message"),
    [
        (ShellSetup(modules=("a b",)), "omits 'a b' (--module)"),
        (ShellSetup(conda="torch"), "omits torch (--conda)"),
        (ShellSetup(venv="/v"), "omits /v/bin/activate (--venv)"),
        (ShellSetup(setup=("ulimit -c 0",)), "omits ulimit -c 0 (--setup)"),
        (ShellSetup(teardown=("rm -r /x",)), "omits rm -r /x (teardown)"),
    ],
)
def test_template_without_requested_setup_is_refused(make_spec, tmp_path, shell, message):
    own_template = tmp_path / "mine.j2"
    own_template.write_text("#!/bin/bash\nexec python -m hpctrain.supervisor {{ spec.run_dir | quote }}\n")
    assert "hpctrain.supervisor /" in render(make_spec(template=str(own_template)))
    with pytest.raises(SpecError) as caught:
        render(make_spec(template=str(own_template), shell=shell))
    assert message in str(caught.value)
    assert "super()" in str(caught.value)


DUMP = "import json, os, sys\nprint(json.dumps([sys.prefix, dict(os.environ)]))\n"


def prefix_and_variables_of_rank(prepared, script, python, environ=None, **options):
    """Run one rank; return its `sys.prefix` and variables."""
    script.write_text(DUMP)
    submission = prepared(python=python, environ=environment(environ), **options)
    run, _ = submit_prepared(submission)
    run.wait(timeout=120)
    return json.loads(run.dir.rank_log(0, 0).read_text())


@pytest.mark.ranks
def test_ranks_use_the_virtual_environment(prepared, script, tmp_path):
    venv = tmp_path / "my env"
    run_command([sys.executable, "-m", "venv", "--without-pip", venv])
    (purelib,) = venv.glob("lib/*/site-packages")
    # hpctrain must be installed in it.
    (purelib / "here.pth").write_text("\n".join([str(REPOSITORY), sysconfig.get_path("purelib")]))
    prefix, variables = prefix_and_variables_of_rank(prepared, script, sys.executable, venv="my env")
    assert (prefix, variables["VIRTUAL_ENV"]) == (str(venv), str(venv))


@pytest.mark.ranks
def test_setup_lines_run_in_order_and_reach_the_ranks(prepared, script):
    lines = ["export A=1", 'export B="$A $((1 + 1))"', "if true; then\n  export C='#SBATCH --x'\nfi"]
    _, variables = prefix_and_variables_of_rank(prepared, script, sys.executable, setup=lines)
    assert [variables[name] for name in "ABC"] == ["1", "1 2", "#SBATCH --x"]


@pytest.mark.ranks
def test_modules_are_loaded_in_order_by_a_fake_function(prepared, script):
    module = {"BASH_FUNC_module%%": '() { [ "$1" = load ]; export LOADED="$LOADED[$2]"; }'}
    _, variables = prefix_and_variables_of_rank(
        prepared, script, sys.executable, module, module=["cuda/12", "a b"]
    )
    assert variables["LOADED"] == "[cuda/12][a b]"


@pytest.mark.ranks
def test_conda_environment_is_activated_by_a_fake_conda(prepared, script, tmp_path):
    conda = tmp_path / "conda"
    hook = f'conda() {{ export ASKED="$*" PATH="{os.path.dirname(sys.executable)}:$PATH"; }}'
    conda.write_text(f"#!/bin/sh\n[ \"$*\" = 'shell.bash hook' ] && cat <<'END'\n{hook}\nEND\n")
    conda.chmod(0o755)
    prefix, variables = prefix_and_variables_of_rank(
        prepared, script, sys.executable, {"CONDA_EXE": str(conda)}, conda="my torch"
    )
    assert (prefix, variables["ASKED"]) == (sys.prefix, "activate my torch")


def test_conda_environment_name_is_looked_up(prepared, tmp_path):
    environ = environment({"PATH": str(tmp_path)})
    with pytest.raises(SpecError, match=r"environment 'mine' \(--conda\) requires conda.*--module"):
        prepared(conda="mine", environ=environ)
    assert prepared(conda="mine", module=["miniconda"], environ=environ)
    conda = tmp_path / "conda"
    conda.write_text(f'#!{sys.executable}\nprint(\'{{"envs": ["/opt/conda", "/opt/conda/envs/mine"]}}\')\n')
    conda.chmod(0o755)
    assert prepared(conda="mine", environ=environ)
    with pytest.raises(
        SpecError, match=r"no environment 'yours' \(--conda\). Available environments: base, conda, mine\."
    ):
        prepared(conda="yours", environ=environ)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"venv": "nowhere"}, r"nowhere' \(--venv\) is not a Python environment"),
        ({"conda": "./nowhere"}, r"nowhere' \(--conda\) is not a Python environment"),
        ({"conda": "a", "venv": "b"}, r"both .*--conda\) and .*--venv\) are given"),
        ({"module": ["a\nb"]}, "control character"),
        ({"module": [""]}, "module"),
        ({"rdzv_backend": "c10d"}, "srun starts the ranks"),
        ({"launcher": "torchrun", "rdzv_endpoint": "h:1"}, "whose endpoint is the supervisor"),
        ({"launcher": "torchrun", "rdzv_backend": "etcd-v2"}, "rdzv_endpoint, such as HOST:PORT"),
        ({"launcher": "torchrun", "rdzv_backend": "etcd-v2", "rdzv_endpoint": "h"}, "HOST:PORT"),
        ({"template": "torchrun", "launcher": "srun"}, "requires --launcher torchrun"),
    ],
)
def test_invalid_environment_options_are_refused(prepared, options, message):
    with pytest.raises(SpecError, match=message):
        prepared(**options)


@pytest.mark.parametrize(
    ("source", "message"),
    [("{{ nodez }}", r"'nodez' is undefined\.$"), ("\n{% if %}", "line 2"), ('{% include "x" %}', "x")],
)
def test_invalid_template_is_reported(make_spec, tmp_path, source, message):
    own_template = tmp_path / "mine.j2"
    own_template.write_text(source)
    with pytest.raises(SpecError, match=message) as caught:
        render(make_spec(template=str(own_template)))
    assert "mine.j2" in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ cycler.__init__.__globals__.os.popen('touch ran').read() }}",
        "{% set f = range.__globals__ %}{{ f.os.system('touch ran') }}",
        "{{ spec.__class__.__mro__ }}",
        "{{ '{0.__class__}'.format(spec) }}",
        "{{ (spec.entry | attr('__class__')).__name__ }}",
        "{% set _ = spec.env.update({'A': 'b'}) %}",
    ],
)
def test_template_cannot_run_python_or_change_the_spec(make_spec, tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.j2").write_text(source + "\nexec python -m hpctrain.supervisor x\n")
    spec = make_spec(template=str(tmp_path / "mine.j2"))
    with pytest.raises(
        SpecError, match=r"mine.j2.*uses a blocked expression: access to attribute .* is unsafe. .*sandbox"
    ):
        render(spec)
    assert spec.env == {}
    assert not (tmp_path / "ran").exists()
