"""Read the `#SBATCH` lines of a batch script as sbatch does.

The rules are those of `_opt_batch_script` and `_get_argument` in Slurm's src/sbatch/opt.c: the words of all
lines before the first command form one command line, which getopt_long(3) interprets.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from hpctrain.errors import SpecError

#: Short names of sbatch's options, except those that `hpctrain submit` uses differently.
SHORT_NAMES = {
    "A": "account", "a": "array", "b": "begin", "C": "constraint", "c": "cpus-per-task", "D": "chdir",
    "d": "dependency", "e": "error", "G": "gpus", "H": "hold", "i": "input", "J": "job-name", "L": "licenses",
    "N": "nodes", "n": "ntasks", "o": "output", "p": "partition", "q": "qos", "t": "time", "W": "wait",
    "w": "nodelist", "x": "exclude",
}  # fmt: skip
_ALL_SHORT_NAMES = {
    **SHORT_NAMES,
    "B": "extra-node-info", "F": "nodefile", "h": "help", "k": "no-kill", "M": "clusters",
    "m": "distribution", "O": "overcommit", "Q": "quiet", "S": "core-spec", "s": "oversubscribe",
    "u": "usage", "V": "version", "v": "verbose",
}  # fmt: skip

# All long options of sbatch 22.05 to 26.05, by whether they have a value.
_FLAG_NAMES = """
consolidate-segments contiguous external help hold ignore-pbs no-requeue overcommit oversubscribe parsable
quiet reboot spread-job stepmgr test-only usage use-min-nodes verbose version wait
"""
_OPTIONAL_NAMES = "exclusive get-user-env nice no-kill oom-kill-step propagate requeue resv-ports"
_VALUE_NAMES = """
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint
container container-id core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot
dependency distribution error exclude export export-file extra extra-node-info gid gpu-bind gpu-freq gpus
gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input job-name kill-on-invalid-dep
licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile
nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output
partition power prefer priority profile qos reservation segment signal sockets-per-node switches
tasks-per-node thread-spec threads-per-core time time-min tmp tres-bind tres-per-job tres-per-task uid
wait-all-nodes wckey wrap
"""
FLAGS, _OPTIONAL, _WITH_VALUE = (
    frozenset(names.split()) for names in (_FLAG_NAMES, _OPTIONAL_NAMES, _VALUE_NAMES)
)
_LONG_NAMES = FLAGS | _OPTIONAL | _WITH_VALUE

#: Words at which sbatch splits the components of a heterogeneous job, anywhere in an #SBATCH line.
HET_BORDER = re.compile(r"(pack|het)(?=job)", re.IGNORECASE)

_ESCAPED = re.compile(r"\\(.)")
_QUOTED = re.compile(r"""\\(.?)|"((?:\\.|[^"\\])*)"|'((?:\\.|[^'\\])*)'""")
_WORD = re.compile(r"""\s*((?:\\.?|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^\s"'\\#])*)""", re.ASCII)
_DIRECTIVE = re.compile(r"#(?:SBATCH|SLURM)(.*)", re.DOTALL)
_FOREIGN = re.compile(r"#(PBS|BSUB)\s", re.ASCII)


#: Shells whose scripts sbatch users write; `hpctrain submit` adopts their scripts.
_SHELLS = ("ash", "bash", "csh", "dash", "fish", "ksh", "mksh", "sh", "tcsh", "zsh")


def shell_of(first_line: str) -> list[str]:
    """Return the command of a `#!` line that names a shell; empty for any other line."""
    command = first_line[2:].split(None, 1) if first_line.startswith("#!") else []
    words = " ".join(command).split()
    if words and words[0].endswith("/env"):
        words = [word for word in words[1:] if not word.startswith("-")]
    return [word.strip() for word in command] if words and words[0].rpartition("/")[2] in _SHELLS else []


class Directive(NamedTuple):
    """An option of sbatch in a script."""

    name: str
    """Long name without dashes."""
    value: str
    """Empty for a flag."""
    line: int


class BatchHeader(NamedTuple):
    directives: tuple[Directive, ...]
    ignored: tuple[int, ...]
    """Numbers of the #SBATCH lines after the first command, which sbatch ignores."""


def has_value(name: str) -> bool:
    """True if sbatch requires a value for the option."""
    return name in _WITH_VALUE


def parse_batch_header(text: str, name: str) -> BatchHeader:
    """Parse the header of the script with this name.

    Raises:
        SpecError: sbatch would refuse the header, or it requests a heterogeneous job.
    """
    words: deque[tuple[str, int]] = deque()
    foreign: int | None = None
    lines = text.split("\n")
    end = len(lines)
    for number, line in enumerate(lines, 1):
        if match := _DIRECTIVE.fullmatch(line):
            if HET_BORDER.search(line):
                raise _invalid(name, number, "requests a heterogeneous job, which hpctrain cannot run")
            words += ((word, number) for word in _split(match[1], name, number))
        elif _FOREIGN.match(line):
            foreign = foreign or number
        elif (stripped := line.strip(" \t\r\v\f")) and not stripped.startswith("#"):
            end = number
            break
    directives = tuple(_parse_words(words, name))
    if foreign is not None and "ignore-pbs" not in (directive.name for directive in directives):
        reason = (
            "is an option for another scheduler, which sbatch also applies. Remove it, or add --ignore-pbs"
        )
        raise _invalid(name, foreign, reason)
    later = (number for number, line in enumerate(lines, 1) if number > end and line.startswith("#SBATCH"))
    return BatchHeader(directives, tuple(later))


def _split(text: str, name: str, line: int) -> Iterator[str]:
    """Yield the words of a directive. An empty word ends it, as a comment does."""
    position = 0
    while (match := _WORD.match(text, position)) and match[1]:
        position = match.end()
        if not (word := _QUOTED.sub(_unquote, match[1])):
            return
        if match[1].startswith(":"):
            raise _invalid(name, line, "requests a heterogeneous job (:), which hpctrain cannot run")
        yield word
    rest = text[position:].lstrip()
    if rest and not rest.startswith("#"):
        raise _invalid(name, line, f"has an unmatched {rest[0]}")


def _unquote(match: re.Match[str]) -> str:
    escaped, double, single = match.groups()
    return escaped if escaped is not None else _ESCAPED.sub(r"\1", double or single or "")


def _parse_words(words: deque[tuple[str, int]], name: str) -> Iterator[Directive]:
    """Yield the options as getopt_long(3) does."""

    def next_value(option: str, line: int) -> str:
        if not words:
            raise _invalid(name, line, f"has {option} without its value")
        return words.popleft()[0]

    while words:
        word, line = words.popleft()
        if word.startswith("--") and word != "--":
            prefix, equals, value = word[2:].partition("=")
            option = _complete(prefix, name, line)
            if option in FLAGS and equals:
                raise _invalid(name, line, f"has {word}, but --{option} has no value")
            # Only sbatch knows whether an option of a plugin has a value.
            is_plugin = option not in _LONG_NAMES and words and not words[0][0].startswith("-")
            if not equals and (option in _WITH_VALUE or is_plugin):
                value = next_value(f"--{option}", line)
            yield Directive(option, value, line)
            continue
        letters = word[1:] if word.startswith("-") else ""
        if not letters.strip("-"):
            if word == "--" and not words:
                return
            raise _invalid(name, line, f"has {word!r}, which is not an option of sbatch")
        while letters:
            letter, letters = letters[0], letters[1:]
            if (option := _ALL_SHORT_NAMES.get(letter, "")) in FLAGS:
                yield Directive(option, "", line)
            elif not option:
                raise _invalid(name, line, f"has -{letter}, which is not an option of sbatch")
            else:
                value = letters if letters or option in _OPTIONAL else next_value(f"-{letter}", line)
                yield Directive(option, value, line)
                break


def _complete(prefix: str, name: str, line: int) -> str:
    """Return the option with this unique beginning. Unknown options may be those of a plugin of the site."""
    matches = (
        [prefix]
        if prefix in _LONG_NAMES
        else sorted(option for option in _LONG_NAMES if option.startswith(prefix))
    )
    if len(matches) > 1:
        raise _invalid(name, line, f"has --{prefix}, which may be --{' or --'.join(matches)}")
    option = matches[0] if matches else prefix
    return "ntasks-per-node" if option == "tasks-per-node" else option


def _invalid(name: str, line: int, reason: str) -> SpecError:
    return SpecError(f"Line {line} of {name} {reason}.")
