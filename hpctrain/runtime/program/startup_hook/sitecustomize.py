"""Observe a Python process of a command from its import of torch on.

`process_observer.py` puts the folder of this file into PYTHONPATH. The environment of such a process may have
another version of Python, and no hpctrain.
"""

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
                return
            observe_process()
        except Exception as error:  # noqa: BLE001 (the process continues without it)
            sys.stderr.write("hpctrain: cannot monitor this process: %r\n" % (error,))  # noqa: UP031


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


sys.meta_path.insert(0, _TorchWatcher())
_run_shadowed()
