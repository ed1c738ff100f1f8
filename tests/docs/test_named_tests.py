"""The tests that pages of the documentation name."""

from __future__ import annotations

import re

import pytest
from helpers import REPOSITORY


@pytest.mark.parametrize("page", ["testing.md", "users-asked.md"])
def test_every_test_named_on_a_page_exists(page):
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]*test_\w+\.py)::(\w+)`", text)
    assert len(named) > 20
    missing = [
        f"{file}::{name}"
        for file, name in named
        if f"\ndef {name}(" not in (REPOSITORY / "tests" / file).read_text(encoding="utf-8")
    ]
    assert missing == []
