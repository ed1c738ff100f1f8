"""Resolve the options of a submission from all sources; later sources take precedence."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct

from hpctrain.errors import SpecError
from hpctrain.jobs.options.find_replacement import find_replacement
from hpctrain.jobs.options.option import DEFAULT_SOURCE, OptionSource, OptionValue
from hpctrain.jobs.options.option_parser import find_option, flag_of, option_names, parse_option
from hpctrain.jobs.options.option_table import SubmitOptions, all_options
from hpctrain.slurm.environment import SBATCH_VARIABLES, strip_job_env
from hpctrain.slurm.sbatch_options import BATCH_KEYS, BATCH_OPTIONS, SBATCH_FLAGS, SBATCH_OPTIONAL_VALUES
from hpctrain.text import suggest

if TYPE_CHECKING:
    from hpctrain.jobs.options.config_files import ConfigFile
    from hpctrain.slurm.site_facts import SiteConventions

COMMAND_LINE_SOURCE = OptionSource("command line")
PYTHON_SOURCE = OptionSource("submit()")
_SET = OptionSource("--set")
PREVIOUS_SOURCE = OptionSource("previous submission")

_MEMORY = ("sbatch.mem", "sbatch.mem-per-cpu", "sbatch.mem-per-gpu")
#: Options have a flag, or a name with an underscore.
_FLAG = re.compile(r"--[a-z][a-z-]*[a-z]|\b[a-z]+(?:_[a-z]+)+\b")

#: Name of the project's configuration file.
PROJECT_FILE = "hpctrain.yaml"
#: List of the files in a project that another machine sent, at its root.
SENT_CODE_FILE = ".hpctrain-code.json"
#: Variable that overrides the path of the site's file or folder of files; an empty value disables it.
_SITE_VARIABLE = "HPCTRAIN_SITE_CONFIG"
_SITE_FOLDER = Path("/etc/hpctrain")


class ResolvedOptions(Struct, frozen=True):
    """The value of every option that has one, with its source."""

    values: Mapping[str, OptionValue]
    """Values by key: the name of an option, or for one entry a name such as `env.NAME`."""
    files: tuple[ConfigFile, ...] = ()
    """The files that were read, weakest first."""

    @property
    def habits(self) -> SiteConventions:
        from hpctrain.slurm.site_facts import SiteConventions

        return SiteConventions(**{name: value for file in self.files for name, value in file.habits.items()})

    @property
    def options(self) -> SubmitOptions:
        values: dict[str, Any] = {}
        for key, value in self.values.items():
            name, dot, entry = key.partition(".")
            if dot:
                values.setdefault(name, {})[entry] = value.value
            else:
                values[name] = value.value
        return cast(SubmitOptions, values)

    def without_variables(self) -> ResolvedOptions:
        values = {key: value for key, value in self.values.items() if not value.source.is_variable}
        return ResolvedOptions(values, self.files)

    def describe_sources(self, text: str) -> str:
        """Return the sources (files or `--set`) of the options whose flags occur in `text`; empty if none."""
        flags = set(_FLAG.findall(text))
        places = dict.fromkeys(
            f"{flag_of(key)} comes from {value.source}"
            for key, value in self.values.items()
            if flag_of(key) in flags
            and (value.source.path is not None or value.source == _SET or value.source.is_variable)
        )
        return "; ".join(places)


def resolve_options(
    options_given: SubmitOptions,
    *,
    source: OptionSource = PYTHON_SOURCE,
    assignments: Sequence[str] = (),
    previous: Sequence[OptionValue] | None = None,
    header: Sequence[OptionValue] | None = None,
    cwd: Path,
    environ: Mapping[str, str],
) -> ResolvedOptions:
    """Merge the options of all files with those of this submission, and those of a batch script."""
    overriding = [
        *_from_caller(cast(Mapping[str, Any], options_given), source, of_batch=header is not None),
        *chain.from_iterable(map(_from_assignment, assignments)),
    ]
    chosen = {setting.key: setting.value for setting in overriding if setting.key in ("config", "profile")}
    standing = _read(_config_search_path(cwd, environ), environ)
    named = _read([cwd / chosen["config"]] if "config" in chosen else [], environ)
    settled: dict[str, OptionValue] = {}
    variables = list(_from_variables(environ)) if previous is None else []
    files = list(_from_files(standing, named, chosen.get("profile"), previous))
    if header is not None:
        # As for sbatch, variables override the options in a batch script.
        files, variables = [], [*files, *(header if previous is None else ()), *variables]
    for setting in (*variables, *files, *overriding):
        if setting.key in _MEMORY:
            # sbatch accepts only one of these.
            for key in _MEMORY:
                if key in settled and settled[key].source[:2] != setting.source[:2]:
                    del settled[key]
        if setting.value is None:
            for key in [key for key in settled if f"{key}.".startswith(f"{setting.key}.")]:
                del settled[key]
        else:
            # Of options that exclude each other, sbatch uses the last.
            settled.pop(setting.key, None)
            settled[setting.key] = setting
    defaults = {
        name: OptionValue(name, option.default, DEFAULT_SOURCE)
        for name, option in all_options().items()
        if option.default is not None and name not in settled
    }
    return ResolvedOptions(defaults | settled, (*standing, *named))


def previous_values(
    options: Mapping[str, Any], directives: Mapping[str, str] | None = None
) -> list[OptionValue]:
    """Return the options of an earlier submission, and the directives of its batch script."""
    return [
        *_from_caller(options, PREVIOUS_SOURCE),
        *(
            OptionValue(BATCH_KEYS.get(name, f"sbatch.{name}"), value, PREVIOUS_SOURCE)
            for name, value in (directives or {}).items()
        ),
    ]


def _config_search_path(cwd: Path, environ: Mapping[str, str]) -> list[Path]:
    """Return the files that every submission reads, weakest first: site, user, project."""
    paths = []
    site = environ.get(_SITE_VARIABLE)
    if site != "":
        folder = Path(site or _SITE_FOLDER)
        paths += sorted(folder.glob("*.yaml")) if os.path.isdir(folder) else [folder] if site else []
    home = environ.get("HOME")
    if config_home := environ.get("XDG_CONFIG_HOME") or (home and os.path.join(home, ".config")):
        paths += filter(os.path.lexists, [Path(config_home, "hpctrain", "config.yaml")])
    # The nearest file up to the root of the repository or of sent code; outside a project, only in `cwd`.
    folders = [cwd, *cwd.parents]
    is_root = (any((folder / mark).exists() for mark in (".git", SENT_CODE_FILE)) for folder in folders)
    root = next((i for i, is_found in enumerate(is_root) if is_found), 0)
    files = (folder / PROJECT_FILE for folder in folders[: root + 1])
    return [*paths, *list(filter(os.path.lexists, files))[:1]]


def _read(paths: Sequence[Path], environ: Mapping[str, str]) -> list[ConfigFile]:
    if not paths:
        return []
    # Most submissions read no file, and importing YAML is slow.
    from hpctrain.jobs.options.config_files import read_config_file

    return [read_config_file(path, environ) for path in paths]


def _from_variables(environ: Mapping[str, str]) -> Iterator[OptionValue]:
    """Yield the options that environment variables of sbatch set."""
    outer = strip_job_env(environ)
    for name, variable in SBATCH_VARIABLES.items():
        if value := outer.get(variable):
            key = {"job-name": "name", "time": "time"}.get(name, f"sbatch.{name}")
            is_flag = name in SBATCH_FLAGS - SBATCH_OPTIONAL_VALUES
            yield from parse_option(key, True if is_flag else value, variable, OptionSource(variable))


def _from_files(
    standing: Sequence[ConfigFile],
    named: Sequence[ConfigFile],
    profile: str | None,
    previous: Sequence[OptionValue] | None,
) -> Iterator[OptionValue]:
    """Yield the files' values, weakest first: a profile overrides all files except the file of `--config`."""
    if profile is not None:
        defined = {name: None for file in (*standing, *named) for name in file.profiles}
        if profile not in defined:
            files = ", ".join(str(file.path) for file in (*standing, *named))
            none = f"The configuration files ({files or 'none'}) define no profiles."
            hint = suggest(profile, defined) if defined else none
            raise SpecError(f"Unknown profile {profile!r} (--profile). {hint}")
    for group in (standing, named):
        if group is standing and previous is not None:
            yield from previous
        else:
            for file in group:
                yield from file.plain
        for file in group:
            yield from file.profiles.get(profile or "", ())


def _from_caller(
    options: Mapping[str, Any], source: OptionSource, *, of_batch: bool = False
) -> Iterator[OptionValue]:
    for name, value in options.items():
        if of_batch and name in BATCH_OPTIONS:
            if value is not None:
                key = "no-requeue" if value is False else name.replace("_", "-")
                yield OptionValue(f"sbatch.{key}", "" if isinstance(value, bool) else str(value), source)
            continue
        if name not in option_names():
            hint = find_replacement(name)
            raise SpecError(
                f"submit() has no option {name!r}. {hint + '.' if hint else suggest(name, option_names())}"
            )
        if value is not None:
            label = f"{name} (submit())" if source is PYTHON_SOURCE else flag_of(name)
            yield from parse_option(name, value, label, source)


def _from_assignment(text: str) -> Iterator[OptionValue]:
    """Yield the value of `--set KEY=VALUE`; an empty value removes earlier values."""
    key, equals, value = text.partition("=")
    name, dot, entry = key.partition(".")
    if not equals:
        raise SpecError(f"--set {text!r} is not of the form KEY=VALUE.")
    option = find_option(name, f"--set {text!r}: ")
    takes_entries = option is not None and option.kind.pairs
    if bool(dot and entry) != takes_entries and (dot or value):
        form = f"{name}.NAME=VALUE" if takes_entries else f"{name}=VALUE"
        raise SpecError(f"--set {text!r} is not of the form {form}.")
    # A flag of sbatch has no value.
    is_removed = not value and not (dot and name == "sbatch")
    yield from parse_option(key, None if is_removed else value, f"--set {key}", _SET)
