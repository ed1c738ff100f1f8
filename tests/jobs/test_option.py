"""Parsing of option values, and consistency of the option table."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_type_hints

import click
import pytest
import yaml

from hpctrain.cli import submit
from hpctrain.jobs.options.option import OptionType
from hpctrain.jobs.options.option_parser import option_names
from hpctrain.jobs.options.option_table import SubmitOptions, all_options


@pytest.mark.parametrize(
    ("hint", "value", "parsed"),
    [
        (int, "8", 8),
        (int, 8, 8),
        (int | str, "8", 8),
        (int | str, "h100:8", "h100:8"),
        (str, "0123", "0123"),
        (str, 123, "123"),
        (bool, "yes", True),
        (bool, "Off", False),
        (bool, False, False),
        (bool | Literal["user"], "user", "user"),
        (str | os.PathLike[str], Path("a/b"), "a/b"),
        (Mapping[str, str], {"A": 1, "B": "x", "C": 0.5}, {"A": "1", "B": "x", "C": "0.5"}),
    ],
)
def test_value_is_parsed_by_option_type(hint, value, parsed):
    assert OptionType.from_hint(hint).parse(value) == parsed
    assert type(OptionType.from_hint(hint).parse(value)) is type(parsed)


@pytest.mark.parametrize(
    ("hint", "value", "description"),
    [
        (int, "two", "an integer"),
        (int, 1.5, "an integer"),
        (int, True, "an integer"),
        (int, "", "an integer"),
        (int, "٣", "an integer"),
        (str, "", "a string"),
        (str, True, "a string"),
        (str, None, "a string"),
        (str, ["a"], "a string"),
        (str, Path("a"), "a string"),
        (str, {"a": "b"}, "a string"),
        (bool, "maybe", "true or false"),
        (bool, 1, "true or false"),
        (bool | Literal["user", "mcs"], "me", "true, false, user or mcs"),
        (Literal["gres", "gpus-per-node"], "grse", "gres or gpus-per-node"),
        (Mapping[str, str], "A=1", "a mapping of names to strings"),
        (Mapping[str, str], {"A": True}, "a mapping of names to strings"),
        (Mapping[str, str], {"A": None}, "a mapping of names to strings"),
    ],
)
def test_other_values_are_refused_and_the_type_is_described(hint, value, description):
    kind = OptionType.from_hint(hint)
    with pytest.raises(ValueError):
        kind.parse(value)
    assert str(kind) == description


def test_table_has_the_python_options():
    typed = get_type_hints(SubmitOptions).keys()
    assert all_options().keys() <= typed <= option_names().keys()


def test_command_line_of_submit_is_frozen():
    context = click.Context(submit.command)
    options = [param for param in submit.command.get_params(context) if isinstance(param, click.Option)]
    shown = [option for option in options if option.get_help_record(context)]
    assert len(shown) <= 45, "a new option takes the place of an old one: see CONTRIBUTING.md"


@pytest.mark.parametrize("option", all_options().values(), ids=lambda option: option.name)
def test_every_option_is_documented(option):
    assert option.help[0].isupper() or option.help.startswith("sbatch ")
    assert option.help.endswith(".")
    assert "`" not in option.help
    assert option.metavar or option.kind.flag
    # A new user needs an example value.
    assert (
        option.default_text
        or option.example
        or option.kind.choices
        or option.kind.flag
        or not option.in_files
    )
    for value in filter(None, [option.example, option.default]):
        if not option.kind.pairs:
            assert option.kind.parse(yaml.safe_load(value) if option.kind.many else value) is not None
