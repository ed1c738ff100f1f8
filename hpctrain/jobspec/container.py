"""Containers for the ranks, and the notation of the two container runtimes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import Struct

from hpctrain.errors import SpecError

ContainerRuntime = Literal["pyxis", "apptainer"]

#: Program names, newest first.
APPTAINER_PROGRAMS = ("apptainer", "singularity")

#: Suffixes of image files, each with the only supported runtime.
_FILES: dict[str, ContainerRuntime | None] = {
    ".sif": "apptainer",
    **dict.fromkeys((".sqsh", ".squashfs", ".img")),
}
#: Image sources supported only by apptainer.
_APPTAINER_SOURCES = ("library://", "oras://", "shub://")
_DOCKER = "docker://"
DEFAULT_PYTHON = "python3"
_MOUNT = re.compile("([^:]+):([^:]+)(?::(?:ro|rw)?)?", re.DOTALL)
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class Container(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A container for the ranks. Supervisor and batch script run outside, where Slurm's commands are."""

    image: str
    """Absolute path of an image file, or an image URL."""
    runtime: ContainerRuntime
    mounts: tuple[str, ...] = ()
    """Bind mounts, as SRC:DST[:ro]."""
    env: tuple[str, ...] = ()
    """Variables of the job that override those of the image."""
    python: str = DEFAULT_PYTHON
    """The Python interpreter in the container."""

    def check(self, folders: Mapping[str, str]) -> None:
        required = required_runtime(self.image)
        if required is not None and required != self.runtime:
            raise SpecError(
                f"The image {self.image!r} (--container-image) requires {required}, but the runtime is "
                f"{self.runtime} (container_runtime). Use another image, or container_runtime {required}."
            )
        for mount in self.mounts:
            if (match := _MOUNT.fullmatch(mount)) is None:
                raise SpecError(f"{mount!r} (--container-mounts) is not of the form SRC:DST or SRC:DST:ro.")
            if relative := [path for path in match.groups() if not os.path.isabs(path)]:
                raise SpecError(
                    f"The path {relative[0]!r} in {mount!r} (--container-mounts) is relative. Use an "
                    "absolute path."
                )
        for name in self.env:
            if not VARIABLE_NAME.fullmatch(name):
                raise SpecError(
                    f"{name!r} (container_env) is not a valid name of an environment variable. Use "
                    "letters, digits and _, and do not start with a digit."
                )
        for description, path in folders.items():
            if match := re.search("[:,]", path):
                raise SpecError(
                    f"The {description} {path!r} contains {match[0]!r}, so it cannot be mounted in a "
                    "container. Rename it."
                )

    @property
    def image_name(self) -> str:
        """The image in the runtime's notation: REGISTRY#IMAGE for enroot, a URL for apptainer."""
        if is_image_file(self.image):
            return self.image
        if self.runtime == "apptainer":
            return self.image if "://" in self.image else _DOCKER + self.image.replace("#", "/", 1)
        name = self.image.removeprefix(_DOCKER)
        registry, slash, path = name.partition("/")
        is_registry = (
            slash and "#" not in name and ("." in registry or ":" in registry or registry == "localhost")
        )
        return f"{registry}#{path}" if is_registry else name


def is_image_file(value: str) -> bool:
    """True if a value of `container_image` is a path, not an image URL."""
    return "://" not in value and (value.startswith((".", "/", "~")) or value.endswith(tuple(_FILES)))


def required_runtime(image: str) -> ContainerRuntime | None:
    """Return the only runtime that can read the image; None if both can."""
    if image.startswith(_APPTAINER_SOURCES):
        return "apptainer"
    return next((runtime for suffix, runtime in _FILES.items() if image.endswith(suffix)), None)


def split_list_values(values: Iterable[str]) -> tuple[str, ...]:
    """Split comma-separated values into one flat list."""
    return tuple(item for value in values for item in value.split(",") if item)
