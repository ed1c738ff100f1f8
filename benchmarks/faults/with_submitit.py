"""Submits the loop of with_torchrun.py with submitit, as a checkpointable function."""

from __future__ import annotations

import sys

import submitit


class Training:
    def __call__(self) -> None:
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        from with_torchrun import train

        train()

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(Training())


if __name__ == "__main__":
    nodes, folder, name = sys.argv[1:]
    executor = submitit.SlurmExecutor(folder=f"{folder}/submitit", max_num_timeout=10)
    executor.update_parameters(
        job_name=name, nodes=int(nodes), ntasks_per_node=1, cpus_per_task=1, time=30, signal_delay_s=20
    )
    print(executor.submit(Training()).job_id)
