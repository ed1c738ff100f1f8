"""Write the diffs of `examples/porting/` into docs/porting.md."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "porting.md"
SCRIPTS = REPOSITORY / "examples" / "porting"

_DIFF = re.compile(r"(<!-- diff: (?P<name>\w+) -->\n```diff\n).*?(^```$)", re.MULTILINE | re.DOTALL)


def make_diff(name: str) -> str:
    """Return the unified diff to `NAME_after.py`, without docstrings.

    It starts at the `before` script of the first word of the name.
    """
    before, after = (
        (SCRIPTS / script).read_text().splitlines(keepends=True)[2:]
        for script in (f"{name.split('_')[0]}_before.py", f"{name}_after.py")
    )
    lines = list(difflib.unified_diff(before, after, n=2))
    return "".join(line for line in lines[2:] if not line.startswith("@@"))


def update_page(text: str) -> str:
    """Return the page with the current diffs."""
    return _DIFF.sub(lambda found: f"{found[1]}{make_diff(found['name'])}{found[3]}", text)


if __name__ == "__main__":
    PAGE.write_text(update_page(PAGE.read_text()))
