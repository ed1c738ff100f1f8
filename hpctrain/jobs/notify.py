"""Whom a run tells what: addresses and commands, and the occasions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from hpctrain.errors import SpecError

#: When somebody is told.
OCCASIONS = ("finish", "failure", "stall")
DEFAULT_STALL_S = 900


#: What is meant for an address and is none: of another scheme, or without one.
_NO_COMMAND = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S*|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+/\S*")


@dataclass(frozen=True)
class Notify:
    """Whom a run tells what."""

    targets: tuple[str, ...] = ()
    """Addresses that get a POST, and lines of shell that are run."""
    on: tuple[str, ...] = OCCASIONS
    stall_s: int = DEFAULT_STALL_S
    """Seconds without a logged step that are a stall."""

    def check(self) -> None:
        """See to it that somebody can be told.

        Raises:
            SpecError: an occasion is unknown, or an address is none.
        """
        for occasion in self.on:
            if occasion not in OCCASIONS:
                raise SpecError(
                    f"{occasion!r} (--notify-on) is no occasion. Take any of {', '.join(OCCASIONS)}."
                )
        if self.stall_s < 1:
            raise SpecError(f"--notify-stall-after is {self.stall_s}, but it takes at least 1.")
        for target in filter(is_address, self.targets):
            try:
                host = urlsplit(target).hostname
            except ValueError:
                host = None
            if not host or any(character.isspace() for character in target):
                raise SpecError(f"{target!r} (--notify) is no address: it names no host.")
        for target in self.targets:
            if not is_address(target) and _NO_COMMAND.fullmatch(target):
                raise SpecError(
                    f"{target!r} (--notify) is neither an address, which begins with https:// or http://, "
                    "nor a line of shell. A command of that name is called with ./ before it."
                )


def is_address(target: str) -> bool:
    """Whether something is sent there; a line of shell is run."""
    return target.startswith(("http://", "https://"))
