"""Ways to run a container that this machine has."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from hpctrain.jobs.containers import has_pyxis
from hpctrain.jobs.doctor.finding import Finding
from hpctrain.jobs.doctor.program import LookFailed, output

_TOPIC = "Containers"
_LIMIT_S = 10.0

#: Programs, and how each tells its version.
_PROGRAMS = {"apptainer": "--version", "singularity": "--version", "enroot": "version"}


def look_at_containers(environ: Mapping[str, str]) -> tuple[list[Finding], tuple[str, ...]]:
    """What there is to say about containers, and the names of the ways that were found."""
    found: dict[str, str] = {}
    if has_pyxis(environ):
        found["pyxis"] = "srun knows --container-image"
    for program, question in _PROGRAMS.items():
        path = shutil.which(program, path=environ.get("PATH"))
        if path is None:
            continue
        try:
            answer = output([path, question], environ, _LIMIT_S).strip().splitlines()
            found[program] = answer[0] if answer else path
        except LookFailed as error:
            found[program] = f"{path}, but it does not tell its version: {error}"
    findings = [Finding(_TOPIC, name, words) for name, words in found.items()]
    if not findings:
        findings = [
            Finding(_TOPIC, "none", "neither pyxis nor apptainer, singularity or enroot is on this machine")
        ]
    if "enroot" in found and "pyxis" not in found:
        findings.append(
            Finding(
                _TOPIC,
                "pyxis",
                "srun does not know --container-image",
                "note",
                "enroot alone does not start ranks: have pyxis set up, or use apptainer.",
            )
        )
    return findings, tuple(found)
