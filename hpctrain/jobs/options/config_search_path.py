"""Locations of configuration files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

#: Name of the project's configuration file.
PROJECT_FILE = "hpctrain.yaml"
#: List of the files in a project that another machine sent, at its root.
SENT_CODE_FILE = ".hpctrain-code.json"
#: Variable that overrides the path of the site's file or folder of files; an empty value disables it.
SITE_VARIABLE = "HPCTRAIN_SITE_CONFIG"
SITE_FOLDER = Path("/etc/hpctrain")


def config_search_path(cwd: Path, environ: Mapping[str, str]) -> list[Path]:
    """Return the files that every submission reads, weakest first: site, user, project."""
    return [*_site_files(environ), *_user_file(environ), *_project_file(cwd)]


def _site_files(environ: Mapping[str, str]) -> list[Path]:
    named = environ.get(SITE_VARIABLE)
    if named == "":
        return []
    place = Path(named) if named else SITE_FOLDER
    if os.path.isdir(place):
        return sorted(place.glob("*.yaml"))
    # A missing file is reported when it is read.
    return [place] if named else []


def _user_file(environ: Mapping[str, str]) -> list[Path]:
    home = environ.get("HOME")
    folder = environ.get("XDG_CONFIG_HOME") or (os.path.join(home, ".config") if home else None)
    path = Path(folder, "hpctrain", "config.yaml") if folder else None
    return [path] if path and os.path.lexists(path) else []


def _project_file(cwd: Path) -> list[Path]:
    """Return the nearest project file from `cwd` up to the root of the repository or of sent code.

    Outside a project, only `cwd` is searched.
    """
    folders, marks = [cwd, *cwd.parents], (".git", SENT_CODE_FILE)
    is_root = (any(os.path.exists(folder / mark) for mark in marks) for folder in folders)
    root = next((i for i, found in enumerate(is_root) if found), 0)
    for folder in folders[: root + 1]:
        # A broken link, or a path that is not a file, is reported when it is read.
        if os.path.lexists(path := folder / PROJECT_FILE):
            return [path]
    return []
