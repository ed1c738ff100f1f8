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
    if isinstance(error, FileNotFoundError):
        return _describe_missing_file(error, copy, source)
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    package = os.path.join(*error.name.split("."))
    for folder in sys.path:
        if folder != copy and not folder.startswith(copy + os.sep):
            continue
        for module in (f"{package}.py", package):
            name = os.path.normpath(os.path.join(os.path.relpath(folder, copy), module))
            if os.path.exists(os.path.join(source, name)) and not os.path.exists(os.path.join(copy, name)):
                return (
                    f"{name} exists, but git ignores it, so it is missing from the code snapshot that "
                    f"the ranks use. Add it (git add -f {shlex.quote(name)}), or submit with "
                    "--no-code-snapshot"
                )
    return ""


def _describe_missing_file(error: FileNotFoundError, copy: str, source: str) -> str:
    """Return the remedy for a file next to the script; some libraries name it only in the message."""
    match = re.search(rf"{re.escape(copy)}{os.sep}[^\s'\"]+", str(error))
    path = error.filename if isinstance(error.filename, str) else match[0] if match else ""
    name = os.path.relpath(os.path.abspath(path), copy) if path else os.pardir
    if name.split(os.sep)[0] == os.pardir or not os.path.exists(os.path.join(source, name)):
        return ""
    folders = [str(folder) for folder in reversed(Path(name).parents)]
    ignored = next((path for path in folders if not os.path.exists(os.path.join(copy, path))), name)
    return (
        f"git ignores {ignored}, so it is missing from the code snapshot that the ranks use. Submit with "
        f"--no-code-snapshot, or open {name} in the working directory or by its path {source}/{name}"
    )


def _copied_path(path: str, source: str, copy: str) -> str:
    inside = os.path.relpath(path, source) if os.path.isabs(path) else os.pardir
    # Run folders, and thus copies, are often inside the working tree.
    if inside.split(os.sep)[0] == os.pardir or path == copy or path.startswith(copy + os.sep):
        return path
    copied = os.path.normpath(os.path.join(copy, inside))
    return copied if os.path.exists(copied) else path
