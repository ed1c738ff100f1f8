"""Container runtimes of this machine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from hpctrain.jobs.doctor.finding import Finding
from hpctrain.jobs.doctor.probe_command import ProbeFailed, command_output
from hpctrain.jobs.submit.container_builder import has_pyxis

_TOPIC = "Containers"
_LIMIT_S = 10.0

#: Programs, each with the argument that prints the version.
_PROGRAMS = {"apptainer": "--version", "singularity": "--version", "enroot": "version"}


def check_containers(environ: Mapping[str, str]) -> tuple[list[Finding], tuple[str, ...]]:
    """Return findings on containers, and the names of the available runtimes."""
    found: dict[str, str] = {}
    if has_pyxis(environ):
        found["pyxis"] = "srun supports --container-image"
    for program, question in _PROGRAMS.items():
        path = shutil.which(program, path=environ.get("PATH"))
        if path is None:
            continue
        try:
            answer = command_output([path, question], environ, _LIMIT_S).strip().splitlines()
            found[program] = answer[0] if answer else path
        except ProbeFailed as error:
            found[program] = f"{path}, version unknown: {error}"
    findings = [Finding(_TOPIC, name, words) for name, words in found.items()]
    if not findings:
        findings = [
            Finding(_TOPIC, "none", "pyxis, apptainer, singularity and enroot were not found on this machine")
        ]
    if "enroot" in found and "pyxis" not in found:
        findings.append(
            Finding(
                _TOPIC,
                "pyxis",
                "srun does not support --container-image",
                "note",
                "enroot alone cannot start ranks. Ask the administrator to install pyxis, or use apptainer.",
            )
        )
    return findings, tuple(found)
