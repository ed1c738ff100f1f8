"""Observe a Python process of a command from its import of torch on.

`process_observer.py` puts the folder of this file into PYTHONPATH. The environment of such a process may have
another version of Python, and no hpctrain.
"""

import json
import os
import sys
from importlib import import_module


class _TorchWatcher:
    """Detects the import of torch, and lets the next finder find it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002
        if name != "torch":
            return
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
        try:
            try:
                from hpctrain.runtime.program.process_observer import observe_process
            except ImportError:  # an environment without hpctrain, or with another version
                if not _find_supervisor():
                    return
                from hpctrain.runtime.program.process_observer import observe_process
            observe_process()
        except Exception as error:  # noqa: BLE001 (the process continues without it)
            sys.stderr.write("hpctrain: cannot monitor this process: %r\n" % (error,))  # noqa: UP031


def _leave_run() -> None:
    """Remove the variables that a job of a batch script inherits, which is another job than the script's."""
    command = json.loads(os.environ.get("HPCTRAIN_COMMAND", "{}"))
    if "job" in command and command["job"] != os.environ.get("SLURM_JOB_ID"):
        for name in command["variables"]:
            os.environ.pop(name, None)


def _find_supervisor() -> bool:
    """Import hpctrain from the environment of a batch script's supervisor; return true if possible."""
    folders = json.loads(os.environ.get("HPCTRAIN_COMMAND", "{}")).get("packages", [])
    sys.path.extend(folders)
    try:
        import_module("hpctrain.runtime.program.process_observer")
    except Exception as error:  # noqa: BLE001 (for another version of Python)
        if folders and os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0":
            _report_version(error)
        return False
    finally:
        sys.path[:] = [path for path in sys.path if path not in folders]
    return True


def _report_version(error: Exception) -> None:
    """Report once that this process and those that it starts are not observed."""
    command = json.loads(os.environ["HPCTRAIN_COMMAND"])
    version = ".".join(map(str, sys.version_info[:3]))
    problem = "%s has Python %s, and the supervisor has Python %s (%r). Use the same version for both"
    problem %= sys.executable, version, command.get("python"), error
    sys.stderr.write("hpctrain: cannot monitor this process: %s.\n" % problem)  # noqa: UP031
    os.environ["HPCTRAIN_COMMAND"] = json.dumps(dict(command, packages=[]))


def _run_shadowed() -> None:
    """Run the `sitecustomize` of the environment, which this file shadows."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]
    own = sys.modules.pop(__name__)
    try:
        import_module(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = own


_leave_run()
sys.meta_path.insert(0, _TorchWatcher())
_run_shadowed()
