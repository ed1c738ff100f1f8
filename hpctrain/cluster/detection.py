"""Detect the launcher of this process, and its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hpctrain.cluster.env_variables import (
    ENVIRONMENT_VARIABLE,
    LOOPBACK,
    is_local_address,
    override_hint,
    read_int,
)
from hpctrain.cluster.launchers import LAUNCHERS, started_by_orted
from hpctrain.cluster.ranks import Ranks
from hpctrain.cluster.slurm_ranks import detect_slurm
from hpctrain.cluster.torchrun import REQUIRED_VARIABLES, RUN_ID_VARIABLE, detect_torchrun, is_standalone
from hpctrain.errors import EnvironmentMismatch
from hpctrain.text import suggest


def detect_local(environ: Mapping[str, str]) -> Ranks:
    """Return rank 0 of 1: on a laptop or login node, in a notebook or batch script."""
    if environ.get("SLURM_JOB_ID"):
        source = f"single process: inside Slurm job {environ['SLURM_JOB_ID']}, but not started by srun"
    else:
        source = "single process: no launcher has set its environment variables"
    fields = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes", "master_addr")
    sources = {**dict.fromkeys(fields, source), "master_port": "not needed by a single process"}
    return Ranks(0, 1, 0, 1, 0, 1, LOOPBACK, 0, "local", sources=sources)


#: Ordered from inner to outer: a launcher precedes the launchers that may start it.
_DETECTORS: dict[str, Callable[[Mapping[str, str]], Ranks | None]] = {
    "torchrun": detect_torchrun,
    **{launcher.name: launcher.detect for launcher in LAUNCHERS},
    "slurm": detect_slurm,
    "local": detect_local,
}

#: Generic rank variables, which any program may have set, and the fields that they must equal.
_GENERIC_VARIABLES = {
    "RANK": "rank",
    "WORLD_SIZE": "world_size",
    "LOCAL_RANK": "local_rank",
    "LOCAL_WORLD_SIZE": "local_world_size",
    "NODE_RANK": "node_rank",
    "GROUP_RANK": "node_rank",
    "GROUP_WORLD_SIZE": "num_nodes",
}
#: Set by `srun --mpi=pmi2` for a task. Under another launcher, they belong to the outer launcher.
_PMI_VARIABLES = {"PMI_RANK": "rank", "PMI_SIZE": "world_size"}
#: Rank variables of launchers without a detector: PMIx, flux, PALS, ALPS, jsrun, MVAPICH.
_UNSUPPORTED_RANK_VARIABLES = (
    *("PMIX_RANK", "FLUX_TASK_RANK", "PALS_RANKID", "ALPS_APP_PE", "JSM_NAMESPACE_RANK"),
    "MV2_COMM_WORLD_RANK",
)


def detect(environ: Mapping[str, str]) -> Ranks:
    """Return the ranks of this process, based only on the variables in `environ`.

    `HPCTRAIN_ENVIRONMENT` selects an environment without detection. Otherwise, the innermost launcher is
    used, because the variables of outer launchers remain set: torchrun, one of `LAUNCHERS`, an srun step, any
    program that sets RANK and WORLD_SIZE, or none, for a single process.

    RANK, WORLD_SIZE and similar variables must not contradict the result. A single-host launcher inside a job
    step with several tasks is rejected: either each task would train alone, or the variables belong to an
    outer job. MASTER_ADDR and MASTER_PORT are used unchanged.

    Raises:
        EnvironmentMismatch: variables contradict each other, some are missing, or HPCTRAIN_ENVIRONMENT
            selects an unknown or different environment.
    """
    if name := environ.get(ENVIRONMENT_VARIABLE):
        return _detect_as(name, environ)
    order = list(_DETECTORS)
    if not environ.get(RUN_ID_VARIABLE):
        order.remove("torchrun")
        order.insert(order.index("local"), "torchrun")
    ranks = next(filter(None, (_DETECTORS[name](environ) for name in order)))
    _check_port(ranks)
    if ranks.environment != "torchrun":
        _check_generic_variables(ranks, environ)
    _check_outer(ranks, order[order.index(ranks.environment) + 1 :], environ)
    return ranks


def _detect_as(name: str, environ: Mapping[str, str]) -> Ranks:
    detector = _DETECTORS.get(name)
    if detector is None:
        hint = suggest(name.lower(), _DETECTORS)
        raise EnvironmentMismatch(f"{ENVIRONMENT_VARIABLE} is {name!r}, an unknown environment. {hint}")
    ranks = detector(environ)
    if ranks is None:
        raise EnvironmentMismatch(
            f"{ENVIRONMENT_VARIABLE} is {name!r}, but the variables that identify this launcher are not set. "
            f"Start this process with that launcher, or unset {ENVIRONMENT_VARIABLE}."
        )
    _check_port(ranks)
    return ranks


def _check_port(ranks: Ranks) -> None:
    if ranks.world_size > 1 and ranks.master_port == 0:
        raise EnvironmentMismatch(
            f"The master port is 0 ({ranks.sources['master_port']}) and the world size is {ranks.world_size} "
            f"({ranks.sources['world_size']}). The kernel would choose a port that the other ranks cannot "
            "determine. Set another port, or unset the variable to let the ranks agree on a port."
        )


def _check_generic_variables(ranks: Ranks, environ: Mapping[str, str]) -> None:
    variables = _GENERIC_VARIABLES
    if ranks.environment in {"slurm", "local"}:
        variables = {**variables, **_PMI_VARIABLES}
    if ranks.environment == "local":
        detected = {launcher.rank for launcher in LAUNCHERS}
        unsupported = (name for name in _UNSUPPORTED_RANK_VARIABLES if name not in detected)
        variables = {**variables, **dict.fromkeys(unsupported, "rank")}
    for variable, field in variables.items():
        value = getattr(ranks, field)
        if environ.get(variable) and read_int(environ, variable) != value:
            alternatives = ["torchrun"] if "RANK" in environ and "WORLD_SIZE" in environ else []
            hint = override_hint(ranks.environment, *alternatives)
            if ranks.environment == "local" and variable not in _GENERIC_VARIABLES:
                hint = (
                    "An unknown launcher appears to have started this process. Configure the launcher to set "
                    f"{', '.join(REQUIRED_VARIABLES)} and NODE_RANK, as torchrun does, or set "
                    f"{ENVIRONMENT_VARIABLE}=local to run a single process."
                )
            raise EnvironmentMismatch(
                f"{variable} is {environ[variable]}, but the {field.replace('_', ' ')} is {value} "
                f"({ranks.sources[field]}). {hint}"
            )


def _check_outer(ranks: Ranks, outer_names: list[str], environ: Mapping[str, str]) -> None:
    """Reject a single-host launcher that runs in each of several tasks of another launcher."""
    if ranks.num_nodes > 1 or ranks.environment == "local":
        return
    # An elastic run may have shrunk to one node, so the number of nodes is not conclusive.
    standalone = ranks.environment == "torchrun" and is_standalone(environ)
    if not (standalone or is_local_address(ranks.master_addr)):
        return
    if ranks.environment == "openmpi" and started_by_orted(environ):
        return
    for name in outer_names:
        try:
            outer = _DETECTORS[name](environ)
        except EnvironmentMismatch:
            continue  # Invalid variables of another launcher do not matter here.
        if outer is None or outer.world_size == 1:
            continue
        # torchrun assigns its own ranks, even if they are equal to those of the outer launcher.
        is_equal = (outer.rank, outer.world_size) == (ranks.rank, ranks.world_size)
        if not is_equal or environ.get(RUN_ID_VARIABLE):
            raise EnvironmentMismatch(
                f"{ranks.environment} started rank {ranks.rank} of {ranks.world_size} "
                f"({ranks.sources['rank']}, {ranks.sources['world_size']}) with all ranks on this host, but "
                f"runs inside process {outer.rank} of {outer.world_size} started by {outer.environment} "
                f"({outer.sources['rank']}, {outer.sources['world_size']}). Start {ranks.environment} so "
                f"that its ranks cover all hosts. {override_hint(ranks.environment, outer.environment)}"
            )
