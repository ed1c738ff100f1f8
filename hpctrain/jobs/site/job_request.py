"""Read a job's request from any source: options, files, or variables such as SBATCH_PARTITION."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.slurm import parsing
from hpctrain.slurm.environment import sbatch_env, sbatch_variable
from hpctrain.spec.directives import all_directives
from hpctrain.spec.job_spec import JobSpec
from hpctrain.text import pluralize

_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")


@dataclass(frozen=True)
class JobRequest:
    """The options of a job as sbatch reads them."""

    spec: JobSpec
    directives: Mapping[str, str]
    """Options in the job script, by long name."""
    variables: Mapping[str, str]
    """Environment of sbatch. Its SBATCH_* variables apply to options that the script does not set."""

    @classmethod
    def from_spec(cls, spec: JobSpec, environ: Mapping[str, str]) -> JobRequest:
        directives = all_directives(spec)
        return cls(spec, directives, sbatch_env(environ, directives))

    def value(self, key: str) -> str:
        """Return the value of an option; empty if it is not given."""
        return self.directives.get(key) or self.variables.get(sbatch_variable(key), "")

    def origin(self, key: str) -> str:
        """Return the flag or variable that sets an option, for messages."""
        variable = sbatch_variable(key)
        return variable if key not in self.directives and self.variables.get(variable) else f"--{key}"

    def is_given(self, key: str) -> bool:
        return key in self.directives or bool(self.variables.get(sbatch_variable(key)))

    @property
    def partitions(self) -> list[str]:
        """Partitions in which the job may run; empty if the site chooses."""
        return [name for name in self.value("partition").split(",") if name]

    @property
    def time_limit_s(self) -> float | None:
        """The requested time limit; None if it is unlimited or not given."""
        return parsing.parse_time_limit(self.value("time")) if self.is_given("time") else None

    @property
    def cpus_per_node(self) -> int:
        return self.spec.ntasks_per_node * (self.spec.cpus_per_task or 1)

    @property
    def memory_option(self) -> str | None:
        """The option that requests memory; None if the job requests none."""
        return next((key for key in _MEMORY if self.is_given(key)), None)

    @property
    def memory_per_node_mib(self) -> int:
        """Requested MiB of memory per node; 0 means no request, or all memory."""
        if (option := self.memory_option) is None:
            return 0
        units = {"mem": 1, "mem-per-cpu": self.cpus_per_node, "mem-per-gpu": self.spec.gpus_per_node}
        return (parsing.parse_size_mib(self.value(option)) or 0) * units[option]

    @property
    def whole_nodes(self) -> bool:
        """Return true if the job requests exclusive nodes."""
        return self.is_given("exclusive") and self.value("exclusive") in ("", "exclusive")

    def describe(self) -> str:
        """Describe the size, such as `2 nodes, each with 2 GPUs, 16 CPUs and the features ib`."""
        spec, least = self.spec, self.spec.least_granted
        nodes = (
            pluralize(least, "node")
            if least == spec.most_granted
            else f"{least} to {spec.most_granted} nodes"
        )
        kind = f"{spec.gpu_type} " if spec.gpu_type else ""
        size = [pluralize(spec.gpus_per_node, f"{kind}GPU")] if spec.gpus_per_node else []
        size.append(pluralize(self.cpus_per_node, "CPU"))
        size += [f"{mib} MiB of memory"] if (mib := self.memory_per_node_mib) else []
        excluded = f", not on {hosts}" if (hosts := self.value("exclude")) else ""
        features = f" and the features {constraint}" if (constraint := self.value("constraint")) else ""
        return f"{nodes}, each with {', '.join(size)}{features}{excluded}"
