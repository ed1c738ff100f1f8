"""Describe the options of a job as sbatch reads them."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from hpctrain.jobspec.job_directives import job_directives
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.slurm import parsing
from hpctrain.slurm.environment import SBATCH_VARIABLES, sbatch_env
from hpctrain.text import pluralize

_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
#: Options of a batch script that limit the nodes on which it can run.
_SIZE = (
    *("nodes", "ntasks", "ntasks-per-node", "ntasks-per-socket", "ntasks-per-core", "ntasks-per-gpu"),
    *("cpus-per-task", "cpus-per-gpu", "mincpus", "sockets-per-node", "cores-per-socket", "threads-per-core"),
    *("extra-node-info", "core-spec", "thread-spec", "gres", "gpus", "gpus-per-node", "gpus-per-socket"),
    *("gpus-per-task", *_MEMORY, "tmp", "constraint", "nodelist", "nodefile", "exclude"),
)


class JobRequest(Struct, frozen=True):
    """The options of a job as sbatch reads them."""

    spec: JobSpec
    directives: Mapping[str, str]
    """Options in the job script, by long name."""
    variables: Mapping[str, str]
    """Environment of sbatch. Its SBATCH_* variables are the sources of options in the script."""

    @classmethod
    def from_spec(cls, spec: JobSpec, environ: Mapping[str, str]) -> JobRequest:
        directives = job_directives(spec)
        return cls(spec, directives, sbatch_env(environ, directives))

    def value(self, key: str) -> str:
        return self.directives.get(key, "")

    def origin(self, key: str) -> str:
        """Return the flag or variable that sets an option, for messages."""
        variable = SBATCH_VARIABLES.get(key, "")
        return variable if variable in self.variables else f"--{key}"

    @property
    def partitions(self) -> list[str]:
        return [name for name in self.value("partition").split(",") if name]

    @property
    def time_limit_s(self) -> float | None:
        """The requested time limit; None if it is unlimited or not given."""
        return parsing.parse_time_limit(self.value("time"))

    @property
    def cpus_per_node(self) -> int:
        return self.spec.ntasks_per_node * (self.spec.cpus_per_task or 1)

    @property
    def memory_option(self) -> str | None:
        return next((key for key in _MEMORY if key in self.directives), None)

    @property
    def memory_per_node_mib(self) -> int:
        """Requested MiB of memory per node; 0 means no request, or all memory."""
        if (option := self.memory_option) is None:
            return 0
        units = {"mem": 1, "mem-per-cpu": self.cpus_per_node, "mem-per-gpu": self.spec.gpus_per_node}
        return (parsing.parse_size_mib(self.value(option)) or 0) * units[option]

    @property
    def whole_nodes(self) -> bool:
        return self.directives.get("exclusive") in ("", "exclusive")

    def describe(self) -> str:
        """Describe the size, such as `2 nodes, each with 2 GPUs, 16 CPUs and the features ib, on n[1-2]`.

        For a batch script, whose size only Slurm can tell, return its options: `--ntasks=9 --gres=gpu:1`.
        """
        if self.spec.program == "batch":
            given = (f"--{key}={value}" for key, value in self.directives.items() if key in _SIZE)
            return " ".join(given) or "the defaults of sbatch"
        spec, minimum = self.spec, self.spec.least_granted
        nodes = (
            pluralize(minimum, "node")
            if minimum == spec.most_granted
            else f"{minimum} to {spec.most_granted} nodes"
        )
        kind = f"{spec.gpu_type} " if spec.gpu_type else ""
        size = [pluralize(spec.gpus_per_node, f"{kind}GPU")] if spec.gpus_per_node else []
        size.append(pluralize(self.cpus_per_node, "CPU"))
        size += [f"{mib} MiB of memory"] if (mib := self.memory_per_node_mib) else []
        options = (("on", "nodelist"), ("not on", "exclude"))
        places = "".join(f", {word} {hosts}" for word, key in options if (hosts := self.value(key)))
        features = f" and the features {constraint}" if (constraint := self.value("constraint")) else ""
        return f"{nodes}, each with {', '.join(size)}{features}{places}"
