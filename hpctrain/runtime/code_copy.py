"""A rank that runs a copy of the code imports from the copy, too, and not from where the code was copied."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

from hpctrain.rundir import CODE_SOURCE_VARIABLE, CODE_VARIABLE

#: Modules in which setuptools keeps where the packages of an editable installation lie.
_EDITABLE = "__editable___"


def import_from_copy(environ: MutableMapping[str, str]) -> None:
    """Turn every place of this process's imports that was copied into the place of its copy.

    These are `sys.path`, the variable PYTHONPATH for processes that are started from here, and packages that
    are installed as editable.
    """
    if (copy := environ.get(CODE_VARIABLE)) is None:
        return
    source = environ[CODE_SOURCE_VARIABLE]
    sys.path[:] = [_place(path, source, copy) for path in sys.path]
    if search := environ.get("PYTHONPATH"):
        environ["PYTHONPATH"] = os.pathsep.join(
            _place(path, source, copy) for path in search.split(os.pathsep)
        )
    for name, module in list(sys.modules.items()):
        mapping = getattr(module, "MAPPING", None)
        if name.startswith(_EDITABLE) and isinstance(mapping, dict):
            mapping.update({package: _place(path, source, copy) for package, path in mapping.items()})


def _place(path: str, source: str, copy: str) -> str:
    """Where the copy of a folder or file lies; `path` itself where there is none."""
    inside = os.path.relpath(path, source) if os.path.isabs(path) else os.pardir
    # Run folders often lie in the working tree, and so may copies.
    if inside.split(os.sep)[0] == os.pardir or path == copy or path.startswith(copy + os.sep):
        return path
    place = os.path.normpath(os.path.join(copy, inside))
    return place if os.path.exists(place) else path
