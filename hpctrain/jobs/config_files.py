"""Where files of options lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

#: The file of a project.
PROJECT_FILE = "hpctrain.yaml"
#: Names another file, or folder of files, for what the site sets; empty for none.
SITE_VARIABLE = "HPCTRAIN_SITE_CONFIG"
SITE_FOLDER = Path("/etc/hpctrain")


def standing_files(cwd: Path, environ: Mapping[str, str]) -> list[Path]:
    """The files that every submission reads, the weakest first: the site's, the user's, the project's."""
    return [*_site_files(environ), *_user_file(environ), *_project_file(cwd)]


def _site_files(environ: Mapping[str, str]) -> list[Path]:
    named = environ.get(SITE_VARIABLE)
    if named == "":
        return []
    place = Path(named) if named else SITE_FOLDER
    if os.path.isdir(place):
        return sorted(place.glob("*.yaml"))
    # One that was named by hand and is not there has to be told of, when it is read.
    return [place] if named else []


def _user_file(environ: Mapping[str, str]) -> list[Path]:
    home = environ.get("HOME")
    folder = environ.get("XDG_CONFIG_HOME") or (os.path.join(home, ".config") if home else None)
    path = Path(folder, "hpctrain", "config.yaml") if folder else None
    return [path] if path and os.path.lexists(path) else []


def _project_file(cwd: Path) -> list[Path]:
    """The nearest one from `cwd` up to the root of the repository; outside of one, only `cwd` counts."""
    folders = [cwd, *cwd.parents]
    root = next((i for i, folder in enumerate(folders) if os.path.exists(folder / ".git")), 0)
    for folder in folders[: root + 1]:
        # One that is no file, or leads nowhere, has to be told of, when it is read.
        if os.path.lexists(path := folder / PROJECT_FILE):
            return [path]
    return []
