"""What a user asks for, as one frozen value that can be written down and read back."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from hpctrain.errors import SpecError
from hpctrain.files import write_atomic

BackendName = Literal["slurm", "local"]

DEFAULT_SIGNAL_LEAD_S = 120

#: Slurm keeps the lead of `--signal` in 16 bits.
_LONGEST_SIGNAL_LEAD_S = 65535

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Characters that cannot stand in a line of a batch script.
CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One run as it was asked for, every default filled in.

    Script, arguments and variables travel in this value, never in the text of a shell script.

    Raises:
        SpecError: a value is out of its range, contradicts another, or cannot arrive untouched.
    """

    #: Absolute path of the user's Python script.
    script: str
    #: Command-line arguments of the script.
    args: tuple[str, ...] = ()
    #: Variables that the ranks get on top of the environment of the submission.
    env: dict[str, str] = field(default_factory=dict)
    #: The scheduler's name of the job.
    name: str
    run_id: str
    #: Absolute path of the run folder.
    run_dir: str
    backend: BackendName
    nodes: int = 1
    #: 0 runs the ranks on CPUs.
    gpus_per_node: int = 0
    #: Ranks on each node; 0 takes one for each GPU, or a single one on CPUs.
    tasks_per_node: int = 0
    cpus_per_task: int | None = None
    #: The interpreter that runs the supervisor and the ranks.
    python: str
    #: Absolute path of the folder in which the script is run: where the user was.
    workdir: str
    #: None leaves the limit to the partition.
    time_limit_s: float | None = None
    #: Seconds before the time limit at which the ranks are told to save; 0 takes 120, or a third
    #: of the time limit where that is shorter.
    signal_lead_s: int = 0
    #: Crashes in a row, with no new checkpoint between them, that end the run.
    max_failures: int = 3
    #: All other `#SBATCH` options, by their long names without the dashes.
    directives: dict[str, str] = field(default_factory=dict)
    #: Name or path of the template of the batch script; None takes the one that fits.
    template: str | None = None

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.nodes * self.tasks_per_node

    def __post_init__(self) -> None:
        self._fill_in()
        self._check_shape()
        self._check_time()
        self._check_words()

    def _fill_in(self) -> None:
        if self.tasks_per_node == 0:
            object.__setattr__(self, "tasks_per_node", self.gpus_per_node or 1)
        if self.signal_lead_s == 0:
            longest = DEFAULT_SIGNAL_LEAD_S
            if self.time_limit_s is not None:
                longest = min(longest, max(1, int(self.time_limit_s / 3)))
            object.__setattr__(self, "signal_lead_s", longest)

    def _check_shape(self) -> None:
        if self.backend not in get_args(BackendName):
            raise SpecError(
                f"There is no backend {self.backend!r} (--backend). "
                f"Take one of {', '.join(get_args(BackendName))}."
            )
        if self.nodes < 1:
            raise SpecError(f"A run needs at least 1 node, but nodes is {self.nodes} (--nodes).")
        if self.gpus_per_node < 0:
            raise SpecError(
                f"The number of GPUs cannot be negative, but gpus_per_node is {self.gpus_per_node} "
                "(--gpus-per-node). Give 0 for a run on CPUs."
            )
        if self.tasks_per_node < 1:
            raise SpecError(
                f"A node needs at least 1 rank, but tasks_per_node is {self.tasks_per_node} "
                "(--tasks-per-node)."
            )
        if self.gpus_per_node and self.tasks_per_node != self.gpus_per_node:
            raise SpecError(
                f"A rank has one GPU, but there are {self.tasks_per_node} ranks (--tasks-per-node) and "
                f"{self.gpus_per_node} GPUs (--gpus-per-node) on a node. Leave out --tasks-per-node, "
                f"or give both the same number."
            )
        if self.cpus_per_task is not None and self.cpus_per_task < 1:
            raise SpecError(
                f"A rank needs at least 1 CPU, but cpus_per_task is {self.cpus_per_task} (--cpus-per-task)."
            )
        if self.max_failures < 1:
            raise SpecError(
                f"max_failures is {self.max_failures} (--max-failures), but it takes at least 1, "
                "which ends the run at its first crash."
            )

    def _check_time(self) -> None:
        if not 1 <= self.signal_lead_s <= _LONGEST_SIGNAL_LEAD_S:
            raise SpecError(
                f"The lead of the signal before the time limit is {self.signal_lead_s} s (--signal-lead), "
                f"but Slurm takes 1 to {_LONGEST_SIGNAL_LEAD_S} s."
            )
        if self.time_limit_s is not None and self.time_limit_s <= self.signal_lead_s:
            raise SpecError(
                f"The time limit of {self.time_limit_s:g} s (--time) is not longer than the "
                f"{self.signal_lead_s} s "
                "before its end at which the ranks are told to save (--signal-lead), so nothing would be "
                "trained. Give a longer --time or a shorter --signal-lead."
            )

    def _check_words(self) -> None:
        for what, path in (
            ("script", self.script),
            ("run folder", self.run_dir),
            ("working folder", self.workdir),
        ):
            if not Path(path).is_absolute():
                raise SpecError(f"The path of the {what} has to be absolute, but it is {path!r}.")
        for name in self.env:
            if not _VARIABLE_NAME.fullmatch(name):
                raise SpecError(
                    f"{name!r} (--env) is no name of a variable: take letters, digits and _, "
                    "and no digit first."
                )
        for what, word in (("job name", self.name), ("run id", self.run_id)):
            if not word:
                raise SpecError(f"The {what} is empty. Give it at least one character.")
        for what, word in self._directive_words():
            if match := CONTROL_CHARACTER.search(word):
                raise SpecError(
                    f"The {what} {word!r} has the control character {match[0]!r}, which cannot stand in a "
                    "line of a batch script. Leave it out."
                )
        for what, word in self._plain_words():
            if "\x00" in word:
                raise SpecError(
                    f"The {what} {word!r} has a NUL character, which no process can be given. Leave it out."
                )
        for what, word in (*self._plain_words(), *self._directive_words()):
            if not _is_utf8(word):
                raise SpecError(
                    f"The {what} {word!r} is not valid UTF-8, so it cannot be written down. Rename it."
                )

    def _directive_words(self) -> list[tuple[str, str]]:
        """Words that stand in one line of the batch script, with what they are."""
        return [
            ("job name", self.name),
            ("run folder", self.run_dir),
            ("run id", self.run_id),
            ("path of the interpreter", self.python),
            *((f"value of --{key}", value) for key, value in self.directives.items()),
            *(("option", key) for key in self.directives),
            *([("template", self.template)] if self.template is not None else []),
        ]

    def _plain_words(self) -> list[tuple[str, str]]:
        """Words that reach a process without passing through a shell, with what they are."""
        return [
            ("path of the script", self.script),
            ("working folder", self.workdir),
            *(("argument", arg) for arg in self.args),
            *((f"value of the variable {name}", value) for name, value in self.env.items()),
        ]

    def save(self, path: Path) -> None:
        """Write the specification to `path` as YAML, atomically.

        Raises:
            OSError: the file cannot be written.
        """
        import yaml

        values = {**asdict(self), "args": list(self.args)}
        # In ASCII: PyYAML does not read back every other character that it writes, such as U+0085.
        write_atomic(path, yaml.safe_dump(values, sort_keys=False))

    @classmethod
    def load(cls, path: Path) -> JobSpec:
        """Read the specification that `save` wrote.

        Raises:
            SpecError: the file is missing, or is no specification.
        """
        import yaml

        try:
            values: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SpecError(
                f"The specification {path} cannot be read: {error.strerror}. Submit the run again."
            ) from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise SpecError(
                f"The specification {path} is not valid YAML: {error}. Submit the run again."
            ) from error
        if not isinstance(values, dict):
            raise SpecError(f"The specification {path} holds no mapping of fields. Submit the run again.")
        known = {entry.name for entry in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise SpecError(
                f"The specification {path} has unknown fields: {', '.join(unknown)}. Submit the run again."
            )
        try:
            return cls(**{**values, "args": tuple(values.get("args", ()))})
        except TypeError as error:
            raise SpecError(
                f"The specification {path} is incomplete: {error}. Submit the run again."
            ) from error


def _is_utf8(word: str) -> bool:
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
