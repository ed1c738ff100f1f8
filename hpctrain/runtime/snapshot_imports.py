"""Redirect imports from the original code to the copy that the ranks run."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from hpctrain.rundir import CODE_SOURCE_VARIABLE, CODE_VARIABLE

#: Prefix of the modules in which setuptools keeps the locations of editable packages.
_EDITABLE = "__editable___"


def redirect_imports(environ: MutableMapping[str, str]) -> None:
    """Replace `sys.path`, PYTHONPATH and the locations of editable installs with their copies."""
    if (copy := environ.get(CODE_VARIABLE)) is None:
        return
    source = environ[CODE_SOURCE_VARIABLE]
    sys.path[:] = [_copied_path(path, source, copy) for path in sys.path]
    if search := environ.get("PYTHONPATH"):
        environ["PYTHONPATH"] = os.pathsep.join(
            _copied_path(path, source, copy) for path in search.split(os.pathsep)
        )
    for name, module in list(sys.modules.items()):
        mapping = getattr(module, "MAPPING", None)
        if name.startswith(_EDITABLE) and isinstance(mapping, dict):
            mapping.update({package: _copied_path(path, source, copy) for package, path in mapping.items()})


def copied_path(path: str, environ: Mapping[str, str]) -> str:
    """Return the absolute path of the copy of a file or folder, or of the original if it was not copied."""
    path = os.path.abspath(path)
    if (copy := environ.get(CODE_VARIABLE)) is None:
        return path
    return _copied_path(path, environ[CODE_SOURCE_VARIABLE], copy)


def describe_missing_copy(error: BaseException, environ: Mapping[str, str]) -> str:
    """Return the remedy for a module or file that is missing only in the copy of the code, or ""."""
    if CODE_VARIABLE not in environ:
        return ""
    copy, source = environ[CODE_VARIABLE], environ[CODE_SOURCE_VARIABLE]

    def missing_name(path: str) -> str | None:
        name = os.path.relpath(os.path.abspath(path), copy)
        is_missing = os.path.exists(os.path.join(source, name)) and not os.path.exists(path)
        return name if is_missing and name.split(os.sep)[0] != os.pardir else None

    if isinstance(error, FileNotFoundError):
        # Some libraries name the file only in the message.
        match = re.search(rf"{re.escape(copy)}{os.sep}[^\s'\"]+", str(error))
        path = error.filename if isinstance(error.filename, str) else match[0] if match else os.pardir
        if (name := missing_name(path)) is not None:
            folders = [str(folder) for folder in reversed(Path(name).parents)]
            ignored = next(filter(lambda path: not os.path.exists(os.path.join(copy, path)), folders), name)
            return (
                f"git ignores {ignored}, so it is missing from the code snapshot that the ranks use. Submit "
                f"with --no-code-snapshot, or open {name} in the working directory or by its path "
                f"{source}/{name}"
            )
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.replace(".", os.sep)
        modules = (os.path.join(folder, file) for folder in sys.path for file in (f"{package}.py", package))
        if (name := next(filter(None, map(missing_name, modules)), None)) is not None:
            return (
                f"{name} exists, but git ignores it, so it is missing from the code snapshot that the ranks "
                f"use. Add it (git add -f {shlex.quote(name)}), or submit with --no-code-snapshot"
            )
    return ""


def _copied_path(path: str, source: str, copy: str) -> str:
    inside = os.path.relpath(path, source) if os.path.isabs(path) else os.pardir
    # Run folders, and thus copies, are often inside the working tree.
    if inside.split(os.sep)[0] == os.pardir or path == copy or path.startswith(copy + os.sep):
        return path
    copied = os.path.normpath(os.path.join(copy, inside))
    return copied if os.path.exists(copied) else path
