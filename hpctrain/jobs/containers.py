"""From the options of a submission to the container of its ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs.container import Container, ContainerRuntime, is_image_file, runtime_of_image, split_listed
from hpctrain.jobs.options import SubmitOptions
from hpctrain.jobs.slurm_command import run_slurm
from hpctrain.jobs.spec import BackendName

#: Programs that start a container of apptainer's kind.
PROGRAMS = ("apptainer", "singularity")


def build_container(
    given: SubmitOptions,
    *,
    backend: BackendName,
    known: tuple[str, ...] | None,
    cwd: Path,
    environ: Mapping[str, str],
) -> Container | None:
    """The container that is asked for; None where none is.

    Args:
        given: options of the submission.
        backend: where the job will run.
        known: ways to run a container that the site's profile lists; None where it does not say.
        cwd: the folder from which relative paths are meant.
        environ: variables of the submission.

    Raises:
        SpecError: it is not known which runtime to take, or the backend does not have it.
    """
    image = given.get("container_image")
    if image is None:
        return None
    image = os.fspath(image)
    if is_image_file(image):
        image = os.path.normpath(cwd / image)
    asked = given.get("container_runtime", "auto")
    runtime = _find(image, backend, known, environ) if asked == "auto" else asked
    if runtime == "pyxis" and backend == "local":
        raise SpecError(
            "Pyxis is a part of Slurm, but the run goes to this machine itself (--backend local). "
            "Take --container-runtime apptainer, or leave out --container-image."
        )
    return Container(
        image=image,
        runtime=runtime,
        mounts=tuple(_absolute(mount, cwd) for mount in split_listed(given.get("container_mounts", []))),
        env=split_listed(given.get("container_env", [])),
        python=given.get("container_python", Container.python),
    )


def _absolute(mount: str, cwd: Path) -> str:
    source, colon, rest = mount.partition(":")
    path = os.path.normpath(cwd / source)
    return f"{path}:{rest if colon else path}"


def _find(
    image: str, backend: BackendName, known: tuple[str, ...] | None, environ: Mapping[str, str]
) -> ContainerRuntime:
    if (only := runtime_of_image(image)) is not None:
        return only
    if backend == "local":
        return "apptainer"
    if known is None:
        known = tuple(program for program in PROGRAMS if shutil.which(program, path=environ.get("PATH")))
        known += ("pyxis",) if has_pyxis(environ) else ()
    if "pyxis" in known:
        return "pyxis"
    if any(program in known for program in PROGRAMS):
        return "apptainer"
    raise SpecError(
        "No way to run a container was found here: srun does not know --container-image (pyxis), and neither "
        "apptainer nor singularity is on the PATH. Where the nodes have one, say which: --container-runtime."
    )


def has_pyxis(environ: Mapping[str, str]) -> bool:
    """Whether this machine's srun can start containers."""
    try:
        return "--container-image" in run_slurm(["srun", "--help"], environ, timeout_s=10.0)
    except SchedulerError:
        return False
