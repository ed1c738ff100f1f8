"""Let ClusterShell parse Slurm's node lists with hpctrain, and check that it reads those of hpctrain."""

from __future__ import annotations

import re

from ClusterShell.NodeSet import NodeSetBase, NodeSetParseError, ParsingEngine

from hpctrain.cluster import compress_hostlist, expand_hostlist
from hpctrain.errors import UserError

#: ClusterShell's own grammar: groups, wildcards, operators, steps, and escapes.
_NOT_SLURM = re.compile(r"[@*?!&^/%{}\\:]")
#: Larger sets are slow, name by name.
MANY = 1000
_parse, _print = ParsingEngine.parse_string, NodeSetBase.__str__


def parse_string(self, text, autostep, namespace=None):
    if _NOT_SLURM.search(text):
        return _parse(self, text, autostep, namespace)
    try:
        names = expand_hostlist(text)
    except UserError as error:
        raise NodeSetParseError(text, str(error)) from error
    if len(names) > MANY:
        return _parse(self, text, autostep, namespace)
    result = NodeSetBase()
    for name in names:
        result.update(self.parse_string_single(name, autostep))
    return result


def print_and_compare(self) -> str:
    printed = _print(self)
    if not _NOT_SLURM.search(printed) and len(self) < MANY:
        compact = compress_hostlist(sorted(self))
        assert list(_parse(ParsingEngine(None), compact, None)) == list(self), compact
    return printed


ParsingEngine.parse_string, NodeSetBase.__str__ = parse_string, print_and_compare
