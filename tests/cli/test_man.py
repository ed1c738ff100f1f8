"""Manual pages: groff renders all of them without a warning."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from click.testing import CliRunner

from hpctrain.cli.common import walk_commands
from hpctrain.cli.main import cli


@pytest.mark.slow
def test_pages_of_all_commands_are_rendered_without_a_warning(tmp_path):
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    result = CliRunner().invoke(cli, ["man", "--output", str(tmp_path / "man1")])
    assert result.exit_code == 0, result.output
    pages = sorted((tmp_path / "man1").iterdir())
    commands = [name.replace(" ", "-") for name, _ in walk_commands(cli)]
    assert [page.name for page in pages] == sorted(
        ["hpctrain.1", *(f"hpctrain-{name}.1" for name in commands)]
    )
    argv = ["groff", "-man", "-ww", "-k", "-Tutf8", "-P-cbou", *map(str, pages)]
    shown = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert shown.stderr == ""
    text = " ".join(shown.stdout.split())
    for part in (
        "--stop-before-limit SECONDS",
        "HPCTRAIN-SWEEP-STATUS(1)",
        "hpctrain submit [OPTIONS] -m",
        "hpctrain-chaos(1)",
    ):
        assert part in text


def test_one_page_is_printed_and_an_unknown_command_is_refused():
    result = CliRunner().invoke(cli, ["man", "sweep", "status"])
    assert result.stdout.startswith('.TH "HPCTRAIN\\-SWEEP\\-STATUS" 1')
    refused = CliRunner().invoke(cli, ["man", "sumbit"])
    assert refused.exit_code == 2
    assert "no command 'hpctrain sumbit'" in refused.stderr


def test_example_lines_keep_their_line_breaks():
    for name, context in walk_commands(cli):
        assert "\\b" not in context.get_help(), name
