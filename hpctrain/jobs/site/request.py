"""What a job asks of a site, whoever said it: options, files, or variables such as SBATCH_PARTITION."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.jobs.directives import directives_of
from hpctrain.jobs.environment import sbatch_environment, sbatch_variable
from hpctrain.jobs.site import words
from hpctrain.jobs.spec import JobSpec

_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
_LAST_TASK = re.compile(r"\d+")


@dataclass(frozen=True)
class Request:
    """A job's options as sbatch will read them."""

    spec: JobSpec
    directives: Mapping[str, str]
    """Options of the job script by their long names."""
    variables: Mapping[str, str]
    """Environment of sbatch, whose SBATCH_* count where the script says nothing."""

    @classmethod
    def of(cls, spec: JobSpec, environ: Mapping[str, str]) -> Request:
        directives = directives_of(spec)
        return cls(spec, directives, sbatch_environment(environ, directives))

    def word(self, key: str) -> str:
        """The value of an option; empty where nobody gives one."""
        return self.directives.get(key) or self.variables.get(sbatch_variable(key), "")

    def origin(self, key: str) -> str:
        """Where the value of an option is given, for a message."""
        variable = sbatch_variable(key)
        return variable if key not in self.directives and self.variables.get(variable) else f"--{key}"

    def gives(self, key: str) -> bool:
        return key in self.directives or bool(self.variables.get(sbatch_variable(key)))

    @property
    def partitions(self) -> list[str]:
        """Names of the partitions that it may run in; none where that is left to the site."""
        return [name for name in self.word("partition").split(",") if name]

    @property
    def time_limit_s(self) -> float | None:
        """The time limit that it gives; None for none, be it endless or left to the partition."""
        return words.seconds(self.word("time")) if self.gives("time") else None

    @property
    def cpus_per_node(self) -> int:
        return self.spec.tasks_per_node * (self.spec.cpus_per_task or 1)

    @property
    def memory_option(self) -> str | None:
        """The option by which it asks for memory; None where it does not."""
        return next((key for key in _MEMORY if self.gives(key)), None)

    @property
    def memory_per_node_mib(self) -> int:
        """Memory that it asks for on each node; 0 for whatever there is."""
        if (option := self.memory_option) is None:
            return 0
        each = words.size_mib(self.word(option)) or 0
        units = {"mem": 1, "mem-per-cpu": self.cpus_per_node, "mem-per-gpu": self.spec.gpus_per_node}
        return each * units[option]

    @property
    def whole_nodes(self) -> bool:
        """Whether it wants its nodes to itself."""
        return self.gives("exclusive") and self.word("exclusive") in ("", "exclusive")

    @property
    def last_task(self) -> int | None:
        """The highest number of a job array's tasks; None where it is no array."""
        numbers = _LAST_TASK.findall(self.word("array").partition("%")[0])
        return max(map(int, numbers), default=None)
