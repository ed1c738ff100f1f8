"""Which environment is this, and who am I in it?"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hpctrain.cluster.environments import local, slurm, torchrun
from hpctrain.cluster.ranks import Ranks
from hpctrain.errors import EnvironmentMismatch

#: Overrides the search: the name of the environment to believe.
ENVIRONMENT_VARIABLE = "HPCTRAIN_ENVIRONMENT"

_DETECTORS: dict[str, Callable[[Mapping[str, str]], Ranks | None]] = {
    "slurm": slurm.detect,
    "torchrun": torchrun.detect,
    "local": local.detect,
}


def detect(environ: Mapping[str, str]) -> Ranks:
    """Ranks of this process, from the variables in `environ` alone.

    `HPCTRAIN_ENVIRONMENT` names an environment and ends the search. Otherwise torchrun's own mark
    (TORCHELASTIC_RUN_ID) wins, since torchrun under srun starts several ranks in one task; then a job
    step of Slurm; then RANK and WORLD_SIZE as any launcher sets them; then a single process.

    Raises:
        EnvironmentMismatch: variables contradict each other, a part is missing, or
            HPCTRAIN_ENVIRONMENT names an environment that is unknown or is not this one.
    """
    wanted = environ.get(ENVIRONMENT_VARIABLE)
    if wanted:
        return _detect_as(wanted, environ)
    order = ["slurm", "torchrun", "local"]
    if "TORCHELASTIC_RUN_ID" in environ:
        order = ["torchrun", "local"]
    return next(ranks for name in order if (ranks := _DETECTORS[name](environ)) is not None)


def _detect_as(name: str, environ: Mapping[str, str]) -> Ranks:
    detector = _DETECTORS.get(name)
    if detector is None:
        raise EnvironmentMismatch(f"{ENVIRONMENT_VARIABLE} is {name!r}; known are {', '.join(_DETECTORS)}.")
    ranks = detector(environ)
    if ranks is None:
        raise EnvironmentMismatch(
            f"{ENVIRONMENT_VARIABLE} is {name!r}, but the variables of that environment are not set here."
        )
    return ranks
