"""Collect the hyper-parameters of a run: script arguments, overrides of Hydra, and values of its training."""

from __future__ import annotations

import math
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from hpctrain.jobspec.redaction import REDACTED_TEXT, redact, redact_args

HparamValue = str | int | float | bool | None

_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
#: Interpreters whose option -c has a program as its value.
_INTERPRETER = re.compile(r"(?:.*/)?(?:\w*sh|python[\d.]*)")
_CODE_OPTION = re.compile(r"-[a-z]*c")
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z][\w./@-]*)=(.*)", re.DOTALL)
_NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)


def parse_hparams(args: Sequence[str]) -> dict[str, HparamValue]:
    """Return the arguments `--name value`, `--name=value`, `--flag` and `name=value`, with underscores."""
    hparams: dict[str, HparamValue] = {}
    remaining = list(args)
    while remaining:
        arg = remaining.pop(0)
        if match := _OPTION.fullmatch(arg):
            value: HparamValue = True
            if match[2] is not None:
                value = as_value(match[2])
            elif remaining and (_NUMBER.fullmatch(remaining[0]) or not remaining[0].startswith("-")):
                value = as_value(remaining.pop(0))
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


def plain_hparams(source: object) -> dict[str, HparamValue]:
    """Return the values of a mapping, an argparse Namespace or a dataclass; nested names are joined by dots.

    Raises:
        TypeError: `source` has another type.
    """
    if isinstance(source, Namespace):
        source = vars(source)
    elif is_dataclass(source) and not isinstance(source, type):
        source = asdict(source)
    if not isinstance(source, Mapping):
        raise TypeError(f"hparams is {source!r}, but must be a mapping, an argparse Namespace or a dataclass")
    hparams: dict[str, HparamValue] = {}
    for name, value in source.items():
        if isinstance(value, Mapping):
            hparams |= {f"{name}.{inner}": inner_value for inner, inner_value in plain_hparams(value).items()}
        else:
            is_plain = value is None or isinstance(value, str | int | float | bool)
            hparams[str(name)] = value if is_plain else str(value)
    return hparams


def collect_hparams(*sources: object, args: Sequence[str]) -> dict[str, HparamValue]:
    """Return the hyper-parameters of this process, without secrets; the `sources` override its arguments."""
    hparams = parse_hparams(redact_args([*args, *_hydra_overrides()]))
    for source in filter(None, sources):
        hparams |= plain_hparams(source)
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
        (entry[0], entry[1], entry[2])
        for entry in (ignored if isinstance(ignored, list) else ())
        if isinstance(entry, list) and len(entry) == 3 and isinstance(entry[0], str)
    ]


def applied_hparams(
    hparams: Mapping[str, HparamValue], ignored: Iterable[Sequence[Any]]
) -> dict[str, HparamValue]:
    """Return the hyper-parameters with the values that a resumed training uses instead of the script's."""
    result = dict(hparams)
    for name, applied, script_value in ignored:
        aliases = (name.lower(), "learning_rate") if name == "lr" else (name.lower(),)
        matches = [
            key
            for key, value in hparams.items()
            if value == script_value and any(alias in key.lower() for alias in aliases)
        ]
        for key in matches or [f"applied_{name}" if name in hparams else name]:
            result |= plain_hparams({key: applied})
    return result


def varying_hparams(runs: Sequence[Mapping[str, HparamValue]]) -> list[str]:
    """Return the names of the hyper-parameters that differ between runs."""
    names = dict.fromkeys(name for hparams in runs for name in hparams)
    return [name for name in names if len({repr(hparams.get(name)) for hparams in runs}) > 1]


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
    return list(map(str, config.get().overrides.task))
