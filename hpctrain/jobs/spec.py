"""What a user asks for, as one frozen value that can be written down and read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hpctrain.errors import SpecError
from hpctrain.files import write_atomic
