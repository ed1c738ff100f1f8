"""The options of a submission, out of all places where they can be given; later places win."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hpctrain.errors import SpecError
from hpctrain.jobs.config_files import standing_files
from hpctrain.jobs.given import DEFAULT, Given, Source, find_option, nearest, wrong_value
from hpctrain.jobs.option import Option
from hpctrain.jobs.options import SubmitOptions, options

if TYPE_CHECKING:
    from hpctrain.jobs.config_reader import ConfigFile
    from hpctrain.jobs.site.facts import Site

COMMAND_LINE = Source("command line")
PYTHON = Source("submit()")
_SET = Source("--set")

_FLAG = re.compile(r"--[a-z][a-z-]*[a-z]")


@dataclass(frozen=True)
class Settings:
    """The value of every option that has one, and where it was given."""

    given: Mapping[str, Given]
    """By key: the name of an option, or `env.NAME` and the like for an entry of one."""
    files: tuple[ConfigFile, ...] = ()
    """The files that were read, the weakest first."""

    @property
    def site(self) -> Site:
        """What the files say the site is like.

        Raises:
            SpecError: one of them says something that does not exist.
        """
        from hpctrain.jobs.site.facts import Site

        sections = [(file.path, node) for file in self.files for node in file.site]
        if not sections:
            return Site()
        from hpctrain.jobs.site.profile import read_profile

        return reduce(lambda site, section: read_profile(site, *section), sections, Site())

    @property
    def options(self) -> SubmitOptions:
        """The values alone."""
        values: dict[str, Any] = {}
        for key, given in self.given.items():
            name, dot, entry = key.partition(".")
            if dot:
                values.setdefault(name, {})[entry] = given.value
            else:
                values[name] = given.value
        return cast(SubmitOptions, values)

    def places_of(self, text: str) -> str:
        """Where files or `--set` gave the options that a text names by their flags; empty where none did."""
        flags, known = set(_FLAG.findall(text)), options()
        places: dict[str, None] = {}
        for key, given in self.given.items():
            flag = known[key.partition(".")[0]].flag
            if flag in flags and (given.source.path is not None or given.source == _SET):
                places[f"{flag} is from {given.source}"] = None
        return "; ".join(places)


def resolve(
    options_given: SubmitOptions,
    *,
    source: Source = PYTHON,
    assignments: Sequence[str] = (),
    cwd: Path,
    environ: Mapping[str, str],
) -> Settings:
    """Join what files say with what this submission says.

    Args:
        options_given: options of this submission; None counts as not given.
        source: where those come from.
        assignments: texts of the form KEY=VALUE, which win over all else.
        cwd: folder in which the project's file is looked for.
        environ: tells where the files of user and site lie.

    Raises:
        SpecError: an option is unknown, or a value is of the wrong type; the message says where.
    """
    last = [*_from_caller(options_given, source), *map(_from_assignment, assignments)]
    chosen = {given.key: given.value for given in last if given.key in ("config", "profile")}
    standing = _read(standing_files(cwd, environ), environ)
    named = _read([cwd / chosen["config"]] if "config" in chosen else [], environ)
    settled: dict[str, Given] = {}
    for given in (*_from_files(standing, named, chosen.get("profile")), *last):
        if given.value is None:
            for key in [key for key in settled if f"{key}.".startswith(f"{given.key}.")]:
                del settled[key]
        else:
            settled[given.key] = given
    return Settings({**_defaults(), **settled}, (*standing, *named))


def _read(paths: Sequence[Path], environ: Mapping[str, str]) -> list[ConfigFile]:
    if not paths:
        return []
    # Most submissions read no file, and YAML takes a while to import.
    from hpctrain.jobs.config_reader import read_file

    return [read_file(path, environ) for path in paths]


def _defaults() -> dict[str, Given]:
    abouts = {name: option.about for name, option in options().items()}
    return {
        name: Given(name, about.default, DEFAULT)
        for name, about in abouts.items()
        if about.default is not None
    }


def _from_files(
    standing: Sequence[ConfigFile], named: Sequence[ConfigFile], profile: str | None
) -> Iterator[Given]:
    """The files' values, weakest first: a profile stands above all files but the one of `--config`."""
    if profile is not None:
        known = {name: None for file in (*standing, *named) for name in file.profiles}
        if profile not in known:
            files = ", ".join(str(file.path) for file in (*standing, *named))
            hint = nearest(profile, known) if known else f"None of the files has one ({files or 'no files'})."
            raise SpecError(f"There is no profile {profile!r} (--profile). {hint}")
    for group in (standing, named):
        for file in group:
            yield from file.plain
        for file in group:
            yield from file.profiles.get(profile or "", ())


def _from_caller(given: SubmitOptions, source: Source) -> Iterator[Given]:
    known = options()
    for name, value in cast(Mapping[str, Any], given).items():
        if name not in known:
            raise SpecError(f"submit() has no option {name!r}. {nearest(name, known)}")
        if value is not None:
            label = f"{name} (submit())" if source is PYTHON else known[name].flag
            yield from _taken(known[name], value, label, source)


def _taken(option: Option, value: object, label: str, source: Source) -> Iterator[Given]:
    if option.name == "sbatch" and isinstance(value, Mapping):
        # A flag of sbatch is a truth value in Python, as it is in YAML.
        value = {key: "true" if it is True else it for key, it in value.items() if it is not False}
    try:
        taken = option.kind.take(value)
    except ValueError:
        raise SpecError(wrong_value(label, value, option)) from None
    if option.kind.pairs:
        for name, entry in taken.items():
            yield Given(f"{option.name}.{name}", entry, source)
    else:
        yield Given(option.name, taken, source)


def _from_assignment(text: str) -> Given:
    """What `--set KEY=VALUE` says; without a value it takes back what was given before."""
    key, equals, value = text.partition("=")
    name, dot, entry = key.partition(".")
    if not equals:
        raise SpecError(f"--set {text!r} is not of the form KEY=VALUE.")
    option = find_option(name, f"--set {text!r}: ")
    if option.kind.pairs and entry:
        # A flag of sbatch has no value.
        return Given(key, value if value or name == "sbatch" else None, _SET)
    if dot or (option.kind.pairs and value):
        form = f"{name}.NAME=VALUE" if option.kind.pairs else f"{name}=VALUE"
        raise SpecError(f"--set {text!r} is not of the form {form}.")
    if not value:
        return Given(name, None, _SET)
    (given,) = _taken(option, value, f"--set {name}", _SET)
    return given
