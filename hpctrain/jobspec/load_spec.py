"""Load the specification of a run from its file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hpctrain.errors import SpecError
from hpctrain.files import parse_yaml, read_regular
from hpctrain.jobspec.job_spec import JobSpec


def load_spec(path: Path) -> JobSpec:
    """Read and check a specification written as `JobSpec.text`.

    Raises:
        SpecError: the file is missing or invalid.
    """
    try:
        return msgspec.convert(parse_yaml(read_regular(path).decode("utf-8")), JobSpec)
    except OSError as error:
        raise SpecError(
            f"Cannot read the specification {path}: {error.strerror}. Submit the run again."
        ) from error
    except (ValueError, OverflowError) as error:
        if isinstance(error.__cause__, SpecError):
            raise error.__cause__ from None
        raise SpecError(f"The specification {path} is invalid: {error}. Submit the run again.") from error
