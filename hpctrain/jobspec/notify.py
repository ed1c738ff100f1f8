"""Notifications of a run: targets and events."""

from __future__ import annotations

import re
from typing import Literal, get_args
from urllib.parse import urlsplit

from msgspec import Struct

from hpctrain.errors import SpecError
from hpctrain.jobspec.redaction import strip_url_paths

#: Events that can cause a notification.
NotificationKind = Literal["finish", "failure", "stall"]
NOTIFICATION_KINDS: tuple[NotificationKind, ...] = get_args(NotificationKind)
DEFAULT_STALL_S = 900


#: Pattern for URLs with another scheme or without a scheme.
_NO_COMMAND = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S*|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+/\S*")


class NotifyConfig(Struct, frozen=True, forbid_unknown_fields=True):
    targets: tuple[str, ...] = ()
    """URLs that receive a POST, and shell commands to run."""
    on: tuple[NotificationKind, ...] = NOTIFICATION_KINDS
    stall_s: int = DEFAULT_STALL_S
    """Seconds without a logged step that count as a stall."""

    def __post_init__(self) -> None:
        if self.stall_s < 1:
            raise SpecError(f"notify_stall_after is {self.stall_s} s, but must be at least 1 s.")
        for target in filter(is_address, self.targets):
            if fault := _fault(target):
                raise SpecError(f"The URL {strip_url_paths(target)!r} (--notify) cannot be used: {fault}.")
        for target in self.targets:
            if not is_address(target) and _NO_COMMAND.fullmatch(target):
                raise SpecError(
                    f"{target!r} (--notify) is neither a URL (https:// or http://) nor a shell command. "
                    "To run a command with this name, prepend ./ to the name."
                )


def _fault(address: str) -> str | None:
    """Return the reason why a URL cannot receive a POST; None if it is well formed."""
    if not address.isascii() or not address.isprintable() or " " in address:
        return "it contains a character that is not allowed in a URL. Encode the character as %XX"
    try:
        url = urlsplit(address)
        url.port  # noqa: B018 (raises if it is not a number)
    except ValueError:
        return "the host or port is invalid"
    if "@" in url.netloc:
        return "its user name or password would not be sent. Use a command such as `curl` instead"
    return None if url.hostname else "it has no host"


def is_address(target: str) -> bool:
    """True if the target is a URL, not a shell command."""
    return target.startswith(("http://", "https://"))
