"""Turn the header of an adopted batch script into options, and the options back into its directives."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGTERM, SIGUSR1, SIGUSR2
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from hpctrain.errors import SpecError
from hpctrain.jobs.options.option import DEFAULT_SOURCE, OptionSource, OptionValue
from hpctrain.jobs.options.option_table import SubmitOptions
from hpctrain.jobs.options.spec_builder import build_spec
from hpctrain.jobspec.job_directives import job_directives
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.slurm.batch_header import BatchHeader, parse_batch_header, shell_of
from hpctrain.slurm.parsing import parse_duration
from hpctrain.slurm.sbatch_options import BATCH_KEYS

#: Options of the command sbatch, not of the job.
_OF_COMMAND = ("ignore-pbs", "parsable", "quiet", "verbose", "wait")
#: Options with which a job would not run, would run elsewhere, or would read from a file.
_REFUSED = ("clusters", "wrap", "help", "test-only", "usage", "version", "input")
#: Options whose values are paths, relative to the working directory of the job or to that of sbatch.
_JOB_PATHS, _PATHS = ("output", "error", "input"), {"nodefile", "export-file"}
#: Options for ranks that hpctrain starts, which have no effect.
OF_RANKS = (
    *("spare_nodes", "node_check", "scale_up_after", "gpu_request_style", "standby_workers", "mpi"),
    *("srun_arg", "cpu_binding", "code_snapshot", "container_image", "stage", "stage_environment"),
    "launcher",
)
_SIGNAL = re.compile(r"([RB]+:)?(?:SIG)?(\w+)(?:@(\d+))?", re.ASCII | re.IGNORECASE)
#: A command whose processes inherit no variables.
_HIDES = re.compile(r"[^#]*\bsrun\b[^#]*\s--export[= ]NONE\b", re.IGNORECASE)
#: A command whose processes lack the folder in PYTHONPATH with which they are observed.
_REPLACES_PATH = re.compile(
    r"[^#]*\b(?:(?:unset|env\s-u)\s[^#;&|=]*\bPYTHONPATH\b|PYTHONPATH=(?![^#]*\$\{?PYTHONPATH\b))"
)
#: Signals for the batch script that the supervisor forwards, by name and number.
_FORWARDED = ("TERM", "USR1", "USR2", *(str(int(number)) for number in (SIGTERM, SIGUSR1, SIGUSR2)))
#: Origin of the directives that hpctrain adds.
_OWN_ORIGIN = "hpctrain"
#: Seconds before the time limit at which sbatch sends the signal of --signal.
_SIGNAL_LEAD_S = 60


class BatchScript(Struct, frozen=True):
    """A batch script of the user that is submitted as it is."""

    path: Path
    text: str
    header: BatchHeader

    @classmethod
    def read(cls, path: Path) -> BatchScript | None:
        """Read a script whose `#!` line names a shell; None for any other file."""
        try:
            with open(path, "rb") as file:
                first_line = file.readline(256)
                if not shell_of(first_line.decode("utf-8", "surrogateescape")):
                    return None
                text = (first_line + file.read()).decode("utf-8", "surrogateescape")
        except OSError:
            return None
        if "\r\n" in text:
            raise SpecError(f"{path} has DOS line breaks, which sbatch refuses. Remove them: dos2unix {path}")
        return cls(path, text, parse_batch_header(text, path.name))

    @property
    def options(self) -> list[OptionValue]:
        """Return the options of the header in the order of its lines."""
        values: list[OptionValue] = []
        mail_types: list[str] = []
        for name, value, line in self.header.directives:
            if name == "mail-type":
                # The only option whose values sbatch adds up.
                mail_types.append(value)
                value = ",".join(mail_types)
            if name in _REFUSED or (name == "signal" and not _can_forward(value)):
                option = f"--{name}={value}" if value else f"--{name}"
                remedy = "Use TERM, USR1 or USR2" if name == "signal" else "Remove the option"
                raise SpecError(
                    f"Line {line} of {self.path.name} has {option}, which hpctrain cannot adopt. {remedy}."
                )
            if name not in _OF_COMMAND:
                key = BATCH_KEYS.get(name, f"sbatch.{name}")
                values.append(OptionValue(key, value, OptionSource("", self.path, line)))
        return values

    @property
    def notes(self) -> list[str]:
        """Return notes for the user."""
        name, notes = self.path.name, []
        if self.header.ignored:
            lines = ", ".join(map(str, self.header.ignored))
            notes.append(
                f"{name} has options that sbatch ignores: line {lines}. Their lines must begin with #SBATCH, "
                "and precede the first command."
            )
        gain = "to let hpctrain count steps, detect hangs and stop the ranks"
        if lines := self._lines(_HIDES):
            notes.append(
                f"{name} starts processes with --export=NONE, which hpctrain cannot observe: line {lines}. "
                f"Remove the option {gain}."
            )
        if lines := self._lines(_REPLACES_PATH):
            notes.append(
                f"{name} removes hpctrain's folder from PYTHONPATH, so hpctrain cannot observe its "
                f"processes: line {lines}. Keep the folder, as in PYTHONPATH=src:$PYTHONPATH, {gain}."
            )
        return notes

    def _lines(self, pattern: re.Pattern[str]) -> str:
        """Return the numbers of the lines that match."""
        lines = enumerate(self.text.splitlines(), 1)
        return ", ".join(str(number) for number, line in lines if pattern.match(line))


def _can_forward(text: str) -> bool:
    """Return false for a signal to the batch script that would end the supervisor."""
    match = _SIGNAL.fullmatch(text)
    return match is None or "B" not in (match[1] or "").upper() or match[2].upper() in _FORWARDED


def _directives(values: Mapping[str, OptionValue]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the options of sbatch by long name, and their origins."""
    names = {key: name for name, key in BATCH_KEYS.items()}
    chosen = {
        names.get(key) or key.removeprefix("sbatch."): setting
        for key, setting in values.items()
        if (key in names or key.startswith("sbatch.")) and setting.source != DEFAULT_SOURCE
    }
    directives = {name: str(setting.value) for name, setting in chosen.items()}
    origins = {
        name: source.words or f"{os.path.basename(source.path or '')}:{source.line}"
        for name, (_, _, source) in chosen.items()
    }
    return directives, origins


def build_batch_spec(
    script: str | os.PathLike[str],
    args: Sequence[str],
    options: SubmitOptions,
    values: Mapping[str, OptionValue],
    *,
    cwd: Path,
    **shape: Any,
) -> tuple[JobSpec, dict[str, str]]:
    """Return the specification of a batch script, and the origins of its directives."""
    directives, origins = _directives(values)
    if "dependency" in directives:  # resolved
        directives |= {"dependency": options.get("sbatch", {})["dependency"]}
    workdir = os.path.normpath(cwd / directives.pop("chdir", ""))
    origins.pop("chdir", None)
    for option in _JOB_PATHS:
        if (path := directives.get(option)) and not os.path.isabs(path):
            directives[option] = os.path.join(workdir.replace("%", "%%"), path)
    for option in _PATHS & directives.keys():
        directives[option] = os.path.normpath(cwd / directives[option])
    passed = (*BATCH_KEYS.values(), *OF_RANKS, "sbatch")
    own: dict[str, Any] = {name: value for name, value in options.items() if name not in passed}
    if "job-name" in directives:
        own["name"] = directives.pop("job-name")
    nodes = re.match(r"[1-9]\d{0,8}", directives.get("nodes", ""))
    fields: dict[str, Any] = {"workdir": workdir, "array": directives.pop("array", None), "min_nodes": 0}
    fields["nodes"] = int(nodes[0]) if nodes else 1
    with suppress(SpecError):  # reported by sbatch
        fields["time_limit_s"] = parse_duration(directives.get("time", "unlimited"))
    if "stop_before_limit" not in own:
        match = _SIGNAL.fullmatch(directives.get("signal", ""))
        lead_s = int((match and match[3]) or _SIGNAL_LEAD_S) if match else 0
        fields["stop_before_limit_s"] = int(min(lead_s, (fields.get("time_limit_s") or 65536) - 1))
    own["sbatch"] = directives
    if "checkpoints" in own:
        own["checkpoints"] = os.path.join(workdir, own["checkpoints"])
    spec = build_spec(script, args, cast(SubmitOptions, own), cwd=cwd, program="batch", **shape)
    spec = replace(spec, **fields)
    return spec, {name: origins.get(name, _OWN_ORIGIN) for name in job_directives(spec)}
