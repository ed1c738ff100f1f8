import subprocess
from collections.abc import Iterator

import pytest
from helpers.commands import environment, run_command
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpctrain.cluster import compress_hostlist, expand_hostlist
from hpctrain.errors import UserError

#: One query to scontrol takes a fraction of a millisecond, so thousands take seconds.
MANY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Scontrol:
    """One scontrol process that answers any number of queries through a pipe."""

    _LAST = "the-end"

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def show(self, kind: str, text: str) -> list[str] | None:
        """Return the lines of `scontrol show KIND TEXT`, or None if it refuses. The text has no spaces."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"show {kind} {text}\nshow hostnames {self._LAST}\n")
        stdin.flush()
        lines = []
        for line in stdout:
            if line == f"{self._LAST}\n":
                break
            lines.append(line.rstrip("\n"))
        # It repeats each query after its prompt.
        first, *lines, last = lines
        assert (first, last) == (f"scontrol: show {kind} {text}", f"scontrol: show hostnames {self._LAST}")
        if any(line.startswith(("Invalid hostlist", "scontrol: error")) for line in lines):
            return None
        return list(filter(None, lines))

    def expand(self, hostlist: str) -> list[str] | None:
        return self.show("hostnames", hostlist)


@pytest.fixture(scope="module")
def scontrol(slurm) -> Iterator[Scontrol]:
    # A terminal so wide that the line editor breaks no line.
    env = environment({**slurm.env, "COLUMNS": "100000", "TERM": "dumb"})
    pipe = subprocess.PIPE
    with subprocess.Popen(
        ["scontrol"], env=env, encoding="utf-8", stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT
    ) as process:
        try:
            oracle = Scontrol(process)
            assert oracle.expand("n1") == ["n1"]
            yield oracle
        finally:
            process.kill()


def numbers(longest_range: int) -> Iterator[str]:
    """Yield numbers and ranges, mostly around changes of the number of digits."""
    for number in (0, 1, 5, 8, 9, 10, 11, 42, 98, 99, 100, 101, 998, 999, 1000, 1001, 9999, 10000, 100000):
        for width in (0, 2, 3, 4, 6):
            first = str(number).zfill(width)
            yield first
            for length in (0, 1, 2, 3, 10, 12, 90, 101, 999, 1200):
                if length <= longest_range:
                    yield from (f"{first}-{number + length}", f"{first}-{number + length:05}")


def brackets(longest_range: int) -> st.SearchStrategy[str]:
    pieces = st.sampled_from(list(numbers(longest_range)))
    return st.lists(pieces, min_size=1, max_size=3).map(lambda pieces: f"[{','.join(pieces)}]")


def joined(*parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(*parts).map("".join)


prefixes = st.sampled_from(["", "n", "a", "rack", "gpu-a", "x1", "0", "b.", "_", "N", "-"])
names = joined(prefixes, st.sampled_from(["", *numbers(-1)])).filter(bool)
bracketed = (
    joined(prefixes, brackets(1200))
    | joined(prefixes, brackets(12), prefixes, brackets(12))
    | joined(prefixes, brackets(3), prefixes, brackets(3), prefixes, brackets(3))
    | joined(prefixes, brackets(2), prefixes, brackets(2), prefixes, brackets(2), prefixes, brackets(2))
)
lists = st.lists(names | bracketed, min_size=1, max_size=6)


@MANY
@given(lists.map(",".join))
@example("n[8-11],n[08-11],n[099-101],n[99-0101]")
@example("a[1-2]b[1-2]c[3],x[0-1]c[0-2]s[0-1]d[1-3],y[7]z[1-2]")
@example("n[0000000000000000000000001-2],n[1-3,2,2],n2,n1,n1")
@example("[1-3],7,a1-2,n[1-65536]")
def test_expansion_matches_scontrol(scontrol, hostlist):
    assert expand_hostlist(hostlist) == scontrol.expand(hostlist)


@pytest.mark.parametrize("hostlist", ["", " , ", "a b", "n [1-2]", "n[1-2] [3-4],\tx", "n1,, n2\t"])
def test_spaces_are_parsed_like_scontrol(slurm, hostlist):
    output = run_command(["scontrol", "show", "hostnames", f"n{hostlist}"], slurm.env).stdout
    assert expand_hostlist(f"n{hostlist}") == output.split()


class TestDifferencesFromSlurm:
    """Deliberate differences from Slurm 22.05, listed in the module. There are fewer from newer versions."""

    @pytest.mark.parametrize(
        ("hostlist", "names"),
        [
            ("gpu-a[1-2]b", ["gpu-a1b", "gpu-a2b"]),
            ("n[01-03,7],gpu-a[1-2]b", ["n01", "n02", "n03", "n7", "gpu-a1b", "gpu-a2b"]),
            ("x[0-1]c[0-1]b0", ["x0c0b0", "x0c1b0", "x1c0b0", "x1c1b0"]),
            ("n[1-65537]", [f"n{number}" for number in range(1, 65538)]),
        ],
    )
    def test_lists_accepted_here_but_refused_by_slurm(self, scontrol, hostlist, names):
        assert scontrol.expand(hostlist) in (None, names)
        assert expand_hostlist(hostlist) == names

    @pytest.mark.parametrize(
        ("hostlist", "by_slurm"),
        [
            ("n[1-2", ["n]"]),
            ("n1]", ["n1]"]),
            ("a[1b[2]", ["a[1b2"]),
            ("n[1-]", ["n1"]),
            ("n[+1]", ["n01"]),
            ("n[1a-3]", ["n01", "n02", "n03"]),
            ("n{1-2}", ["n{1-2}"]),
            ("n1;n2", ["n1;n2"]),
            ("n1:8", ["n1:8"]),
            ("é1", ["é1"]),
        ],
    )
    def test_lists_refused_here_but_accepted_by_slurm(self, scontrol, hostlist, by_slurm):
        assert scontrol.expand(hostlist) in (by_slurm, None)
        with pytest.raises(UserError, match="malformed"):
            expand_hostlist(hostlist)


@pytest.mark.parametrize(
    ("hostlist", "position", "problem"),
    [
        ("n[1-", 2, "a '[' without a matching ']'"),
        ("n1]", 3, "a ']' without a matching '['"),
        ("n[1[2]]", 4, "a '[' inside brackets"),
        ("n[a-b]", 3, "'a-b' is neither a number nor a range"),
        ("n1,n[4,3-1]", 8, "'3-1' is in descending order"),
        ("n[010-9]", 3, "'010-9' is in descending order"),
        ("n[1,]", 5, "'' is neither"),
        ("n[]", 3, "'' is neither"),
        ("n[1-2-3]", 3, "'1-2-3' is neither"),
        ("n[1, 2]", 5, "' 2' is neither"),
        ("n[١]", 3, "'١' is neither"),
        ("n1\n", 3, "'\\n' is not allowed in a node name"),
        ("n1;n2", 3, "';' is not allowed in a node name"),
        ("n[9-" + "1" * 5000 + "-]", 3, "'9-11"),
        ("n[" + "9" * 5000 + "-1]", 3, "'999"),
    ],
)
def test_malformed_list_is_quoted_with_the_position(hostlist, position, problem):
    with pytest.raises(UserError) as caught:
        expand_hostlist(hostlist)
    assert f"malformed at character {position}: {problem}" in str(caught.value)
    _, quoted, caret = str(caught.value).splitlines()
    assert quoted.strip() == repr(hostlist) or len(hostlist) > 80
    assert quoted[caret.index("^")] == (hostlist[position - 1] if hostlist[position - 1] != "\n" else "\\")


@pytest.mark.parametrize(
    "hostlist",
    [
        "n[1-1000001]",
        "a[1-1001]b[1-1000]",
        "a[1-999]b[1-999]c[1-2]d",
        ",".join(["n[1-1000]"] * 1001),
        "n[0-9" + "9" * 5000 + "]",
    ],
    ids=["a range", "a product", "a product of three", "a sum", "a number that Python does not read"],
)
def test_more_than_a_million_names_are_refused(hostlist):
    with pytest.raises(UserError, match=r"expands to more than 1,000,000 names") as caught:
        expand_hostlist(hostlist)
    assert len(str(caught.value)) < 160


#: Names that can be folded, and breaks in their runs: other names, duplicates, other widths.
name_lists = st.lists(
    names.map(lambda name: [name]) | bracketed.map(lambda item: expand_hostlist(item)[:40])
).map(lambda lists: [name for names in lists for name in names])


@MANY
@given(name_lists)
@example(["n9", "n10", "n011", "n12"])
@example(["n099", "n100"])
@example(["r1n1", "r1n2", "r2n1", "r2n2", "r3n1", "r3n2", "r4n1"])
@example(["a", "a", "a1", "a1", "a01"])
def test_compressed_list_expands_to_the_same_names(scontrol, hosts):
    compressed = compress_hostlist(hosts)
    assert expand_hostlist(compressed) == hosts
    if hosts:
        assert scontrol.expand(compressed) == hosts


@pytest.mark.parametrize(
    ("hosts", "compressed"),
    [
        ([], ""),
        (["login"], "login"),
        (["n1"], "n1"),
        (["n01", "n02", "n03", "n07", "gpu"], "n[01-03,07],gpu"),
        (["n8", "n9", "n10", "n11"], "n[8-11]"),
        (["n2", "n1", "n1"], "n[2,1,1]"),
        (["r1n1", "r1n2", "r2n1", "r2n2"], "r[1-2]n[1-2]"),
        (["r1n1", "r1n2", "r2n1", "r2n3"], "r1n[1-2],r2n[1,3]"),
        (["a1b", "a2b"], "a1b,a2b"),
    ],
)
def test_runs_of_numbers_are_folded(hosts, compressed):
    assert compress_hostlist(hosts) == compressed


@pytest.mark.parametrize("name", ["", "a,b", "a b", "n[1-2]", "n1\n", "é"])
def test_invalid_name_is_not_compressed(name):
    with pytest.raises(UserError, match="is not a valid name in a node list") as caught:
        compress_hostlist(["n1", name])
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("value", [None, 4, ["n1", "n2"], b"n[1-2]"])
def test_non_text_is_refused(value):
    with pytest.raises(UserError, match=r"A node list must be a string, .*, not .* \(type") as caught:
        expand_hostlist(value)
    assert repr(value) in str(caught.value)
