"""Resolution of a submission's options from all sources; later sources take precedence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hpctrain.errors import HpctrainError, SpecError
from hpctrain.jobs.options.config_search_path import config_search_path
from hpctrain.jobs.options.extra_directives import explain_foreign
from hpctrain.jobs.options.option import Option
from hpctrain.jobs.options.option_value import (
    DEFAULT_SOURCE,
    OptionSource,
    OptionValue,
    find_option,
    invalid_value_message,
)
from hpctrain.jobs.options.table import SubmitOptions, all_options
from hpctrain.text import suggest

if TYPE_CHECKING:
    from hpctrain.jobs.options.config_reader import ConfigFile
    from hpctrain.slurm.site_facts import Site

COMMAND_LINE_SOURCE = OptionSource("command line")
PYTHON_SOURCE = OptionSource("submit()")
_SET = OptionSource("--set")
_PREVIOUS = OptionSource("previous submission")

_FLAG = re.compile(r"--[a-z][a-z-]*[a-z]")


@dataclass(frozen=True)
class ResolvedOptions:
    """The value of every option that has one, with its source."""

    values: Mapping[str, OptionValue]
    """Values by key: the name of an option, or for one entry a name such as `env.NAME`."""
    files: tuple[ConfigFile, ...] = ()
    """The files that were read, weakest first."""

    @property
    def site(self) -> Site:
        """The site as described by the files.

        Raises:
            SpecError: a file has an unknown key or an invalid value.
        """
        from hpctrain.slurm.site_facts import Site

        sections = [(file.path, node) for file in self.files for node in file.site]
        if not sections:
            return Site()
        from hpctrain.jobs.options.site_profile import read_profile

        return reduce(lambda site, section: read_profile(site, *section), sections, Site())

    @property
    def options(self) -> SubmitOptions:
        """The values without their sources."""
        values: dict[str, Any] = {}
        for key, given in self.values.items():
            name, dot, entry = key.partition(".")
            if dot:
                values.setdefault(name, {})[entry] = given.value
            else:
                values[name] = given.value
        return cast(SubmitOptions, values)

    def describe_sources(self, text: str) -> str:
        """Return the sources (files or `--set`) of the options whose flags occur in `text`; empty if none."""
        flags, known = set(_FLAG.findall(text)), all_options()
        places: dict[str, None] = {}
        for key, given in self.values.items():
            flag = known[key.partition(".")[0]].flag
            if flag in flags and (given.source.path is not None or given.source == _SET):
                places[f"{flag} comes from {given.source}"] = None
        return "; ".join(places)


def name_as_in_python(text: str) -> str:
    """Replace flags with Python parameter names, such as `gpus_per_node`."""
    names = {option.flag: name for name, option in all_options().items()}
    return _FLAG.sub(lambda match: names.get(match[0], match[0]), text)


@contextmanager
def named_as_in_python() -> Iterator[None]:
    """Replace flags with Python parameter names in error messages."""
    try:
        yield
    except HpctrainError as error:
        error.args = (name_as_in_python(str(error)),)
        raise


def resolve_options(
    options_given: SubmitOptions,
    *,
    source: OptionSource = PYTHON_SOURCE,
    assignments: Sequence[str] = (),
    previous: Sequence[OptionValue] | None = None,
    cwd: Path,
    environ: Mapping[str, str],
) -> ResolvedOptions:
    """Merge the options of all files with those of this submission.

    Args:
        options_given: options of this submission; None counts as not given.
        source: source of these options.
        assignments: strings of the form KEY=VALUE, which override all other sources.
        previous: all options of the submission that this one repeats. They replace those of the files.
        cwd: folder from which to search for the project's file.
        environ: defines the locations of the user's and the site's files.

    Raises:
        SpecError: an option is unknown, or a value is of the wrong type; the message names the source.
    """
    last = [*_from_caller(options_given, source), *map(_from_assignment, assignments)]
    chosen = {given.key: given.value for given in last if given.key in ("config", "profile")}
    standing = _read(config_search_path(cwd, environ), environ)
    named = _read([cwd / chosen["config"]] if "config" in chosen else [], environ)
    settled: dict[str, OptionValue] = {}
    for given in (*_from_files(standing, named, chosen.get("profile"), previous), *last):
        if given.value is None:
            for key in [key for key in settled if f"{key}.".startswith(f"{given.key}.")]:
                del settled[key]
        else:
            settled[given.key] = given
    return ResolvedOptions({**_defaults(), **settled}, (*standing, *named))


def previous_values(options: SubmitOptions, assignments: Sequence[str]) -> list[OptionValue]:
    """Return the options of an earlier submission, for `resolve_options`."""
    return [*_from_caller(options, _PREVIOUS), *map(_from_assignment, assignments)]


def _read(paths: Sequence[Path], environ: Mapping[str, str]) -> list[ConfigFile]:
    if not paths:
        return []
    # Most submissions read no file, and importing YAML is slow.
    from hpctrain.jobs.options.config_reader import read_config_file

    return [read_config_file(path, environ) for path in paths]


def _defaults() -> dict[str, OptionValue]:
    abouts = {name: option.about for name, option in all_options().items()}
    return {
        name: OptionValue(name, about.default, DEFAULT_SOURCE)
        for name, about in abouts.items()
        if about.default is not None
    }


def _from_files(
    standing: Sequence[ConfigFile],
    named: Sequence[ConfigFile],
    profile: str | None,
    previous: Sequence[OptionValue] | None,
) -> Iterator[OptionValue]:
    """Yield the files' values, weakest first: a profile overrides all files except the file of `--config`."""
    if profile is not None:
        known = {name: None for file in (*standing, *named) for name in file.profiles}
        if profile not in known:
            files = ", ".join(str(file.path) for file in (*standing, *named))
            where = f"The configuration files ({files}) define no profiles."
            hint = (
                suggest(profile, known) if known else where if files else "There are no configuration files."
            )
            raise SpecError(f"Unknown profile {profile!r} (--profile). {hint}")
    for group in (standing, named):
        if group is standing and previous is not None:
            yield from previous
        else:
            for file in group:
                yield from file.plain
        for file in group:
            yield from file.profiles.get(profile or "", ())


def _from_caller(given: SubmitOptions, source: OptionSource) -> Iterator[OptionValue]:
    known = all_options()
    for name, value in cast(Mapping[str, Any], given).items():
        if name not in known:
            raise SpecError(
                f"submit() has no option {name!r}. {explain_foreign(name) or suggest(name, known)}"
            )
        if value is not None:
            label = f"{name} (submit())" if source is PYTHON_SOURCE else known[name].flag
            yield from _parse_value(known[name], value, label, source)


def _parse_value(option: Option, value: object, label: str, source: OptionSource) -> Iterator[OptionValue]:
    if option.name == "sbatch" and isinstance(value, Mapping):
        # A flag of sbatch is a boolean in Python, as in YAML.
        value = {key: "true" if it is True else it for key, it in value.items() if it is not False}
    try:
        taken = option.kind.parse(value)
    except ValueError:
        raise SpecError(invalid_value_message(label, value, option)) from None
    if option.kind.pairs:
        for name, entry in taken.items():
            yield OptionValue(f"{option.name}.{name}", entry, source)
    else:
        yield OptionValue(option.name, taken, source)


def _from_assignment(text: str) -> OptionValue:
    """Return the value of `--set KEY=VALUE`; an empty value removes earlier values."""
    key, equals, value = text.partition("=")
    name, dot, entry = key.partition(".")
    if not equals:
        raise SpecError(f"--set {text!r} is not of the form KEY=VALUE.")
    option = find_option(name, f"--set {text!r}: ")
    name, key = option.name, f"{option.name}{dot}{entry}"
    if option.kind.pairs and entry:
        # A flag of sbatch has no value.
        return OptionValue(key, value if value or name == "sbatch" else None, _SET)
    if dot or (option.kind.pairs and value):
        form = f"{name}.NAME=VALUE" if option.kind.pairs else f"{name}=VALUE"
        raise SpecError(f"--set {text!r} is not of the form {form}.")
    if not value:
        return OptionValue(name, None, _SET)
    (given,) = _parse_value(option, value, f"--set {name}", _SET)
    return given
