"""A user without privileges who submits runs."""

import os
import pwd
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from helpers import REPOSITORY
from helpers.commands import run_command

_PREFIX = "hpctrain-"


class UnprivilegedUser:
    """A new user of this machine. Use as a context manager, which removes the user."""

    def __init__(self) -> None:
        self.name = f"{_PREFIX}{os.getpid()}"

    def __enter__(self) -> Self:
        for user in pwd.getpwall():  # Remove the users of killed test sessions.
            pid = user.pw_name.removeprefix(_PREFIX)
            if pid != user.pw_name and pid.isdecimal() and not Path(f"/proc/{pid}").exists():
                _remove(user.pw_name)
        self.home = Path(tempfile.mkdtemp(prefix=_PREFIX))
        run_command(["useradd", "--no-create-home", "--home-dir", self.home, self.name])
        try:
            self.uid = pwd.getpwnam(self.name).pw_uid
            shutil.chown(self.home, self.name)
            self.python = self._make_venv()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _remove(self.name)

    def run(self, argv: Sequence[str | Path], env: Mapping[str, str] | None = None, **options: Any) -> Any:
        ids = [f"--reuid={self.name}", f"--regid={self.name}", "--clear-groups"]
        variables = {**(env or {}), "HOME": str(self.home), "USER": self.name, "LOGNAME": self.name}
        # setpriv may execute files that the user may not, env may not.
        return run_command(["setpriv", *ids, "env", *argv], variables, cwd=self.home, **options)

    def call_hpctrain(self, args: Sequence[str], env: Mapping[str, str], **options: Any) -> Any:
        return self.run([self.python, "-m", "hpctrain", *args], env, **options)

    def _make_venv(self) -> Path:
        """Return an interpreter that the user can run, with our packages."""
        # Ours may be in the home of root.
        bases = [Path(sys.base_prefix, "bin/python3"), Path(f"/usr/bin/python3.{sys.version_info.minor}")]
        python = self.home / "venv/bin/python"
        paths = [str(REPOSITORY), *(path for path in sys.path if path.endswith("site-packages"))]
        for base in bases:
            if self.run([base, "-m", "venv", "--without-pip", "venv"], check=False).returncode:
                continue
            (site,) = self.home.glob("venv/lib/*/site-packages")
            (site / "paths.pth").write_text("\n".join(paths))
            if self.run([python, "-c", "import torch, hpctrain"], check=False).returncode == 0:
                return python
        pytest.skip(f"other users can run none of {', '.join(map(str, bases))} with PyTorch")


def _remove(name: str) -> None:
    home = pwd.getpwnam(name).pw_dir
    run_command(["userdel", "--force", name], check=False)
    shutil.rmtree(home, ignore_errors=True)
