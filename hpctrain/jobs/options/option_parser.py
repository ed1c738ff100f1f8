"""Find options by name, and parse their values from shell, files and Python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from hpctrain.errors import SpecError
from hpctrain.jobs.options.option import Option, OptionSource, OptionValue, invalid_value_message
from hpctrain.jobs.options.sbatch_options import find_replacement, parse_sbatch_option
from hpctrain.jobs.options.table import all_options, sbatch_options
from hpctrain.text import suggest

#: Key of the named sets of options in a file.
PROFILES_KEY = "profiles"
#: Key of the site description in a file.
SITE_KEY = "site"
#: Key of the search space of `hpctrain sweep` in a file.
SWEEP_KEY = "sweep"


@cache
def option_names() -> dict[str, None]:
    """Return the names of all options in Python, those of sbatch last."""
    return dict.fromkeys([*all_options(), *sbatch_options()])


def flag_of(key: str) -> str:
    """Return the name on the command line of an option, given by its name or the key of a value."""
    name, _, entry = key.partition(".")
    if name in all_options() and not (name == "sbatch" and entry):
        return all_options()[name].flag
    return f"--{(entry or name).replace('_', '-')}"


def find_option(key: str, where: str) -> Option | None:
    """Return the option of that name, if files and `--set` accept it; None for an option of sbatch.

    Raises:
        SpecError: there is no such option; the message begins with `where`.
    """
    if key in sbatch_options():
        return None
    option = all_options().get(key)
    if option is not None and option.about.in_files:
        return option
    if option is not None:
        raise SpecError(f"{where}{key!r} is only accepted on the command line, as {option.flag}.")
    sections = (PROFILES_KEY, SITE_KEY, SWEEP_KEY)
    if key in sections:
        raise SpecError(f"{where}{key!r} is a section of configuration files, not an option.")
    names = [name for name, option in all_options().items() if option.about.in_files]
    replacement = find_replacement(key)
    hint = f"{replacement}." if replacement else suggest(key, (*names, *sbatch_options(), *sections))
    raise SpecError(f"{where}unknown option {key!r}. {hint}")


def parse_option(key: str, value: object, label: str, source: OptionSource) -> Iterator[OptionValue]:
    """Yield the value of an option, or one value for each of its entries.

    Args:
        key: the name of the option, or of one of its entries, such as `env.NAME`.
        value: the value; None removes values from weaker sources.
        label: name of the option in errors.
        source: where the value comes from.

    Raises:
        SpecError: the option does not accept the value.
    """
    name, _, entry = key.partition(".")
    if name == "sbatch" and isinstance(value, Mapping):
        for sbatch_name, sbatch_value in value.items():
            yield from parse_option(f"sbatch.{sbatch_name}", sbatch_value, f"--sbatch {sbatch_name}", source)
    elif name in sbatch_options() or (name == "sbatch" and entry):
        if value == "" and not entry:
            raise SpecError(f"{label} is empty. Set a value, or remove the option.")
        if value is None:
            yield OptionValue(f"sbatch.{(entry or name).replace('_', '-')}", None, source)
        else:
            yield OptionValue(*parse_sbatch_option(entry or name, value, label), source)
    elif value is None or entry:
        yield OptionValue(key, value, source)
    else:
        option = all_options()[name]
        try:
            parsed = option.kind.parse(value)
        except ValueError:
            raise SpecError(invalid_value_message(label, value, option)) from None
        if option.kind.pairs:
            yield from (OptionValue(f"{name}.{part}", text, source) for part, text in parsed.items())
        else:
            yield OptionValue(name, parsed, source)
