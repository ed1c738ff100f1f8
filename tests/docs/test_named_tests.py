"""The tests that pages of the documentation name."""

import re

import pytest
from helpers import REPOSITORY


@pytest.mark.parametrize(
    ("page", "folder"), [("exactness.md", "tests"), ("articles.md", "tests"), ("faults.md", "tests/e2e")]
)
def test_every_test_named_on_a_page_exists(page, folder):
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]*test_\w+\.py)::(\w+)`", text)
    assert len(named) > 15
    missing = [
        f"{file}::{name}"
        for file, name in named
        if f"\ndef {name}(" not in (REPOSITORY / folder / file).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_cells_of_the_exactness_table_refer_to_tests():
    text = (REPOSITORY / "docs" / "exactness.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*) \| (.*) \| (.*) \| (.*) \| (.*) \|$", text, re.MULTILINE)[1:]
    guaranteed = [cell for _, *cells in rows for cell in cells if not re.match("other|not guaranteed$", cell)]
    letters = [re.search(r"\(([a-z](?:, [a-z])*)\)$", cell)[1].split(", ") for cell in guaranteed]
    assert len(letters) > 30
    listed = re.findall(r"^\| ([a-z]) \|", text, re.MULTILINE)
    assert {letter for each in letters for letter in each} == set(listed)
