"""Run every command and script in the documentation.

The ```bash and ```python blocks of a page run from top to bottom in one folder that looks like the
repository's root. An HTML comment before a block changes that: `<!-- slurm -->` runs it on the tests' Slurm,
`<!-- not run: why -->` skips it, `<!-- file: train.py -->` only writes it. For ```yaml and ```jinja, these
are the only options.
"""

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from helpers import REPOSITORY as REPO
from helpers.commands import run_command
from helpers.processes import run_processes

PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").rglob("*.md"))]
TIMEOUT_S, LONG_TIMEOUT_S = 110, 400

#: Pages whose blocks train for long; other tests cover what they show.
LONG = {
    f"docs/{name}.md"
    for name in (
        *("algorithms", "checkpoints", "cluster", "index", "loggers", "loop", "notifications", "python"),
        *("report", "restart", "sandbox", "strategies", "sweeps", "telemetry", "templates"),
        *("training", "porting", "data", "exactness", "verify"),
    )
}
#: Pages whose commands have tests of their own.
EXTENDED = {f"docs/{name}.md" for name in ("doctor", "frameworks", "goodput", "recipes", "staging")}

_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>bash|python|yaml|jinja)[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_MARK = re.compile(r"slurm|not run: .+|file: [\w.-]+")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and the comment before it."""

    mark: str
    language: str
    text: str
    line: int

    def as_shell(self) -> str:
        """Return the shell commands that run this block."""
        if self.mark.startswith("not run:"):
            return ""
        if self.mark.startswith("file: "):
            return f"cat > {self.mark.removeprefix('file: ')} <<'END_OF_FILE'\n{self.text}END_OF_FILE\n"
        if self.language in ("yaml", "jinja"):
            return ""
        if self.language == "python":
            return f"python - <<'END_OF_FILE'\n{self.text}END_OF_FILE\n"
        return self.text


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(match["mark"] or "", match["language"], match["text"], text.count("\n", 0, match.start("text")))
        for match in _BLOCK.finditer(text)
    ]


def script_of(page: Path) -> str:
    steps = [
        f"echo '--- {page.name}, line {block.line}'\n{shell}"
        for block in blocks_of(page)
        if (shell := block.as_shell())
    ]
    return "\n".join(steps)


def pages() -> list[object]:
    """Return pages with blocks to run, marked `slurm` if a block needs it, and `long`."""
    params: list[object] = []
    for page in PAGES:
        if script_of(page):
            needs_slurm = any(block.mark == "slurm" for block in blocks_of(page))
            name = str(page.relative_to(REPO))
            marks = [pytest.mark.ranks, *([pytest.mark.slurm] if needs_slurm else [])]
            marks += [pytest.mark.extended] * (name in EXTENDED)
            marks += [pytest.mark.long, pytest.mark.timeout(LONG_TIMEOUT_S + 10)] if name in LONG else []
            params.append(pytest.param(page, id=name, marks=marks))
    return params


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Path]:
    """A folder that looks like the repository's root; processes that a failed page left there are killed."""
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "examples").symlink_to(REPO / "examples")
    yield folder
    for run_dir in folder.glob("runs/*"):
        for process in run_processes(run_dir):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder for PATH with the `hpctrain` and `python` of this test session."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, arguments in {"hpctrain": "-m hpctrain ", "python": ""}.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        script.chmod(0o755)
    return folder


@pytest.mark.parametrize("page", pages())
def test_blocks_run(page: Path, workplace: Path, commands: Path, request: pytest.FixtureRequest) -> None:
    variables = {
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    if request.node.get_closest_marker("slurm"):
        variables |= request.getfixturevalue("slurm").env
    run_command(
        ["bash", "-euo", "pipefail", "-c", script_of(page)],
        variables,
        cwd=workplace,
        timeout=LONG_TIMEOUT_S if request.node.get_closest_marker("long") else TIMEOUT_S,
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_block_marks_are_known(page: Path) -> None:
    unknown = [block.mark for block in blocks_of(page) if block.mark and not _MARK.fullmatch(block.mark)]
    assert not unknown, f"{page.name}: {unknown} are no marks that this test knows"


def test_local_links_exist() -> None:
    """Check README and CONTRIBUTING; mkdocs checks links between its own pages."""
    for page in PAGES[:2]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_every_command_and_option_of_submit_is_documented() -> None:
    from hpctrain.cli.main import cli
    from hpctrain.cli.submit import command

    text = (REPO / "docs" / "commands.md").read_text(encoding="utf-8")
    for name in cli.list_commands(click.Context(cli)):
        assert f"`hpctrain {name}" in text
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert any(f"`{option}" in text for option in parameter.opts), parameter.opts


def test_readme_links_to_every_page():
    text = (REPO / "README.md").read_text()
    pages = [path.relative_to(REPO) for path in (REPO / "docs").glob("*.md")]
    assert [str(page) for page in pages if f"({page})" not in text] == []
