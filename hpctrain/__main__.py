"""Entry point of `python -m hpctrain`, the same command as `hpctrain`."""

from __future__ import annotations

from hpctrain.cli.main import main

if __name__ == "__main__":
    main()
