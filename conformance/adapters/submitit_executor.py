"""Let submitit's tests of its local executor run with hpctrain's executor on this machine."""

from __future__ import annotations

import submitit.local.local

from hpctrain import Executor


class LocalExecutor(Executor):
    def __init__(self, folder, max_num_timeout=None, max_pickle_size_gb=None, python=None) -> None:
        super().__init__(folder, cluster="local", code_snapshot=False, standby_workers="never")
        retries = {"max_num_timeout": max_num_timeout, "max_pickle_size_gb": max_pickle_size_gb}
        changes = {"python": python, **retries}
        self.update_parameters(**{name: value for name, value in changes.items() if value is not None})

    @classmethod
    def name(cls) -> str:
        return "local"

    @classmethod
    def affinity(cls) -> int:
        return 1


submitit.local.local.LocalExecutor = LocalExecutor
