"""Load the specification of a run from its file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from hpctrain.errors import SpecError
from hpctrain.files import parse_yaml, read_regular
from hpctrain.jobspec.container import Container
from hpctrain.jobspec.job_spec import CodeRef, JobSpec
from hpctrain.jobspec.launcher import TorchrunConfig
from hpctrain.jobspec.notify import NotifyConfig
from hpctrain.jobspec.shell_setup import ShellSetup

#: Fields that are mappings in the file.
_SECTIONS: dict[str, Callable[..., Any]] = {
    "shell": ShellSetup,
    "torchrun": TorchrunConfig,
    "code": CodeRef,
    "container": Container,
    "notify": NotifyConfig,
}


def load_spec(path: Path) -> JobSpec:
    """Read and check a specification written as `JobSpec.text`.

    Raises:
        SpecError: the file is missing or invalid.
    """
    try:
        values: Any = parse_yaml(read_regular(path).decode("utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it is not a mapping of fields")
        field_names = {entry.name for entry in fields(JobSpec)}
        if unknown := sorted(str(name) for name in values.keys() - field_names):
            raise ValueError(f"it has unknown fields: {', '.join(unknown)}")
        sections = {
            name: kind(**_with_tuples(values[name])) for name, kind in _SECTIONS.items() if values.get(name)
        }
        return JobSpec(**{**_with_tuples(values), **sections})
    except SpecError:
        raise
    except OSError as error:
        raise SpecError(
            f"Cannot read the specification {path}: {error.strerror}. Submit the run again."
        ) from error
    except (TypeError, AttributeError, ValueError, OverflowError) as error:
        raise SpecError(f"The specification {path} is invalid: {error}. Submit the run again.") from error


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert lists to tuples, which YAML lacks."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
