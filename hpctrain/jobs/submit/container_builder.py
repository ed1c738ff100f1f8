"""Container for the ranks of a job, based on the options of the submission."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs.options.table import SubmitOptions
from hpctrain.jobspec.container import (
    APPTAINER_PROGRAMS,
    Container,
    ContainerRuntime,
    is_image_file,
    required_runtime,
    split_list_values,
)
from hpctrain.jobspec.job_spec import BackendName
from hpctrain.slurm.command import run_slurm


def build_container(
    options: SubmitOptions,
    *,
    backend: BackendName,
    runtimes: tuple[str, ...] | None,
    cwd: Path,
    environ: Mapping[str, str],
) -> Container | None:
    """Return the requested container; None if none was requested.

    `runtimes` are the runtimes in the site's profile; None if it does not list any.
    """
    image = options.get("container_image")
    if image is None:
        return None
    image = os.fspath(image)
    if is_image_file(image):
        image = os.path.normpath(cwd / image)
    runtime = options.get("container_runtime", "auto")
    if runtime == "auto":
        runtime = _choose_runtime(image, backend, runtimes, environ)
    if runtime == "pyxis" and backend == "local":
        raise SpecError(
            "pyxis is a Slurm plugin, so it cannot be used with --backend local. Use container_runtime "
            "apptainer, or remove --container-image."
        )
    mounts = []
    for mount in split_list_values(options.get("container_mounts", [])):
        source, colon, target = mount.partition(":")
        path = os.path.normpath(cwd / source)
        mounts.append(f"{path}:{target if colon else path}")
    return Container(
        image=image,
        runtime=runtime,
        mounts=tuple(mounts),
        env=split_list_values(options.get("container_env", [])),
        python=options.get("container_python", Container.python),
    )


def _choose_runtime(
    image: str, backend: BackendName, runtimes: tuple[str, ...] | None, environ: Mapping[str, str]
) -> ContainerRuntime:
    if (required := required_runtime(image)) is not None:
        return required
    if backend == "local":
        return "apptainer"
    if runtimes is None:
        programs = APPTAINER_PROGRAMS
        runtimes = tuple(name for name in programs if shutil.which(name, path=environ.get("PATH")))
        runtimes += ("pyxis",) if has_pyxis(environ) else ()
    if "pyxis" in runtimes:
        return "pyxis"
    if set(runtimes).intersection(APPTAINER_PROGRAMS):
        return "apptainer"
    raise SpecError(
        "No container runtime found on this machine: srun does not support --container-image (pyxis), and "
        "neither apptainer nor singularity is on PATH. If the nodes have a runtime, select it with "
        "container_runtime."
    )


def has_pyxis(environ: Mapping[str, str]) -> bool:
    """Return true if srun on this machine can start containers."""
    try:
        return "--container-image" in run_slurm(["srun", "--help"], environ, timeout_s=10.0)
    except SchedulerError:
        return False
