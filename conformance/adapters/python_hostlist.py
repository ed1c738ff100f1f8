"""Let python-hostlist's tests call hpctrain's functions, with its sorting, order and errors."""

from __future__ import annotations

import hostlist

from hpctrain.cluster import compress_hostlist, expand_hostlist
from hpctrain.errors import UserError


def expand(text: str, allow_duplicates: bool = False, sort: bool = False) -> list[str]:
    try:
        names = expand_hostlist(text)
    except UserError as error:
        raise hostlist.BadHostlist(str(error)) from error
    if not allow_duplicates:
        names = list(dict.fromkeys(names))
    return hostlist.numerically_sorted(names) if sort else names


def collect(names) -> str:
    unique = dict.fromkeys(filter(None, names))
    try:
        return compress_hostlist(hostlist.numerically_sorted(unique))
    except UserError as error:
        raise hostlist.BadHostlist(str(error)) from error


hostlist.expand_hostlist, hostlist.collect_hostlist = expand, collect
