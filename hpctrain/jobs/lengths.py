"""How long the words may be that a rank is given: the kernel refuses to start a program with longer ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hpctrain.errors import SpecError

if TYPE_CHECKING:
    from hpctrain.jobs.spec import JobSpec

#: Linux takes 128 KiB in one word, its end included (MAX_ARG_STRLEN, execve(2)).
_LONGEST_WORD_BYTES = 128 * 1024 - 1
#: What an agent of torchrun is told beside the arguments.
_PLAN_BYTES = 4096
#: Linux gives 2 MiB to all words and variables of a process together: what of it the job's own may take.
_ALL_BYTES = 1024 * 1024


def check_lengths(spec: JobSpec) -> None:
    """See to it that ranks can be started with these arguments and variables.

    Raises:
        SpecError: they are too long.
    """
    # All arguments travel to the rank as one word of JSON, and by way of an agent as one inside another.
    words = json.dumps([spec.entry, *spec.args])
    length, limit = len(words), _LONGEST_WORD_BYTES
    if spec.torchrun is not None:
        length, limit = len(json.dumps(words)), limit - _PLAN_BYTES
    if length > limit:
        raise SpecError(
            f"The arguments of the script take {length} bytes with its path, written as JSON, and {limit} "
            "can be handed to a rank. Put them into a file, and give the script its path."
        )
    variables = {name: len(f"{name}={value}".encode()) for name, value in spec.env.items()}
    for name, length in variables.items():
        if length > _LONGEST_WORD_BYTES:
            raise SpecError(
                f"The variable {name} (--env) takes {length} bytes, and {_LONGEST_WORD_BYTES} can be handed "
                "to a rank. Put the value into a file, and give its path."
            )
    if (total := sum(variables.values())) > _ALL_BYTES:
        raise SpecError(
            f"The variables (--env) take {total} bytes together, and {_ALL_BYTES} can be handed to a rank. "
            "Put the values into files, and give their paths."
        )
