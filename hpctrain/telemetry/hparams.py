"""Collect the hyper-parameters of a run: script arguments, overrides of Hydra, and values of its training."""

from __future__ import annotations

import math
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from hpctrain.spec.redaction import REDACTED_TEXT, redact, redact_args

HparamValue = str | int | float | bool | None

_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
#: Interpreters whose option -c has a program as its value.
_INTERPRETER = re.compile(r"(?:.*/)?(?:\w*sh|python[\d.]*)")
_CODE_OPTION = re.compile(r"-[a-z]*c")
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z][\w./@-]*)=(.*)", re.DOTALL)
_NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)


def parse_hparams(args: Sequence[str]) -> dict[str, HparamValue]:
    """Return the named arguments of a script: `--name value`, `--name=value`, `--flag` and `name=value`.

    Dashes in names become underscores, as in argparse. Numbers are converted.
    """
    hparams: dict[str, HparamValue] = {}
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if match := _OPTION.fullmatch(arg):
            value: HparamValue = True
            if match[2] is not None:
                value = as_value(match[2])
            elif rest and (_NUMBER.fullmatch(rest[0]) or not rest[0].startswith("-")):
                value = as_value(rest.pop(0))
            hparams[match[1].replace("-", "_")] = value
        elif match := _OVERRIDE.fullmatch(arg):
            hparams[match[1].replace("-", "_")] = as_value(match[2])
    return hparams


def as_value(text: str) -> HparamValue:
    """Return a number if the text is one, otherwise the text."""
    if not _NUMBER.fullmatch(text):
        return text
    number = float(text)
    if math.isinf(number) or len(text) > 15:
        return text
    return int(text) if text.lstrip("-").isdecimal() else number


def plain_hparams(given: object) -> dict[str, HparamValue]:
    """Return the values of a mapping, an argparse Namespace or a dataclass; nested names are joined by dots.

    Raises:
        TypeError: `given` has another type.
    """
    if isinstance(given, Namespace):
        given = vars(given)
    elif is_dataclass(given) and not isinstance(given, type):
        given = asdict(given)
    if not isinstance(given, Mapping):
        raise TypeError(f"hparams is {given!r}, but must be a mapping, an argparse Namespace or a dataclass")
    hparams: dict[str, HparamValue] = {}
    for name, value in given.items():
        if isinstance(value, Mapping):
            hparams |= {f"{name}.{inner}": inner_value for inner, inner_value in plain_hparams(value).items()}
        else:
            is_plain = value is None or isinstance(value, str | int | float | bool)
            hparams[str(name)] = value if is_plain else str(value)
    return hparams


def collect_hparams(*given: object, args: Sequence[str]) -> dict[str, HparamValue]:
    """Return the hyper-parameters of this process, without secrets.

    The `given` ones override the arguments and the overrides of Hydra.
    """
    hparams = parse_hparams(redact_args([*args, *_hydra_overrides()]))
    for each in given:
        if each:
            hparams |= plain_hparams(each)
    return _without_secrets(hparams)


def merge_hparams(spec: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, HparamValue]:
    """Return the hyper-parameters of a run: its arguments, and those that its training recorded."""
    args, recorded = spec.get("args"), environment.get("hparams")
    if not isinstance(args, list | tuple):
        args = []
    is_interpreter = spec.get("program") == "command" and _INTERPRETER.fullmatch(str(spec.get("script")))
    if is_interpreter and args and _CODE_OPTION.fullmatch(str(args[0])):
        args = args[2:]
    hparams = parse_hparams(redact_args(args))
    if isinstance(recorded, Mapping):
        hparams |= plain_hparams(recorded)
    return applied_hparams(_without_secrets(hparams), ignored_hparams(environment))


def ignored_hparams(environment: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the values of the script that a resumed training ignores; see `applied_hparams`."""
    ignored = environment.get("ignored")
    return [
        (each[0], each[1], each[2])
        for each in (ignored if isinstance(ignored, list) else ())
        if isinstance(each, list) and len(each) == 3 and isinstance(each[0], str)
    ]


def applied_hparams(
    hparams: Mapping[str, HparamValue], ignored: Iterable[Sequence[Any]]
) -> dict[str, HparamValue]:
    """Return the hyper-parameters with the values that a resumed training uses.

    `ignored` contains names, with the value in the checkpoint, which applies, and the value in the script.
    """
    result = dict(hparams)
    for name, applied, asked in ignored:
        aliases = (name.lower(), "learning_rate") if name == "lr" else (name.lower(),)
        same = [
            key for key, value in hparams.items() if value == asked and any(a in key.lower() for a in aliases)
        ]
        for key in same or [f"applied_{name}" if name in hparams else name]:
            result |= plain_hparams({key: applied})
    return result


def varying_hparams(runs: Sequence[Mapping[str, HparamValue]]) -> list[str]:
    """Return the names of the hyper-parameters that differ between runs."""
    names = dict.fromkeys(name for each in runs for name in each)
    return [name for name in names if len({repr(each.get(name)) for each in runs}) > 1]


def _without_secrets(hparams: Mapping[str, HparamValue]) -> dict[str, HparamValue]:
    return {
        name: REDACTED_TEXT if redact(text := f"{name}={value}") != text else value
        for name, value in hparams.items()
    }


def _hydra_overrides() -> list[str]:
    """Return the overrides of this process's Hydra job; empty without Hydra."""
    config: Any = getattr(sys.modules.get("hydra.core.hydra_config"), "HydraConfig", None)
    if config is None or not config.initialized():
        return []
    return [str(each) for each in config.get().overrides.task]
