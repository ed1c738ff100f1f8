"""Kernel limits on the length of a rank's arguments."""

from __future__ import annotations

import json

from hpctrain.errors import SpecError
from hpctrain.rundir import ENV_PREFIX
from hpctrain.spec.job_spec import JobSpec

#: Linux accepts 128 KiB per argument, with its terminating NUL (MAX_ARG_STRLEN, execve(2)).
_MAX_WORD_BYTES = 128 * 1024 - 1
#: Bytes that a torchrun agent receives in addition to the arguments.
_PLAN_BYTES = 4096
#: Linux allows 2 MiB for all arguments and variables of a process; this part is reserved for the job's own
#: variables.
_ALL_BYTES = 1024 * 1024


def check_argument_lengths(spec: JobSpec) -> None:
    """Check that ranks can be started with these arguments and variables.

    Raises:
        SpecError: the arguments or variables are too long.
    """
    # The rank receives all arguments as one JSON string; through an agent, that string is nested in another.
    words = json.dumps([spec.entry, *spec.args])
    length, limit = len(words), _MAX_WORD_BYTES
    if spec.torchrun is not None:
        length, limit = len(json.dumps(words)), limit - _PLAN_BYTES
    if length > limit:
        raise SpecError(
            f"The program and its arguments are {length} bytes long as JSON, but at most {limit} bytes "
            "can be passed to a rank. Write the arguments to a file, and pass its path instead."
        )
    longest = _MAX_WORD_BYTES - len(ENV_PREFIX)
    variables = {name: len(f"{name}={value}".encode()) for name, value in spec.env.items()}
    for name, length in variables.items():
        if length > longest:
            raise SpecError(
                f"The variable {name} (--env) is {length} bytes long, but at most {longest} bytes can be "
                "passed to a rank. Write the value to a file, and pass its path instead."
            )
    if (total := sum(variables.values())) > _ALL_BYTES:
        raise SpecError(
            f"The variables (--env) are {total} bytes long in total, but at most {_ALL_BYTES} bytes can be "
            "passed to a rank. Write the values to files, and pass their paths instead."
        )
