"""Hydra launcher `hpctrain`: the launcher of hydra-submitit-launcher, with hpctrain's executor."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

# Hydra imports all plugins, even if hydra-submitit-launcher is not installed.
with suppress(ImportError):
    from hydra.core.config_store import ConfigStore
    from hydra.core.singleton import Singleton
    from hydra.core.utils import JobReturn, JobStatus, filter_overrides
    from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher

    class HpctrainLauncher(BaseSubmititLauncher):
        """Submits the jobs of a sweep as a job array, and waits for them if `wait` is true."""

        def __init__(self, *, wait: bool, submitit_folder: str, **params: Any) -> None:
            super().__init__(**params)
            self._wait, self._folder = wait, submitit_folder

        def __call__(self, *args: Any, **kwargs: Any) -> JobReturn:
            """Run one job; raise its exception, so that its run fails."""
            result = super().__call__(*args, **kwargs)
            _ = result.return_value
            return result

        def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
            # Hydra imports its plugins at each start of the program.
            from hpctrain.jobs.executor import Executor

            assert self.config is not None
            Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
            executor = Executor(self._folder, **self.params)
            state, numbers = (
                Singleton.get_state(),
                range(initial_job_idx, initial_job_idx + len(job_overrides)),
            )
            with executor.batch():
                jobs = [
                    executor.submit(
                        self, list(words), "hydra.sweep.dir", number, f"job_id_for_{number}", state
                    )
                    for number, words in zip(numbers, job_overrides, strict=True)
                ]
            for number, job, words in zip(numbers, jobs, job_overrides, strict=True):
                log.info("#%d: %s, %s", number, " ".join(filter_overrides(words)), job.run.dir)
            if self._wait:
                return [job.results()[0] for job in jobs]
            # Hydra requires a result: the run folder.
            return [
                JobReturn(overrides=words, status=JobStatus.COMPLETED, _return_value=str(job.run.dir))
                for job, words in zip(jobs, job_overrides, strict=True)
            ]

    _CONFIG = {
        **dict.fromkeys(asdict(SlurmQueueConf())),  # None is hpctrain's default.
        "_target_": f"{__name__}.HpctrainLauncher",
        "submitit_folder": "${hydra.sweep.dir}/runs",
        "name": "${hydra.job.name}",
        "wait": True,
    }
    ConfigStore.instance().store(group="hydra/launcher", name="hpctrain", node=_CONFIG, provider="hpctrain")
