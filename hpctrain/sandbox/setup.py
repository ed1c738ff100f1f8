"""Putting a sandbox up: its folder, devices, key, configuration and host lines, then its daemons."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import SpecError, UserError
from hpctrain.sandbox import hosts
from hpctrain.sandbox.accounting import lay_out as lay_out_accounting
from hpctrain.sandbox.allocate import allocate
from hpctrain.sandbox.cluster import Sandbox
from hpctrain.sandbox.config import gres_conf, slurm_conf
from hpctrain.sandbox.daemons import MUNGE_USER
from hpctrain.sandbox.lock import locked
from hpctrain.sandbox.plan import ROOT, Plan, Shape, folder_of
from hpctrain.sandbox.requirements import require
from hpctrain.sandbox.teardown import remove

#: The numbers of /dev/null: Slurm takes only a character device for a GPU, and nobody opens this one.
_DEVICE = os.makedev(1, 3)


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
    limit_s: float = 60.0,
) -> Sandbox:
    """Start a sandbox and wait until all its nodes take jobs.

    One of the same shape that is there already is kept with its jobs; those of its daemons that ended are
    started again.

    Args:
        name: what it is called.
        nodes: number of nodes.
        gpus_per_node: pretend GPUs of each.
        cpus_per_node: CPUs that each claims to have.
        preempt_grace_s: seconds from SIGTERM to SIGKILL at a preemption.
        accounting: whether it keeps records, so that `sacct` works.
        gpu_type: what Slurm calls the GPUs.
        settings: lines of `slurm.conf` for the place of ours with the same key, or of the same partition.
        limit_s: seconds within which it has to be up.

    Raises:
        UserError: this machine cannot host a sandbox, or one of that name has another shape.
        SchedulerError: a daemon did not come up within `limit_s` seconds; of a new sandbox nothing is left.
    """
    shape = Shape(nodes, gpus_per_node, cpus_per_node, preempt_grace_s, accounting, gpu_type, tuple(settings))
    folder = folder_of(name)
    require(accounting=accounting)
    with locked(ROOT):
        plan = Plan.load(folder)
        if plan is not None:
            if plan.shape != shape:
                raise SpecError(
                    f"sandbox {name} is there with {plan.shape}, but {shape} was asked for: take it down"
                    f" (`hpctrain sandbox down --name {name}`), or give the new one another --name"
                )
            return _start(plan, limit_s)
        remove(folder)
        try:
            return _start(lay_out(folder, shape), limit_s)
        except BaseException:
            remove(folder, came_up=False)
            raise


def lay_out(folder: Path, shape: Shape) -> Plan:
    """Write everything that the daemons of a new sandbox read.

    Raises:
        UserError: this machine does not let us.
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
    # Every user of the machine may use the sandbox, whatever our umask; only the key is secret.
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (plan.munge / "key").chmod(0o400)
    for path in (plan.munge, plan.munge / "key"):
        shutil.chown(path, MUNGE_USER, MUNGE_USER)
    if shape.accounting:
        lay_out_accounting(plan)
    try:
        for device in plan.devices:
            os.mknod(device, 0o666 | stat.S_IFCHR, _DEVICE)
    except OSError as error:
        raise UserError(
            f"cannot make the device file {device} that stands for a GPU ({error.strerror}): allow it to this"
            " container (CAP_MKNOD), or ask for --gpus-per-node 0"
        ) from error
    # Last: where there is a plan, there is all that belongs to it.
    plan.save()
    return plan


def _start(plan: Plan, limit_s: float) -> Sandbox:
    try:
        hosts.add(plan.name, plan.addresses)
    except OSError as error:
        raise UserError(
            f"cannot add the names of the nodes to {hosts.HOSTS} ({error.strerror}), and they must resolve:"
            " make that file writable"
        ) from error
    sandbox = Sandbox(plan)
    sandbox.start(limit_s)
    return sandbox
