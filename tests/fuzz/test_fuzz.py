"""Fuzzing of all parsers, and the completeness of their tables."""

import ast
import re
from pathlib import Path

import cluster_parsers
import pytest
import record_parsers
import slurm_parsers
import spec_parsers
import text_parsers
import yaml
from fuzzing import LONG_S, Parser, check_errors, check_long, check_time

import hpctrain

PACKAGE = Path(hpctrain.__file__).parent
MODULES = (cluster_parsers, record_parsers, slurm_parsers, spec_parsers, text_parsers)
PARSERS: list[Parser] = [parser for module in MODULES for parser in module.PARSERS]

PARSER_NAME = re.compile(r"_?(parse|read|from|decode|expand|detect)(_\w+)?|load_spec")
#: Functions with such a name that need no entry in a table, by reason.
EXEMPT = yaml.safe_load(Path(__file__).with_name("exempt.yaml").read_text())


def find_functions() -> set[str]:
    """Return the functions of the package whose name suggests a parser."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for scope, body in ((module, tree.body), *((f"{module}.{node.name}", node.body) for node in classes)):
            names |= {
                f"{scope}.{node.name}".removeprefix("hpctrain.")
                for node in body
                if isinstance(node, ast.FunctionDef) and PARSER_NAME.fullmatch(node.name)
            }
    return names


@pytest.mark.slow
@pytest.mark.parametrize("parser", PARSERS, ids=str)
def test_parser_raises_only_documented_errors(parser):
    check_errors(parser)


@pytest.mark.slow
@pytest.mark.parametrize("parser", PARSERS, ids=str)
def test_parser_takes_linear_time(parser):
    check_time(parser)


def test_every_parser_is_fuzzed_or_exempt():
    fuzzed = {str(parser) for parser in PARSERS}
    assert find_functions() - fuzzed == set().union(*EXEMPT.values())


@pytest.mark.long
@pytest.mark.timeout(LONG_S + 600)
@pytest.mark.parametrize("parser", PARSERS, ids=str)
def test_fuzzing_for_a_long_time_finds_nothing(parser):
    check_long(parser, LONG_S / len(PARSERS))
