"""Fuzzing of the parsers of environment variables, files of the kernel, and messages between hosts."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache

from fuzzing import FOLDER, Parser, encode, parse_environment, write_file
from helpers.launch_runner import load_recording

from hpctrain.authentication import Signed, seal, unseal
from hpctrain.cluster import (
    amd_gpus,
    detection,
    device_plan,
    env_variables,
    launchers,
    slurm_ranks,
    torchrun,
    visible_gpus,
)
from hpctrain.errors import EnvironmentMismatch, RendezvousError, Unauthenticated, UserError
from hpctrain.jobs.backends import mounts
from hpctrain.rundir import STOP_GRACE_VARIABLE, RunDir
from hpctrain.runtime import cpu_binding, rendezvous
from hpctrain.runtime.program.process_observer import ChildRelay, ProcessObserver
from hpctrain.runtime.stopping import signal_recorder
from hpctrain.runtime.supervisor_connection import Connection
from hpctrain.telemetry.sampling import nvml
from hpctrain.telemetry.sampling.sampler import ProcfsReader

LAUNCHES = ["srun-cyclic", "het-job-unsorted", "array", "batch-script", "openmpi-three-hosts"]
LAUNCHES += ["mpich-told-the-nodes", "horovodrun-two-hosts-told-the-address", "torchrun-under-srun"]
LAUNCHES += ["submitit-local"]
NAMES_BY_LAUNCHER = {
    "horovod": ["horovodrun-two-hosts-told-the-address"],
    "openmpi": ["openmpi-three-hosts", "openmpi-in-sbatch-by-node"],
    "mpich": ["mpich-told-the-nodes", "mpich-in-salloc"],
    "submitit": ["submitit-local"],
}


def environments(*names: str) -> list[str]:
    """Return the recorded variables of the last process of each launch, as JSON."""
    return [json.dumps(load_recording(name)[-1].variables) for name in names]


def launched_by(launcher: launchers.RankLauncher) -> list[str]:
    """Return the recorded variables of a launcher, or those that it needs if it was never recorded."""
    if names := NAMES_BY_LAUNCHER.get(launcher.name):
        return environments(*names)
    names = (launcher.rank, launcher.world_size, launcher.local_rank, launcher.local_world_size)
    return [json.dumps(dict(zip(names, "1212", strict=True)))]


def of_environment(function: Callable[..., object], *texts: str) -> Parser:
    return Parser(function, texts, (EnvironmentMismatch,), lambda text: function(parse_environment(text)))


def detector(detect, *names: str) -> Parser:
    return of_environment(detect, *environments(*names))


def of_variable(function: Callable[..., object], text: str, *errors: type[Exception]) -> Parser:
    return Parser(function, [text], errors, lambda text: function({"NAME": text}, "NAME"))


def read_kernel_file(name: str, read):
    """Return a call that writes the text as a file of procfs or sysfs before reading."""

    def call(text: str) -> object:
        write_file(text, name)
        return read()

    return call


AMD = amd_gpus.AmdGpu("0000:3b:00.0", "GPU-0")
PROC = {
    "stat": "cpu  10 0 5 100 2 0 1 0 0 0\ncpu0 10 0 5 100 2 0 1 0 0 0\n",
    "meminfo": "MemTotal:       32000000 kB\nMemAvailable:   16000000 kB\n",
    "diskstats": " 259 0 nvme0n1 100 0 800 10 50 0 400 20 0 30 30\n",
    "net/dev": "Inter-|   Receive\n face |bytes\n  eth0: 100 1 0 0 0 0 0 0 200 2 0 0 0 0 0 0\n",
}


def read_child_message(text: str) -> object:
    """Handle a message of a child process, then send the heartbeat that depends on it."""
    relay = relay_of_this_process()
    child = Connection.__new__(Connection)
    relay._children[child] = {}
    try:
        with suppress(ValueError):
            relay._on_child_message(child, child._open(encode(text)))
        return relay.heartbeat_message()
    finally:
        del relay._children[child]


@cache
def relay_of_this_process() -> ChildRelay:
    ranks = detection.detect({})
    observer = ProcessObserver(RunDir(FOLDER), 0, ranks, ranks.torch_variables(), records_steps=False)
    return ChildRelay(observer)


PLACEMENT = {"rank": 1, "node_rank": 0, "local_rank": 1, "host": "n1", "gpus": ["GPU-1"]}
PLACEMENT |= {"index": 1, "problem": "", "pid": 7}

PARSERS = [
    *(
        Parser(
            function,
            [json.dumps(PLACEMENT)],
            (RendezvousError,),
            lambda text, function=function: function("seats/1", text),
        )
        for function in (rendezvous._parse_entry, rendezvous._parse_placement)
    ),
    detector(detection.detect, *LAUNCHES),
    detector(slurm_ranks.detect_slurm, "srun-cyclic", "het-job-unsorted", "array"),
    *(of_environment(launcher.detect, *launched_by(launcher)) for launcher in launchers.LAUNCHERS),
    detector(torchrun.detect_torchrun, "torchrun-under-srun"),
    detector(detection.detect_local, "nothing"),
    of_environment(slurm_ranks.read_layout, *environments("srun-cyclic", "het-job-unsorted")),
    of_variable(env_variables.read_int, "17", EnvironmentMismatch),
    of_variable(env_variables.read_port, "29500", EnvironmentMismatch),
    of_variable(env_variables.read_hosts, "n[1-3]", EnvironmentMismatch),
    Parser(
        visible_gpus.visible_devices,
        ["0,1,2", "GPU-1a,GPU-2b", "MIG-3c", "NoDevFiles"],
        call=lambda text: visible_gpus.visible_devices({visible_gpus.VISIBLE_VARIABLE: text}),
        slow=[("", "#,", "")],
    ),
    of_environment(
        device_plan.gpu_sharing_reason,
        '{"SLURMD_TRES_BIND": "gres/gpu:single:2"}',
        '{"SLURM_NTASKS_PER_GPU": "2"}',
    ),
    Parser(
        nvml.count_visible,
        ["0,1", "GPU-1a"],
        call=lambda text: nvml.count_visible(["GPU-1a", "GPU-2b"], text.split(",")),
    ),
    of_environment(
        amd_gpus.check_amd_variables, '{"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "1"}'
    ),
    Parser(amd_gpus._select, ["0,1", "GPU-0"], call=lambda text: amd_gpus._select(text, [AMD, AMD])),
    Parser(
        amd_gpus.list_amd_gpus,
        ["cpu_cores_count 0\nsimd_count 4\nlocation_id 15104\ndomain 0\nunique_id 99\n"],
        call=read_kernel_file("kfd/0/properties", lambda: amd_gpus.list_amd_gpus(FOLDER / "kfd")),
    ),
    Parser(cpu_binding._read_cpus, ["0-3,8\n"], call=lambda text: cpu_binding._read_cpus(write_file(text))),
    of_variable(cpu_binding._read_count, "8"),
    Parser(
        signal_recorder.read_stop_grace,
        ["SIGTERM=30,SIGUSR2=120"],
        (UserError,),
        lambda text: signal_recorder.read_stop_grace({STOP_GRACE_VARIABLE: text}),
    ),
    *(
        Parser(
            ProcfsReader.read,
            [text],
            call=read_kernel_file(f"proc/{name}", lambda: ProcfsReader(FOLDER / "proc").read()),
        )
        for name, text in PROC.items()
    ),
    Parser(
        mounts.find_mount,
        ["nas:/home /home nfs4 rw,relatime 0 0\n/dev/sda1 / ext4 rw 0 0\nx /mnt/a\\040b ext4 rw 0 0\n"],
        call=lambda text: mounts.find_mount("/home/x", write_file(text)),
    ),
    Parser(
        unseal,
        [seal(b"key", b"{}", 1).decode()],
        (Unauthenticated,),
        lambda text: unseal(b"key", encode(text), 1),
    ),
    Parser(
        Signed.open,
        [Signed(b"key").seal({"attempt": 0, "rank": 1}).decode()],
        (Unauthenticated,),
        lambda text: Signed(b"key").open(encode(text)),
    ),
    Parser(
        Connection._open,
        ['{"step": 1}'],
        (ValueError,),
        lambda text: Connection._open(Connection.__new__(Connection), encode(text)),
    ),
    Parser(ChildRelay._on_child_message, ['{"beats": 1, "step": 1, "modules": []}'], call=read_child_message),
]
