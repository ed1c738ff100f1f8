"""Fuzzing of parsers: mutated valid texts and raw bytes, documented errors, and a bound on time per byte."""

import gc
import itertools
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

#: Seconds of the long test, for all parsers together.
LONG_S = float(os.environ.get("HPCTRAIN_FUZZ_SECONDS", "3600"))

_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
# The short test is the same each time. The long test continues from random seeds.
_PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
settings.register_profile(
    "fuzz",
    max_examples=4,
    deadline=None,
    derandomize=True,
    phases=_PHASES,
    database=None,
    suppress_health_check=_CHECKS,
)
settings.register_profile("fuzz-long", settings.get_profile("fuzz"), max_examples=100, derandomize=False)

#: Texts that parsers have misread: control characters, digits that are not ASCII, and values out of range.
ODD_TEXTS = [
    *("", " ", "\0", "\n", "\r", "\t", "\x1f", "\x1b[", "\x85", "\u2028", "\ufeff", "é", "\udcff"),
    *("²", "٣", "-1", "+1", "1_0", "00", "0x1", "1e999", "nan", "inf", "9" * 19, "9" * 5000, "1" * 400),
    *("-", "=", ",", ":", "/", "%", "(", ")", "[", "]", "{", "}", "'", '"', "\\", "|", "*", "&a *a", "#"),
    *("null", "true", "NaN", "Infinity", "2001-99-99", "0b_", "!!bool x", "!!timestamp x", "!!int ''"),
    *('"\\UFFFFFFFF"', "[" * 3000, '{"a":' * 3000),
]
_ODD_VALUES: list[Any] = [
    *(None, True, -1, 0, 2**63, 10**400, 1.7e308, float("nan"), float("inf"), [], {}, [[]], "\ud800"),
    *ODD_TEXTS,
]


@dataclass(frozen=True)
class Parser:
    """A parser of text that hpctrain did not write, or that may be damaged."""

    function: Callable[..., object]
    examples: Sequence[str]
    """Valid texts; one that starts with { is JSON, or JSON Lines."""
    errors: tuple[type[Exception], ...] = ()
    """The documented errors."""
    call: Callable[[str], object] | None = None
    """Parses a text; by default, with the function alone."""
    slow: Sequence[tuple[str, str, str]] = ()
    """Beginning, repeated part and end of texts whose parsing once took quadratic time."""
    most_bytes: int = 1 << 17
    """Maximum length of the texts whose parsing is measured."""

    @property
    def name(self) -> str:
        function = getattr(self.function, "__func__", self.function)
        return f"{function.__module__}.{function.__qualname__}"

    def parse(self, text: str) -> object:
        """Parse a text, and consume the result of a generator."""
        result = (self.call or self.function)(text)
        return list(result) if isinstance(result, Iterator) else result

    def __str__(self) -> str:
        return self.name.removeprefix("hpctrain.")


#: Seconds for all examples with one odd word, which are tried in a fixed random order.
_SWEEP_S, _LONG_SWEEP_S = 0.015, 1.0


def check_errors(parser: Parser, profile: str = "fuzz") -> None:
    """Check that only documented errors are raised."""

    @settings(settings.get_profile(profile))
    @given(_inputs(parser.examples))
    def check(text: str) -> None:
        with suppress(*parser.errors):
            parser.parse(text)

    for text in parser.examples:
        parser.parse(text)
    end = time.thread_time() + (_SWEEP_S if profile == "fuzz" else _LONG_SWEEP_S)
    for text in _with_odd_words(parser.examples):
        with suppress(*parser.errors):
            parser.parse(text)
        if time.thread_time() > end:
            break
    check()


def check_time(parser: Parser, profile: str = "fuzz") -> None:
    """Check that the CPU time grows at most linearly with the length of the text."""
    is_long = profile == "fuzz-long"
    most_bytes = parser.most_bytes if is_long else min(parser.most_bytes, 1 << 14)

    @settings(settings.get_profile(profile), max_examples=10 if is_long else 2, phases=[Phase.generate])
    @given(_growing(parser.examples))
    def check(parts: tuple[str, str, str]) -> None:
        assert_linear(parser, parts, most_bytes)

    for parts in parser.slow:
        assert_linear(parser, parts, most_bytes)
    check()


def check_long(parser: Parser, seconds: float) -> None:
    """Repeat both checks with random seeds for a number of seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        check_errors(parser, "fuzz-long")
        check_time(parser, "fuzz-long")


#: The time of n and 4n bytes is compared: 4 if linear, 16 if quadratic. A ratio counts if it is confirmed.
_MOST_RATIO = 9.0
#: Shorter times are not compared.
_NOISE_S = 2e-3


def assert_linear(parser: Parser, parts: tuple[str, str, str], most_bytes: int = 1 << 17) -> None:
    """Compare the CPU time of a text and of one that is four times as long, until the time is measurable."""
    start, part, end = parts
    before = 0.0
    too_steep: list[float] = []
    for size in itertools.takewhile(lambda size: size <= most_bytes, (64 * 4**n for n in itertools.count())):
        seconds = _cpu_seconds(parser, start + _repeat(part, size) + end)
        if seconds > _NOISE_S:
            too_steep = [*too_steep, seconds / before] if before and seconds > _MOST_RATIO * before else []
            assert len(too_steep) < 2, (
                f"{parser}: {size} bytes take {seconds:.3f} s, {too_steep} times as long as a quarter of "
                f"them: {start[:200]!r} + {part!r} * n + {end[:200]!r}"
            )
            if not too_steep:
                return
        before = seconds


def _repeat(part: str, size: int) -> str:
    """Repeat a part up to a length. A number sign stands for the number of the repetition."""
    count = max(1, size // len(part))
    return "".join(part.replace("#", str(i)) for i in range(count)) if "#" in part else part * count


def _cpu_seconds(parser: Parser, text: str) -> float:
    """Return the shortest of several measurements."""
    best = float("inf")
    gc.disable()
    try:
        for _ in range(3):
            begin = time.thread_time()
            with suppress(*parser.errors):
                parser.parse(text)
            best = min(best, time.thread_time() - begin)
    finally:
        gc.enable()
    return best


def encode(text: str) -> bytes:
    """Return the bytes of a text in which surrogates represent invalid bytes."""
    return text.encode("utf-8", "surrogateescape")


#: In memory: the readers of files are called thousands of times.
_SHM = "/dev/shm"
_folder = tempfile.TemporaryDirectory(prefix="hpctrain-fuzz-", dir=_SHM if os.path.isdir(_SHM) else None)
FOLDER = Path(_folder.name)


def write_file(text: str, name: str = "file") -> Path:
    """Return a file with this content."""
    path = FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(text))
    return path


def _with_odd_words(examples: Sequence[str]) -> Iterator[str]:
    """Yield odd texts, then examples with an odd text in place of a word or a JSON value."""
    yield from ODD_TEXTS
    words: list[tuple[str, Any, str]] = [
        (text, match, odd)
        for text in examples
        for match in re.finditer(r"[+-]?[\d.]+|\w+", text)
        for odd in ODD_TEXTS
    ]
    values = [
        (records, place, odd)
        for text in examples
        if text.startswith("{")
        for records in [_records(text)]
        for place in _places(records)[1:]
        for odd in _ODD_VALUES
    ]
    random = Random(0)
    random.shuffle(words)
    random.shuffle(values)
    for word, value in itertools.zip_longest(words, values):
        if word is not None:
            text, match, odd = word
            yield text[: match.start()] + odd + text[match.end() :]
        if value is not None:
            records, (parent, key), odd = value
            kept, parent[key] = parent[key], odd
            yield "\n".join(map(json.dumps, records))
            parent[key] = kept


def parse_mapping(text: str) -> dict[str, Any]:
    """Return the fields of a JSON object; none for any other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def parse_environment(text: str) -> dict[str, str]:
    """Return environment variables from a JSON object; variables that are null are not set."""
    record = parse_mapping(text) or {"RANK": text, "WORLD_SIZE": text}
    return {name: _text(value) for name, value in record.items() if value is not None}


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    # In variables of the environment, only surrogates for invalid bytes occur.
    return text.encode(errors="surrogatepass").decode(errors="surrogateescape")


@st.composite
def _inputs(draw: st.DrawFn, examples: Sequence[str]) -> str:
    kind = draw(st.sampled_from(["mutated"] * 4 + ["json"] * 3 + ["bytes", "text"]))
    if kind == "bytes":
        return draw(st.binary(max_size=200)).decode("utf-8", "surrogateescape")
    if kind == "text":
        return "".join(draw(st.lists(st.sampled_from(ODD_TEXTS) | st.text(max_size=3), max_size=6)))
    text = draw(st.sampled_from(examples))
    if kind == "json" and text.startswith("{"):
        return draw(_mutated_json(text))
    for _ in range(draw(st.integers(1, 3))):
        text = draw(_mutated(text, examples))
    return text


@st.composite
def _mutated(draw: st.DrawFn, text: str, examples: Sequence[str]) -> str:
    i, j = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
    part = text[i:j]
    match draw(st.sampled_from(["cut", "replace", "replace", "insert", "repeat", "swap", "splice"])):
        case "cut":
            return text[:i] + text[j:]
        case "replace":
            return text[:i] + draw(st.sampled_from(ODD_TEXTS)) + text[min(j, i + 3) :]
        case "insert":
            return text[:i] + draw(st.sampled_from(ODD_TEXTS)) + text[i:]
        case "repeat":
            return text[:i] + part * draw(st.sampled_from([2, 3, 50])) + text[j:]
        case "swap":
            return text[j:] + part + text[:i]
        case _:
            return text[:i] + draw(st.sampled_from(examples))[i:]


def _records(text: str) -> list[Any]:
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]


@st.composite
def _mutated_json(draw: st.DrawFn, text: str) -> str:
    """Replace or remove values in a JSON text, or in the lines of a JSON Lines text."""
    records = _records(text)
    for _ in range(draw(st.integers(1, 3))):
        places = [place for record in records for place in _places(record)]
        if not places:
            break
        parent, key = draw(st.sampled_from(places))
        if draw(st.booleans()) or isinstance(parent, list):
            # A copy, because the next mutation may change it.
            parent[key] = deepcopy(draw(st.sampled_from(_ODD_VALUES)))
        else:
            del parent[key]
    # json writes integers of any length.
    return "\n".join(map(json.dumps, records)) + draw(st.sampled_from(["", "\n"]))


def _places(value: Any) -> list[tuple[Any, Any]]:
    entries = list(value.items()) if isinstance(value, dict) else []
    entries += enumerate(value) if isinstance(value, list) else []
    return [place for key, inner in entries for place in [(value, key), *_places(inner)]]


@st.composite
def _growing(draw: st.DrawFn, examples: Sequence[str]) -> tuple[str, str, str]:
    """Return the beginning, a part to repeat, and the end of a text."""
    text = draw(st.sampled_from(examples))
    i = draw(st.integers(0, len(text)))
    part = text[i : i + draw(st.integers(1, 40))] + draw(st.sampled_from(["", "", "\n", " ", ","]))
    if draw(st.booleans()):
        part = re.sub(r"\d+", "#", part, count=1)
    part = part or draw(st.sampled_from([odd for odd in ODD_TEXTS if 0 < len(odd) < 9]))
    # An end that does not fit makes a parser search for another one.
    end = draw(st.sampled_from([text[i:], "", "\0", "\n"]))
    return text[:i], part, end
