"""Read the `#SBATCH` lines of a batch script as sbatch does, and write them.

The rules are those of `_opt_batch_script` and `_get_argument` in Slurm's src/sbatch/opt.c: the words of all
lines before the first command form one command line, which getopt_long(3) interprets.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hpctrain.errors import SpecError
from hpctrain.slurm.sbatch_options import OPTIONS

#: The kinds of value of the options that sbatch accepts.
_VALUES = {name: option.value for name, option in OPTIONS.items() if option.use != "salloc"}
_ALL_SHORT_NAMES = {option.short: name for name, option in OPTIONS.items() if option.short}

#: Words at which sbatch splits the components of a heterogeneous job, anywhere in an #SBATCH line.
HET_BORDER = re.compile(r"(pack|het)(?=job)", re.IGNORECASE)

_ESCAPED = re.compile(r"\\(.)")
_QUOTED = re.compile(r"""\\(.?)|"((?:\\.|[^"\\])*)"|'((?:\\.|[^'\\])*)'""")
_WORD = re.compile(r"""\s*((?:\\.?|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^\s"'\\#])*)""", re.ASCII)
_INTENDED = re.compile(r"\s*#\s*SBATCH\s+-")
_DIRECTIVE = re.compile(r"#(?:SBATCH|SLURM)(.*)", re.DOTALL)
_FOREIGN = re.compile(r"#(PBS|BSUB)\s", re.ASCII)
_PLAIN = re.compile(r"[A-Za-z0-9_./:,@%+=~^*-]*", re.ASCII)

#: Shells whose scripts sbatch users write; `hpctrain submit` adopts their scripts.
SHELLS = ("ash", "bash", "csh", "dash", "fish", "ksh", "mksh", "sh", "tcsh", "zsh")


def shell_of(first_line: str) -> list[str]:
    """Return the command of a `#!` line that names a shell; empty for any other line."""
    command = first_line[2:].split(None, 1) if first_line.startswith("#!") else []
    words = " ".join(command).split()
    if words and words[0].endswith("/env"):
        words = [word for word in words[1:] if not word.startswith("-")]
    return [word.strip() for word in command] if words and words[0].rpartition("/")[2] in SHELLS else []


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
    """Numbers of the lines that sbatch ignores: after the first command, or not beginning with `#SBATCH`."""


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
    ignored = (
        number
        for number, line in enumerate(lines, 1)
        if _INTENDED.match(line) and (number > end or not line.startswith("#SBATCH"))
    )
    return BatchHeader(directives, tuple(ignored))


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
            if _VALUES.get(option) == "none" and equals:
                raise _invalid(name, line, f"has {word}, but --{option} has no value")
            # Only sbatch knows whether an option of a plugin has a value.
            is_plugin = option not in _VALUES and words and not words[0][0].startswith("-")
            if not equals and (_VALUES.get(option) == "required" or is_plugin):
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
            option = _ALL_SHORT_NAMES.get(letter, "")
            if option and _VALUES[option] == "none":
                yield Directive(option, "", line)
            elif not option:
                raise _invalid(name, line, f"has -{letter}, which is not an option of sbatch")
            else:
                is_complete = letters or _VALUES[option] == "optional"
                value = letters if is_complete else next_value(f"-{letter}", line)
                yield Directive(option, value, line)
                break


def _complete(prefix: str, name: str, line: int) -> str:
    """Return the option with this unique beginning. Unknown options may be those of a plugin of the site."""
    matches = (
        [prefix] if prefix in _VALUES else sorted(option for option in _VALUES if option.startswith(prefix))
    )
    if len(matches) > 1:
        raise _invalid(name, line, f"has --{prefix}, which may be --{' or --'.join(matches)}")
    option = matches[0] if matches else prefix
    return "ntasks-per-node" if option == "tasks-per-node" else option


def _invalid(name: str, line: int, reason: str) -> SpecError:
    return SpecError(f"Line {line} of {name} {reason}.")


def directive_lines(directives: Mapping[str, str], origins: Mapping[str, str] | None = None) -> list[str]:
    """Format the directives as `#SBATCH` lines of a batch script, with comments on their origins."""
    comments = {key: f"  # {origin}" for key, origin in (origins or {}).items()}
    values = {
        key: f"={quote_directive(value)}" if value or _VALUES.get(key) == "required" else ""
        for key, value in directives.items()
    }
    return [f"#SBATCH --{key}{value}{comments.get(key, '')}" for key, value in values.items()]


def quote_directive(value: str) -> str:
    r"""Quote a value so that sbatch reads it back unchanged from an `#SBATCH` line.

    The rules, from `_get_argument` in Slurm's src/sbatch/opt.c: quotes group; a backslash escapes the next
    character, also inside quotes, but not a space outside quotes; an unquoted # starts a comment; newlines
    are not supported. Nothing is expanded.
    """
    if _PLAIN.fullmatch(value) and not HET_BORDER.search(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + HET_BORDER.sub(r"\1\\", escaped) + '"'
