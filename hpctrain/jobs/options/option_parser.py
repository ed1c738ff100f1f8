"""Find options by name, and parse their values from shell, files and Python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from hpctrain.errors import SpecError
from hpctrain.jobs.options.find_replacement import find_replacement
from hpctrain.jobs.options.option import NO, YES, Option, OptionSource, OptionValue
from hpctrain.jobs.options.option_table import all_options
from hpctrain.slurm.sbatch_options import SBATCH_FLAGS, SBATCH_OPTIONAL_VALUES, SBATCH_OPTIONS
from hpctrain.text import suggest

#: Keys of the sections of a file: named sets of options, rules of the site, search space of a sweep.
PROFILES_KEY, SITE_KEY, SWEEP_KEY = SECTIONS = ("profiles", "site", "sweep")


@cache
def option_names() -> dict[str, None]:
    """Return the names of all options in Python, those of sbatch last."""
    return dict.fromkeys([*all_options(), *SBATCH_OPTIONS])


def flag_of(key: str) -> str:
    """Return the name on the command line of an option, given by its name or the key of a value."""
    name, _, entry = key.partition(".")
    if name in all_options() and not (name == "sbatch" and entry):
        return all_options()[name].flag
    return f"--{(entry or name).replace('_', '-')}"


def find_option(key: str, location: str) -> Option | None:
    """Return the option of that name, if files and `--set` accept it; None for an option of sbatch."""
    if key in SBATCH_OPTIONS:
        return None
    option = all_options().get(key)
    if option is not None and option.in_files:
        return option
    if option is not None:
        raise SpecError(f"{location}{key!r} is only accepted on the command line, as {option.flag}.")
    if key in SECTIONS:
        raise SpecError(f"{location}{key!r} is a section of configuration files, not an option.")
    names = [name for name, option in all_options().items() if option.in_files]
    replacement = find_replacement(key)
    hint = f"{replacement}." if replacement else suggest(key, (*names, *SBATCH_OPTIONS, *SECTIONS))
    raise SpecError(f"{location}unknown option {key!r}. {hint}")


def parse_option(key: str, value: object, label: str, source: OptionSource) -> Iterator[OptionValue]:
    """Yield the value of an option or an entry (`env.NAME`), or one per entry; None removes weaker ones."""
    name, _, entry = key.partition(".")
    if name == "sbatch" and isinstance(value, Mapping):
        for sbatch_name, sbatch_value in value.items():
            yield from parse_option(f"sbatch.{sbatch_name}", sbatch_value, f"--sbatch {sbatch_name}", source)
    elif name in SBATCH_OPTIONS or (name == "sbatch" and entry):
        if value == "" and not entry:
            raise _invalid(label, value, "")
        if value is None:
            yield OptionValue(f"sbatch.{(entry or name).replace('_', '-')}", None, source)
        else:
            yield OptionValue(*parse_sbatch_option(entry or name, value, label), source)
    elif value is None or entry:
        yield OptionValue(key, value, source)
    else:
        kind = all_options()[name].kind
        try:
            parsed = kind.parse(value)
        except ValueError:
            raise _invalid(label, value, str(kind)) from None
        if kind.pairs:
            yield from (OptionValue(f"{name}.{pair}", text, source) for pair, text in parsed.items())
        else:
            yield OptionValue(name, parsed, source)


def parse_sbatch_option(name: str, value: object, label: str) -> tuple[str, str | None]:
    """Return key and value of an option of sbatch. A flag has an empty value, or None if it is off."""
    name = name.replace("_", "-")
    if name not in SBATCH_OPTIONS.values() and name != "profile":
        if replacement := find_replacement(name):
            raise SpecError(f"{label} cannot be set. {replacement}.")
        hint = suggest(name, SBATCH_OPTIONS.values(), otherwise="See the long options in `man sbatch`.")
        raise SpecError(f"sbatch has no option {name!r} ({label}). {hint}")
    if name in SBATCH_FLAGS:
        if value is True or str(value).lower() in ("", *YES):
            return f"sbatch.{name}", ""
        if value is False or str(value).lower() in NO:
            return f"sbatch.{name}", None
        if name not in SBATCH_OPTIONAL_VALUES:
            raise SpecError(
                f"{label} is {value!r}, but this flag of sbatch accepts no value. Remove the value, or the "
                "option."
            )
    if isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value):
        value = ",".join(value)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _invalid(label, value, "a string")
    return f"sbatch.{name}", str(value)


def _invalid(label: str, value: object, expected: str) -> SpecError:
    if value == "":
        return SpecError(f"{label} is empty. Set a value, or remove the option.")
    return SpecError(f"{label} is {value!r}, but must be {expected}.")
