"""Hydra launcher `hpctrain`: that of hydra-submitit-launcher, with hpctrain's executor."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict

# Hydra imports all plugins, also if hydra-submitit-launcher is not installed.
with suppress(ImportError):
    from hydra.core.config_store import ConfigStore
    from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher

    class HpctrainLauncher(BaseSubmititLauncher):
        """Submits the jobs of a sweep as a job array."""

        _EXECUTOR = "hpctrain"

    _CONFIG = {
        **dict.fromkeys(asdict(SlurmQueueConf())),  # None is hpctrain's default.
        "_target_": f"{__name__}.HpctrainLauncher",
        "submitit_folder": "${hydra.sweep.dir}/runs",
        "name": "${hydra.job.name}",
    }
    ConfigStore.instance().store(group="hydra/launcher", name="hpctrain", node=_CONFIG, provider="hpctrain")
