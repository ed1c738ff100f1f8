"""Write the site's profile, based on the findings."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.errors import SpecError, UserError
from hpctrain.files import parse_yaml, write_atomic
from hpctrain.jobs.doctor.run_checks import DoctorReport
from hpctrain.jobs.options.option_value import SITE_KEY
from hpctrain.jobs.options.site_profile import write_profile
from hpctrain.slurm.site_facts import NodeGroup, Partition

_GPU_DIRECTIVE = "gpu_request_style"


def profile_options(report: DoctorReport) -> dict[str, Any]:
    """Return the content of a configuration file for the site.

    Raises:
        UserError: this machine has no Slurm site.
    """
    if report.site is None:
        raise UserError(
            "Cannot write a site profile: Slurm is not available on this machine. Run this command on a "
            "login node."
        )
    style = report.gpu_request_style
    options = {} if style in (None, "gres") else {_GPU_DIRECTIVE: style}
    partitions = tuple(map(_merge_by_state, report.site.partitions))
    return {**options, SITE_KEY: write_profile(replace(report.site, partitions=partitions))}


def write_profile_file(report: DoctorReport, path: Path) -> None:
    """Write the profile to `path`, replacing an existing profile.

    Raises:
        UserError: this machine has no Slurm site, or the file contains other data.
        OSError: it cannot be written.
    """
    import yaml

    options = profile_options(report)
    _refuse_other_content(path)
    cluster = report.site.slurm.cluster if report.site and report.site.slurm else "this site"
    head = (
        f"# Profile of {cluster}, written by `hpctrain doctor --write` on {time.strftime('%Y-%m-%d')}.\n"
        "# hpctrain reads it from /etc/hpctrain, or from the folder in HPCTRAIN_SITE_CONFIG. Each "
        "submission\n"
        "# queries Slurm's configuration again. `habits` contains rules that Slurm does not report; edit "
        "them here.\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, head + yaml.safe_dump(options, sort_keys=False))


def _refuse_other_content(path: Path) -> None:
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise SpecError(f"Cannot read {str(path)!r}: {error}. Choose another file.") from error
    keys = set(content) if isinstance(content, Mapping) else {"other content"} if content else set()
    if strangers := keys - {SITE_KEY, _GPU_DIRECTIVE}:
        raise SpecError(
            f"{str(path)!r} contains {min(map(str, strangers))!r}, which is not part of a site profile and "
            "would be lost. Choose another file. hpctrain reads all .yaml files in the folder of the site "
            "profile."
        )


def _merge_by_state(partition: Partition) -> Partition:
    """Return the partition without the states of its nodes, which change often."""
    merged: dict[str, NodeGroup] = {}
    for group in partition.groups:
        kind = replace(group, names="", num=0, state=NodeGroup.state)
        if (same := merged.get(repr(kind))) is not None:
            names, num = f"{same.names},{group.names}", same.num + group.num
        else:
            names, num = group.names, group.num
        merged[repr(kind)] = replace(kind, names=names, num=num)
    return replace(partition, groups=tuple(merged.values()))
