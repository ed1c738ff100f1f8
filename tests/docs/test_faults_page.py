"""The tests that the page about faults names."""

from __future__ import annotations

import re

from helpers import REPOSITORY


def test_every_test_named_on_the_page_exists():
    text = (REPOSITORY / "docs" / "faults.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)
    assert len(named) > 20
    missing = [
        f"{file}::{name}"
        for file, name in named
        if f"def {name}(" not in (REPOSITORY / "tests" / "e2e" / file).read_text(encoding="utf-8")
    ]
    assert missing == []
