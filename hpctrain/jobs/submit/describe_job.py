"""Describe a job in the comments of its batch script."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterator

from hpctrain.redaction import redact_args
from hpctrain.spec.job_spec import JobSpec
from hpctrain.spec.step_options import program_words, srun_options

_MAX_CHARACTERS = 2_000
_NOT_PLAIN = re.compile(r"[^\w@%+=:,./-]", re.ASCII)


def describe_job(spec: JobSpec) -> list[str]:
    """Return comments that say what the job runs, and explain directives that differ from the request."""
    step = _explain_step(spec) if spec.supervised else ()
    return [*_explain_start(spec), *step, *_explain_directives(spec)]


def _explain_start(spec: JobSpec) -> Iterator[str]:
    if spec.supervised:
        yield f"To start an ended run again: hpctrain resume {shlex.quote(spec.run_dir)}"
    else:
        command = "sbatch" if spec.backend == "slurm" else "bash"
        yield f"To start an ended run again: {command} job.sbatch, in the run folder."


def _explain_step(spec: JobSpec) -> Iterator[str]:
    words = redact_args(program_words(spec))
    if spec.torchrun is not None:
        program = ["--no-python", *words] if spec.program == "command" else words[1:]
        agents = [f"--nnodes={spec.nodes}", f"--nproc-per-node={spec.ntasks_per_node}"]
        words = ["torchrun", *agents, f"--rdzv-backend={spec.torchrun.rdzv_backend}", *program]
    if spec.backend == "local":
        yield f"Each attempt starts {spec.world_size} processes on this machine:"
    else:
        words = ["srun", *srun_options(spec, spec.nodes), *words]
        yield "Each attempt runs the equivalent of:"
    command = " ".join(map(_quote, words))
    if len(command) > _MAX_CHARACTERS:
        command = f"{command[:_MAX_CHARACTERS]} …"
    for line in textwrap.wrap(command, 105, break_long_words=False, break_on_hyphens=False):
        yield f"  {line}"
    if spec.torchrun is not None and spec.torchrun.rdzv_endpoint is not None:
        yield f"Rendezvous: {spec.torchrun.rdzv_backend} at {_quote(spec.torchrun.rdzv_endpoint)}"
    else:
        host = "rank 0" if spec.torchrun is None else "the supervisor"
        yield f"Rendezvous: a store of {host} on the first node (MASTER_ADDR, MASTER_PORT)"
    if spec.container is not None:
        yield f"Container of the ranks: {_quote(spec.container.image)} ({spec.container.runtime})"
    for name, source in spec.stage.items():
        yield f"Staged to the local disks: {_quote(source)} as $HPCTRAIN_STAGE/{name}"
    if spec.stage_environment:
        yield "Staged to the local disks: the Python environment and the code"


def _explain_directives(spec: JobSpec) -> Iterator[str]:
    if spec.backend == "local":
        return
    if not spec.supervised:
        yield "--requeue: Slurm requeues the job after a preemption or a node failure, and for nothing else"
    if spec.is_elastic:
        spares = f", and {spec.spare_nodes} spare" if spec.spare_nodes else ""
        yield f"--nodes: the run uses {spec.min_nodes} to {spec.nodes} nodes{spares}"
        yield "--cpus-per-task: the CPUs of all ranks of a node, because sbatch counts one task per node"
    elif spec.spare_nodes:
        yield f"--nodes: {spec.nodes} for the run, and {spec.spare_nodes} spare"
    if spec.resume_mode == "successor":
        yield "--requeue: for preemptions and the loss of the first node; otherwise, a new job continues"


def _quote(word: str) -> str:
    """Return a word on one line, quoted if it contains special characters."""
    return word if word and not _NOT_PLAIN.search(word) else json.dumps(word, ensure_ascii=False)
