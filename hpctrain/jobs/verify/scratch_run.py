"""Train steps of a run again, in a scratch folder that is removed afterwards."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from hpctrain.errors import HpctrainError, RunFailed, SpecError
from hpctrain.files import append_json_line, make_folder
from hpctrain.jobs.backends import choose_backend
from hpctrain.jobs.options.resolved_options import ResolvedOptions
from hpctrain.jobs.runs.run import Run
from hpctrain.jobs.submit.prepare import PreparedSubmission
from hpctrain.jobs.submit.render import render
from hpctrain.jobs.submit.submit_prepared import submit_prepared
from hpctrain.jobs.verify.training_record import ReplayedPart, TrainingRecord, VerificationPlan
from hpctrain.jobspec.job_directives import directives_after_start
from hpctrain.jobspec.job_spec import BackendName, CodeRef, JobSpec
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.jobspec.notify import NotifyConfig
from hpctrain.rundir import (
    MICRO_BATCH_VARIABLE,
    VERIFY_STEPS_VARIABLE,
    VERIFY_SYNC_STEPS_VARIABLE,
    RunDir,
    list_checkpoint_steps,
)
from hpctrain.slurm.states import RunState

#: Files of a checkpoint with these names are large; all others are copied.
_LARGE = ".distcp"
_CANCEL_TIMEOUT_S = 60.0


class ScratchRun:
    """A copy of a run that trains some of its steps again, as a context manager."""

    def __init__(
        self, verified: RunDir, environ: Mapping[str, str], backend: BackendName, parent: Path | None
    ) -> None:
        self._verified, self._environ = verified, environ
        self._backend = choose_backend(backend, environ)[0]
        self._parent = parent or (verified.path.parent if backend == "slurm" else None)
        self._failed = False
        self.notes: list[str] = []
        """Differences from the verified run."""
        self._spec = self._load_spec()

    def __enter__(self) -> Self:
        prefix = f"verify-{self._verified.path.name}-"
        self.run = RunDir(Path(tempfile.mkdtemp(prefix=prefix, dir=self._parent)).resolve())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run = Run(self.run, self._environ)
        if kind is not None and self.run.spec.exists():
            with suppress(HpctrainError):
                run.cancel()
                run.wait_for_end(_CANCEL_TIMEOUT_S)
        if not self._failed:
            shutil.rmtree(self.run.path, ignore_errors=True)

    def check(self, plan: VerificationPlan) -> None:
        for segment in plan.parts:
            spec = self._spec_of(segment, Path.cwd(), {})
            try:
                self._backend.check(spec, render(spec), ResolvedOptions({}).habits)
            except SpecError as error:
                if self._backend.name == "slurm":
                    raise
                raise SpecError(
                    f"The run trained on {segment.shape.world_size} ranks, which this machine cannot host: "
                    f"{error} Use --backend slurm, or train the steps on N ranks of this machine with "
                    "--ranks N."
                ) from error

    def train(self, plan: VerificationPlan, record: TrainingRecord) -> None:
        if plan.start_checkpoint is not None:
            folder = self.run.checkpoints / plan.start_checkpoint.name
            make_folder(folder.parent)
            folder.mkdir()
            for file in plan.start_checkpoint.iterdir():
                if file.name.endswith(_LARGE):
                    (folder / file.name).symlink_to(file)
                else:
                    shutil.copyfile(file, folder / file.name)
        for step, event in record.rollbacks.items():
            if step <= plan.last:
                append_json_line(self.run.events, event.fields())
        environments = (record.environments.get(attempt, {}) for attempt in plan.attempts)
        threads = next(filter(None, environments), {}).get("threads_per_rank")
        function = [self._verified.function.read_bytes()] if self._verified.function.exists() else []
        for segment in plan.parts:
            # The grouping of additions on a CPU depends on the number of threads.
            variables = {"OMP_NUM_THREADS": str(threads)} if type(threads) is int else {}
            spec = self._spec_of(segment, self.run.path, variables)
            submission = PreparedSubmission(spec, self._backend, self._environ, render(spec))
            run, _ = submit_prepared(submission, function)
            status = run.wait_for_end()
            if segment.last not in list_checkpoint_steps(self.run.checkpoints) and (
                status.state is not RunState.COMPLETED
            ):
                self._failed = True
                raise RunFailed(
                    f"The steps could not be repeated: {status.cause or status.state}. "
                    f"Log: {status.log or self.run.logs}"
                )

    def _spec_of(self, segment: ReplayedPart, folder: Path, variables: Mapping[str, str]) -> JobSpec:
        nodes, world_size, micro_batch_size = segment.shape
        per_node = world_size // nodes
        env = {**variables, **self._spec.env, VERIFY_STEPS_VARIABLE: ",".join(map(str, segment.saved))}
        env[VERIFY_SYNC_STEPS_VARIABLE] = ",".join(map(str, segment.synced))
        # The ranks import modules from the code snapshot of the verified run, which must not change.
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        if micro_batch_size is not None:
            env[MICRO_BATCH_VARIABLE] = str(micro_batch_size)
        return replace(
            self._spec,
            env=env,
            run_dir=str(folder),
            run_id=folder.name,
            nodes=nodes,
            min_nodes=nodes,
            ntasks_per_node=per_node,
            gpus_per_node=per_node * self._spec.gpus_per_task,
        )

    def _load_spec(self) -> JobSpec:
        verified, spec = self._verified, load_spec(self._verified.spec)
        missing = f"of run {verified.run_id} is not on this machine"
        code, workdir, python = spec.code, Path(spec.workdir), spec.python
        if code is not None:
            folder = (verified.array or verified).code / Path(code.copy).name
            if not folder.is_dir():
                raise SpecError(
                    f"The code snapshot {folder} of run {verified.run_id} is missing. Restore it."
                )
            script = code.script and str(folder / os.path.relpath(code.script, code.copy))
            code = CodeRef(source=code.source, copy=str(folder), script=script)
        elif not verified.function.exists():
            self.notes.append(
                f"The run has no code snapshot, so the current versions of {spec.script} and its imports "
                "are used instead."
            )
            if spec.program == "script" and not Path(spec.script).is_file():
                raise SpecError(f"The script {spec.script} {missing}. Restore the script.")
        if not workdir.is_dir():
            if code is not None and workdir.is_relative_to(code.source):
                workdir = Path(code.copy, workdir.relative_to(code.source))
            if not workdir.is_dir():
                raise SpecError(
                    f"The working directory {spec.workdir} {missing}. Create this directory, with the data "
                    "that the script reads from it."
                )
            self.notes.append(f"{spec.workdir} is not on this machine, so the script runs in {workdir}.")
        if spec.shell.python is None and not os.access(python, os.X_OK):
            python = sys.executable
            self.notes.append(f"{spec.python} is not on this machine, so {python} is used instead.")
        in_slurm = self._backend.name == "slurm"
        return replace(
            spec,
            name="verify",
            backend=self._backend.name,
            array_task=None,
            code=code,
            python=python,
            workdir=str(workdir),
            spare_nodes=0,
            node_check="never",
            standby_workers_s=None,
            time_limit_s=spec.time_limit_s if in_slurm else None,
            directives=directives_after_start(spec.directives) if in_slurm else {},
            notify=NotifyConfig(),
        )
