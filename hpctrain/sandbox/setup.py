"""Start of a sandbox: folder, devices, key, configuration, host lines and daemons."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from hpctrain.errors import SpecError, UserError
from hpctrain.sandbox import etc_hosts
from hpctrain.sandbox.accounting import create_accounting as lay_out_accounting
from hpctrain.sandbox.allocate import allocate
from hpctrain.sandbox.cluster import Sandbox
from hpctrain.sandbox.daemons import MUNGE_USER
from hpctrain.sandbox.layout import ROOT, SandboxLayout, SandboxSize, folder_of
from hpctrain.sandbox.lock import sandbox_lock
from hpctrain.sandbox.requirements import check_requirements
from hpctrain.sandbox.slurm_conf import gres_conf, slurm_conf
from hpctrain.sandbox.teardown import remove

#: Major number for local use, without a driver. Slurm requires a character device per GPU, but never opens
#: it. Control groups distinguish the devices by their minor numbers.
_DEVICE_MAJOR = 120


def up(
    name: str = "default",
    *,
    nodes: int = 4,
    gpus_per_node: int = 2,
    cpus_per_node: int = 8,
    preempt_grace_s: int = 30,
    accounting: bool = False,
    gpu_type: str = "",
    settings: Sequence[str] = (),
    slurm: str = "",
    link_commands: Callable[[SandboxLayout], None] | None = None,
    limit_s: float = 60.0,
) -> Sandbox:
    """Start a sandbox and wait until all its nodes accept jobs.

    An existing sandbox of the same size is kept with its jobs; exited daemons are restarted.

    Args:
        name: name of the sandbox.
        nodes: number of nodes.
        gpus_per_node: simulated GPUs per node.
        cpus_per_node: CPUs per node, as configured in Slurm.
        preempt_grace_s: seconds from SIGTERM to SIGKILL at a preemption.
        accounting: run slurmdbd and a database, so that `sacct` works.
        gpu_type: GPU type in Slurm, such as `a100`; empty for none.
        settings: lines of `slurm.conf` that replace default lines with the same key or partition, or are
            added.
        slurm: Slurm version that `link_commands` provides; empty for the installed one.
        link_commands: creates the launcher and the folder of commands of another Slurm version, for tests.
        limit_s: seconds until the sandbox must be up.

    Raises:
        UserError: this machine cannot run a sandbox, or the existing sandbox has another size.
        SchedulerError: a daemon did not start within `limit_s` seconds; a new sandbox is removed again.
    """
    shape = SandboxSize(
        nodes, gpus_per_node, cpus_per_node, preempt_grace_s, accounting, gpu_type, tuple(settings), slurm
    )
    folder = folder_of(name)
    check_requirements(accounting=accounting, slurm=slurm)
    with sandbox_lock(ROOT):
        plan = SandboxLayout.load(folder)
        if plan is not None:
            if plan.shape != shape:
                raise SpecError(
                    f"Sandbox {name} already exists with {plan.shape}, but {shape} was requested. Remove "
                    f"the existing sandbox (`hpctrain sandbox down --name {name}`), or use another --name."
                )
            return _start(plan, limit_s)
        remove(folder)
        try:
            return _start(create_folder(folder, shape, link_commands), limit_s)
        except BaseException:
            remove(folder, came_up=False)
            raise


def create_folder(
    folder: Path, shape: SandboxSize, link_commands: Callable[[SandboxLayout], None] | None = None
) -> SandboxLayout:
    """Create the files that the daemons of a new sandbox read.

    Raises:
        UserError: device files cannot be created.
    """
    folder.mkdir()
    plan = allocate(folder, shape)
    for path in (plan.munge, plan.state, plan.spool, plan.logs, folder / "dev"):
        path.mkdir()
    host = socket.gethostname().partition(".")[0]
    memory_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    plan.conf.write_text(slurm_conf(plan, host, memory_mib), encoding="utf-8")
    plan.gres_conf.write_text(gres_conf(plan), encoding="utf-8")
    (plan.munge / "key").write_bytes(secrets.token_bytes(128))
    # Every user of the machine may use the sandbox, regardless of the umask; only the key is secret.
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (plan.munge / "key").chmod(0o400)
    for path in (plan.munge, plan.munge / "key"):
        shutil.chown(path, MUNGE_USER, MUNGE_USER)
    if link_commands is not None:
        link_commands(plan)
    if shape.accounting:
        lay_out_accounting(plan)
    try:
        for number, device in enumerate(plan.devices):
            os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(_DEVICE_MAJOR, number))
    except OSError as error:
        raise UserError(
            f"Cannot create the device file {device}, which simulates a GPU: {error.strerror}. If "
            "this is a container, add the capability CAP_MKNOD. Otherwise, use --gpus-per-node 0."
        ) from error
    # Written last, so that a saved layout implies a complete sandbox.
    plan.save()
    return plan


def _start(plan: SandboxLayout, limit_s: float) -> Sandbox:
    try:
        etc_hosts.add_hosts(plan.name, plan.addresses)
    except OSError as error:
        raise UserError(
            f"Cannot add the node names to {etc_hosts.HOSTS}: {error.strerror}. Slurm must be able to "
            "resolve these names. Make the file writable."
        ) from error
    sandbox = Sandbox(plan)
    sandbox.start(limit_s)
    return sandbox
