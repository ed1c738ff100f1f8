"""The node check before the ranks start, with fake GPU readings."""

import pytest

from hpctrain.cluster import detect
from hpctrain.errors import EnvironmentMismatch
from hpctrain.rundir import RunDir
from hpctrain.runtime.node_check import check_gpu, gpus_to_test, previous_memory_errors
from hpctrain.telemetry.sampling.nvml import GpuReading


def ranks(local_rank: int, per_node: int):
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(local_rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": str(per_node),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_TASKS_PER_NODE": str(per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    return detect(environ), environ


def test_each_rank_checks_the_gpu_that_it_will_use():
    assert [gpus_to_test(*ranks(local, 4), 4) for local in range(4)] == [[0], [1], [2], [3]]
    assert gpus_to_test(*ranks(0, 1), 4) == [0, 1, 2, 3], "an agent of torchrun has all of them"
    assert gpus_to_test(*ranks(1, 2), 0) == []
    single_rank, environ = ranks(0, 1)
    assert gpus_to_test(single_rank, {**environ, "CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, 2) == [0]
    with pytest.raises(EnvironmentMismatch, match="4 ranks on this node"):
        gpus_to_test(*ranks(3, 4), 2)


def test_memory_errors_count_from_the_first_check_of_the_job(tmp_path):
    run = RunDir(tmp_path)
    (tmp_path / "checks").mkdir()
    old = [GpuReading(ecc_errors=5), GpuReading(ecc_errors=None)]
    assert previous_memory_errors(run, "n1", 0, "7/0", old) == [5, 0]
    new = [GpuReading(ecc_errors=7), GpuReading(ecc_errors=None)]
    assert previous_memory_errors(run, "n1", 0, "7/0", new) == [5, 0]
    assert check_gpu(0, new[0], 5) == [
        "GPU 0: 2 uncorrected memory errors since the first node check of this job"
    ]
    assert check_gpu(0, old[0], 5) == []
    assert previous_memory_errors(run, "n1", 0, "7/1", new) == [7, 0], "a job that was requeued begins anew"


def test_gpu_in_use_is_reported():
    assert check_gpu(1, GpuReading(processes=1, memory=1 << 20), 0) == [
        "GPU 1 is in use (processes: 1, memory: 1 MiB)"
    ]
    assert check_gpu(1, GpuReading(processes=0, memory=1 << 40), 0) != []
    assert check_gpu(1, GpuReading(processes=0, memory=1 << 29), 0) == []
    assert check_gpu(1, GpuReading(processes=3), 0, shared=True) == []
