"""Read typed values from environment variables, with errors that name the variable."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.cluster.hostlist import expand_hostlist
from hpctrain.errors import EnvironmentMismatch, UserError
from hpctrain.text import join_or

#: Selects an environment by name, instead of detecting it.
ENVIRONMENT_VARIABLE = "HPCTRAIN_ENVIRONMENT"

_LAST_PORT = 65535
#: Rendezvous address of processes on one host.
LOOPBACK = "127.0.0.1"


def first_set(environ: Mapping[str, str], *names: str) -> str | None:
    """Return the first of `names` that is set and not empty, or None."""
    return next((name for name in names if environ.get(name)), None)


def read_int(environ: Mapping[str, str], name: str) -> int:
    text = _read(environ, name)
    try:
        return int(text)
    except ValueError:
        raise EnvironmentMismatch(
            f"{name} is {text!r}, which is not an integer. Correct or unset the variable."
        ) from None


def read_port(environ: Mapping[str, str], name: str) -> int:
    """Return the TCP port in variable `name`; with 0, the kernel chooses a port."""
    port = read_int(environ, name)
    if not 0 <= port <= _LAST_PORT:
        raise EnvironmentMismatch(
            f"{name} is {port}, but a port must be between 1 and {_LAST_PORT}. Set another port, or unset "
            "the variable to let the ranks agree on a port."
        )
    return port


def read_hosts(environ: Mapping[str, str], name: str) -> list[str]:
    """Return the hosts of the node list in variable `name`, in its order."""
    text = _read(environ, name)
    try:
        hosts = expand_hostlist(text)
    except UserError as error:
        raise EnvironmentMismatch(f"{name}: {error}") from None
    if not hosts:
        raise EnvironmentMismatch(
            f"{name} is {text!r}, which contains no host. Correct or unset the variable."
        )
    return hosts


def _read(environ: Mapping[str, str], name: str) -> str:
    if text := environ.get(name):
        return text
    raise EnvironmentMismatch(
        f"{name} is not set, although other variables of the same launcher are set. Start the script with "
        f"srun, torchrun or mpirun, or set {ENVIRONMENT_VARIABLE}=local to run a single process."
    )


def override_hint(*environments: str) -> str:
    """Return the sentence on how to resolve contradictory variables."""
    choices = join_or(f"{ENVIRONMENT_VARIABLE}={name}" for name in environments)
    purpose = "run a single process" if environments == ("local",) else "select the launcher"
    return f"Unset variables left over from another launcher, or set {choices} to {purpose}."


def is_local_address(address: str) -> bool:
    return address == "localhost" or address.startswith(("127.", "::1"))
