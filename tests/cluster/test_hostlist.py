from __future__ import annotations

import pytest
from helpers import run_command
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster import compress_hostlist, expand_hostlist
from hpctrain.errors import UserError

LISTS = [
    "n1",
    "login",
    "n[1-3]",
    "n[001-004,7]",
    "a,b[2-3]",
    "rack[1-2]node[3-4]",
    "x[0-1]c[0-1]s[0-7]",
    "x[0-1]c[0-2]s[0-1]d[1-3],y[7]z[1-2]",
    "n[01-03,7],gpu-a[1-2]",
    "n[8-11]",
    "n[08-11]",
]


@pytest.mark.parametrize("hostlist", LISTS)
def test_agrees_with_scontrol(slurm, hostlist):
    oracle = run_command(["scontrol", "show", "hostnames", hostlist], slurm.env).stdout.split()
    assert expand_hostlist(hostlist) == oracle


def test_suffixes_which_scontrol_here_expands_to_nothing():
    assert expand_hostlist("n[01-03,7],gpu-a[1-2]b") == ["n01", "n02", "n03", "n7", "gpu-a1b", "gpu-a2b"]
    assert expand_hostlist("x[0-1]c[0-1]b0") == ["x0c0b0", "x0c1b0", "x1c0b0", "x1c1b0"]


def test_empty_list_has_no_names():
    assert expand_hostlist("") == []


@pytest.mark.parametrize(
    ("hostlist", "place"),
    [
        ("n[1-", "character 2"),
        ("n1]", "character 3"),
        ("n[1[2]]", "character 4"),
        ("n[a-b]", "character 3"),
        ("n[3-1]", "character 3"),
        ("n[1,]", "character 5"),
        ("a b", "character 2"),
        ("n[1-99999999]", "character 3"),
    ],
)
def test_malformed_list_is_quoted_with_the_place(hostlist, place):
    with pytest.raises(UserError, match="malformed") as caught:
        expand_hostlist(hostlist)
    assert repr(hostlist) in str(caught.value)
    assert place in str(caught.value)


names = st.from_regex(r"[a-z]([a-z-]{0,3}[0-9]{0,4}){1,2}", fullmatch=True)


@given(st.lists(names, max_size=30))
def test_compressing_and_expanding_gives_the_names_back(hosts):
    assert expand_hostlist(compress_hostlist(hosts)) == hosts


def test_runs_are_folded():
    assert compress_hostlist(["n01", "n02", "n03", "n07", "gpu"]) == "n[01-03,07],gpu"
