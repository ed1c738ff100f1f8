"""Options in the documentation match those of the commands."""

import re
import runpy
from pathlib import Path

from helpers import REPOSITORY

from hpctrain.jobs.options.config_files import read_config_file


def test_option_tables_are_up_to_date() -> None:
    module = runpy.run_path(str(REPOSITORY / "scripts" / "write_options.py"))
    text = module["PAGE"].read_text(encoding="utf-8")
    for section in ("submit", "the others"):
        assert f"<!-- options of {section} -->" in text
    assert text == module["filled_in"](text), "run .venv/bin/python scripts/write_options.py"


def test_every_config_file_shown_is_valid(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        (tmp_path / "config.yaml").write_text(block)
        assert read_config_file(tmp_path / "config.yaml", {}).plain
