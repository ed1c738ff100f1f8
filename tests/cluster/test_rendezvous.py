"""Rendezvous of the ranks of a job, each in its own thread on this host."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from itertools import count, islice

import pytest
from helpers.commands import run_command
from helpers.waiting import slowness

from hpctrain.authentication import new_secret
from hpctrain.cluster.port_candidates import port_candidates
from hpctrain.cluster.ranks import Ranks
from hpctrain.cluster.rendezvous import RendezvousInfo, rendezvous
from hpctrain.cluster.rendezvous import server as rendezvous_server
from hpctrain.cluster.rendezvous.port import ReservedPort
from hpctrain.cluster.rendezvous.protocol import Handshake
from hpctrain.errors import RendezvousError

#: Far more than a rendezvous on one host takes, even on a busy machine.
LIMIT_S = 30.0
#: For rendezvous that cannot succeed.
SHORT_S = 1.0

_KEYS = count()


@pytest.fixture
def key() -> str:
    """Return a key that no other test uses, with candidates that no program on this machine uses."""
    keys = (f"{__name__} {time.monotonic_ns()} {number}" for number in _KEYS)
    return next(key for key in keys if all(map(is_free, candidates(key))))


def is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def ranks_of(key: str, rank: int, world_size: int, host: str = "localhost", **kwargs: object) -> Ranks:
    fields = {"local_rank": rank, "local_world_size": world_size, "node_rank": 0, "num_nodes": 1, **kwargs}
    return Ranks(
        rank=rank,
        world_size=world_size,
        master_addr=host,
        master_port=next(port_candidates(key)),
        environment="test",
        rendezvous_id=key,
        **fields,  # type: ignore[arg-type]
    )


def join_all(
    *all_ranks: Ranks, timeout_s: float = LIMIT_S, environ: dict[str, str] | None = None
) -> list[Future[RendezvousInfo]]:
    """Let all ranks join at once; return their futures in that order."""
    with ThreadPoolExecutor(len(all_ranks)) as pool:
        return [pool.submit(rendezvous, ranks, environ or {}, timeout_s=timeout_s) for ranks in all_ranks]


def world(key: str, size: int, **kwargs: object) -> list[Ranks]:
    return [ranks_of(key, rank, size, **kwargs) for rank in range(size)]


def agreed_port(futures: list[Future[RendezvousInfo]]) -> int:
    """Return the port that all agreed on; rank 0 releases it."""
    results = [future.result() for future in futures]
    for result in results:
        if result.reserved_port:
            result.reserved_port.close()
    (port,) = {result.port for result in results}
    return port


def failures(futures: list[Future[RendezvousInfo]]) -> list[str]:
    """Return each rank's error message; fail if a rank has none."""
    texts = []
    for future in futures:
        with pytest.raises(RendezvousError) as error:
            future.result()
        texts.append(str(error.value))
    return texts


def candidates(key: str) -> list[int]:
    return list(islice(port_candidates(key), 5))


@contextlib.contextmanager
def server(port: int, answer: Callable[[socket.socket], object]) -> Iterator[list[socket.socket]]:
    """A foreign server on `port`, which calls `answer(connection)` for each client."""
    connections: list[socket.socket] = []
    listener = socket.create_server(("", port))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(connection)
            with contextlib.suppress(OSError):
                answer(connection)

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        yield connections
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        serving.join()
        for connection in connections:
            connection.close()


def echo(connection: socket.socket) -> None:
    connection.settimeout(5.0)
    connection.sendall(connection.recv(4096))


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_all_ranks_join_in_any_order(key, order):
    started = []
    with ThreadPoolExecutor(4) as pool:
        for rank in order:
            started.append(pool.submit(rendezvous, ranks_of(key, rank, 4), {}, timeout_s=LIMIT_S))
            time.sleep(0.1)
    assert agreed_port(started) == candidates(key)[0]
    for future in started:
        assert future.result().address in ("127.0.0.1", "::1")


def test_single_process_gets_a_port_at_once(key):
    with contextlib.closing(rendezvous(ranks_of(key, 0, 1), {}).reserved_port) as port:
        assert 20_000 <= port.number < 32_000


@pytest.mark.slow
def test_more_single_processes_than_candidates_get_distinct_ports():
    script = (
        "from hpctrain.cluster import detect; from hpctrain.cluster.rendezvous import rendezvous\n"
        "print(rendezvous(detect({}), {}).port, flush=True); input()"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(7)
    ]
    ports = [process.stdout.readline() for process in processes]
    for process in processes:
        process.communicate(b"\n", timeout=120)
    assert len(set(ports)) == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        lambda connection: None,
        lambda connection: connection.close(),
        lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"),
        lambda connection: connection.sendall(b'{"failed": "so it says"}\n'),
        lambda connection: connection.sendall(b"\xff" * 100_000),
        echo,
    ],
    ids=["is silent", "hangs up", "greets first", "speaks JSON", "floods", "echoes"],
)
def test_foreign_server_on_the_port_is_skipped(key, answer):
    first, second, *_ = candidates(key)
    with server(first, answer):
        assert agreed_port(join_all(*world(key, 3))) == second


@pytest.mark.slow
def test_port_in_use_on_one_address_is_skipped(key):
    first, second, *_ = candidates(key)
    with contextlib.closing(socket.create_server(("127.0.0.1", first))):
        assert agreed_port(join_all(*world(key, 2))) == second


@pytest.mark.slow
def test_two_jobs_with_the_same_candidates_do_not_mix(key):
    first = next(port_candidates(key))
    other = next(text for i in count() if next(port_candidates(text := f"{key} {i}")) == first)
    futures = join_all(*world(key, 4), *world(other, 4))
    ports = [future.result().port for future in futures]
    assert len({*ports[:4]}) == len({*ports[4:]}) == 1
    assert ports[0] != ports[4]
    for future in (futures[0], futures[4]):
        future.result().reserved_port.close()


def test_reserved_port_is_skipped_and_can_be_bound_by_its_program(key):
    number, second, *_ = candidates(key)
    port = ReservedPort(number)
    port.reserve()
    assert agreed_port(join_all(*world(key, 2))) == second
    with pytest.raises(OSError, match="in use"), contextlib.closing(socket.socket()) as unreserved:
        unreserved.bind(("127.0.0.1", number))
    with socket.create_server(("", number)) as listener:
        assert listener.getsockname()[1] == number
    port.close()


def test_port_of_the_previous_rendezvous_is_used_again(key):
    assert {agreed_port(join_all(*world(key, 3))) for _ in range(8)} == {candidates(key)[0]}


def test_all_ports_in_use_are_listed(key):
    with contextlib.ExitStack() as servers:
        for number in candidates(key):
            with contextlib.suppress(OSError):  # another process already uses the port
                servers.enter_context(socket.create_server(("", number)))
        (text,) = failures(join_all(ranks_of(key, 0, 2)))
    assert all(f"{number} (Address already in use)" in text for number in candidates(key))


@pytest.mark.slow
def test_missing_ranks_are_reported_to_all_present(key):
    present = [ranks for ranks in world(key, 6) if ranks.rank not in (2, 4, 5)]
    start = time.monotonic()
    texts = failures(join_all(*present, timeout_s=SHORT_S))
    assert time.monotonic() - start < LIMIT_S * slowness()
    for text, ranks in zip(texts, present, strict=True):
        assert text.startswith(f"rank {ranks.rank} on ")
        assert (
            f"2 of 5 peers have connected to localhost, port {candidates(key)[0]}; missing: ranks 2, 4-5"
            in text
        )


@pytest.mark.slow
def test_early_rank_times_out_with_missing_ranks(key):
    """Rank 0 would wait longer than the peer."""
    with ThreadPoolExecutor(2) as pool:
        peer = pool.submit(rendezvous, ranks_of(key, 1, 3), {}, timeout_s=SHORT_S)
        main = pool.submit(rendezvous, ranks_of(key, 0, 3), {}, timeout_s=LIMIT_S)
    for text in failures([peer, main]):
        assert "1 of 2 peers have connected" in text
        assert "missing: rank 2" in text


@pytest.mark.slow
def test_late_rank_reports_each_address_it_tried(key):
    failures(join_all(ranks_of(key, 0, 2), timeout_s=0.2))
    (text,) = failures(join_all(ranks_of(key, 1, 2), timeout_s=SHORT_S))
    assert "rank 1 on " in text
    assert "the name localhost: resolves to" in text
    for number in candidates(key):
        # Another program may use the port.
        assert re.search(
            rf"127\.0\.0\.1:{number}: (Connection refused|found a server that is not rank 0)", text
        )


@pytest.mark.slow
def test_foreign_server_is_reported_as_not_rank_0(key):
    first, *_ = candidates(key)
    with server(first, echo):
        (text,) = failures(join_all(ranks_of(key, 1, 2), timeout_s=SHORT_S))
    assert f"127.0.0.1:{first}: found a server that is not rank 0 of this job" in text


@pytest.mark.slow
def test_unresolvable_host_name_is_reported(key):
    other_node = {"node_rank": 1, "num_nodes": 2, "local_world_size": 1, "local_rank": 0}
    (text,) = failures(join_all(ranks_of(key, 1, 2, "no-such-host.invalid", **other_node), timeout_s=SHORT_S))
    assert re.search("the name no-such-host.invalid: (Name or service not known|Temporary failure)", text)
    assert "the name no-such-host: " in text


def test_unresolvable_full_name_is_shortened(key):
    assert agreed_port(join_all(*world(key, 2, host="localhost.no-such-domain.invalid")))


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"},
        {"SLURM_NODE_ALIASES": "other:10.0.0.1:other,cloud-1:127.0.0.1:cloud-1"},
        {"SLURM_NODE_ALIASES": "cloud-1:[::1]:cloud-1"},
    ],
)
def test_address_from_slurm_replaces_the_host_name(key, variables):
    other_node = {"node_rank": 1, "num_nodes": 2, "local_world_size": 1, "local_rank": 0}
    futures = join_all(
        ranks_of(key, 0, 2, "cloud-1.invalid", num_nodes=2, local_world_size=1),
        ranks_of(key, 1, 2, "cloud-1.invalid", **other_node),
        environ=variables,
    )
    assert agreed_port(futures)


@pytest.mark.slow
def test_hanging_resolver_does_not_block_rendezvous(key, monkeypatch):
    hanging = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: hanging.wait(60) and [])
    start = time.monotonic()
    (text,) = failures(join_all(ranks_of(key, 1, 2, "n1"), timeout_s=SHORT_S))
    hanging.set()
    assert time.monotonic() - start < LIMIT_S * slowness()
    assert "the name n1: the name was not resolved within" in text


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_duplicate_rank_is_reported_with_both_processes(key, rank):
    """The number of processes is right, so one rank is missing."""
    futures = join_all(*world(key, 4)[:3], ranks_of(key, rank, 4))
    for text in failures(futures):
        assert re.search(
            rf"two processes claim rank {rank} of 4: process \d+ on \S+ and process \d+ on",
            text,
        )
        assert "hpctrain env" in text


@pytest.mark.slow
def test_rank_that_joins_after_a_failure_gets_it_at_once(key):
    with ThreadPoolExecutor(4) as pool:
        futures = [
            pool.submit(rendezvous, ranks_of(key, rank, 4), {}, timeout_s=LIMIT_S) for rank in (0, 1, 1)
        ]
        wait(futures[1:], timeout=LIMIT_S)
        start = time.monotonic()
        (text,) = failures([pool.submit(rendezvous, ranks_of(key, 2, 4), {}, timeout_s=LIMIT_S)])
        assert time.monotonic() - start < LIMIT_S / 2 * slowness()
    assert "two processes claim rank 1 of 4" in text


@pytest.mark.slow
def test_differing_world_sizes_are_reported_on_both_ranks(key):
    texts = failures(join_all(ranks_of(key, 0, 2), ranks_of(key, 1, 4), timeout_s=SHORT_S))
    for text in texts:
        assert re.search(r"world size is 4 on rank 1 \(process \d+ on \S+\), but 2 on rank 0", text)


def test_malformed_messages_do_no_harm(key):
    number, *_ = candidates(key)
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as connections:
        main = pool.submit(rendezvous, ranks_of(key, 0, 2), {}, timeout_s=LIMIT_S)
        nested = b"[" * 4000 + b"\n"
        for data in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            b"[1]\n",
            b'{"token": 3}\n',
            nested,
            b"x" * 10_000,
            b"\xff\n",
        ):
            connection = connect(number)
            connections.enter_context(connection)
            connection.sendall(data)
        (peer,) = join_all(ranks_of(key, 1, 2))
    assert agreed_port([main, peer]) == number


def connect(port: int) -> socket.socket:
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=60)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def test_rank_that_reconnects_counts_once(key):
    """A launcher may restart a process, or a connection may break."""
    with ThreadPoolExecutor(2) as pool:
        main = pool.submit(rendezvous, ranks_of(key, 0, 3), {}, timeout_s=LIMIT_S)
        script = (
            "import sys, time; from hpctrain.cluster.ranks import Ranks\n"
            "from hpctrain.cluster.rendezvous import rendezvous\n"
            "from hpctrain.cluster.rendezvous import client\n"
            "client._receive_line = lambda c, s, f=client._receive_line: sys.exit(0) if s > 3 else f(c, s)\n"
            f"rendezvous(Ranks(1, 3, 1, 3, 0, 1, 'localhost', 0, 'test', {key!r}), {{}}, timeout_s=30)"
        )
        run_command([sys.executable, "-c", script])
        others = join_all(ranks_of(key, 1, 3), ranks_of(key, 2, 3))
    assert agreed_port([main, *others]) == candidates(key)[0]


def test_more_peers_than_open_files_raise_the_soft_limit():
    """The soft limit is raised during the rendezvous and restored."""
    script = """
import resource
from concurrent.futures import ThreadPoolExecutor
from hpctrain.cluster.rendezvous import rendezvous
from hpctrain.cluster.ranks import Ranks
resource.setrlimit(resource.RLIMIT_NOFILE, (96, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
def rank(number):
    return Ranks(number, 200, number, 200, 0, 1, "127.0.0.1", 0, "test", KEY)
if ROLE == "main":
    held = rendezvous(rank(0), {}).reserved_port
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
else:
    resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1:] * 2)
    with ThreadPoolExecutor(199) as pool:
        print(len({m.port for m in pool.map(lambda number: rendezvous(rank(number), {}), range(1, 200))}))
"""
    header = f"KEY = 'many {time.monotonic_ns()}'\n"
    with ThreadPoolExecutor(2) as pool:
        outputs = [
            pool.submit(run_command, [sys.executable, "-c", f"ROLE = '{role}'\n{header}{script}"])
            for role in ("main", "peers")
        ]
    assert [output.result().stdout for output in outputs] == ["96\n", "1\n"]


@pytest.mark.parametrize("hard", [20, 64])
def test_too_low_hard_limit_is_reported_and_strangers_are_dropped(key, hard):
    """The hard limit is below the number of ranks, or strangers use up the connections."""
    script = f"""
import resource, socket, sys, threading
from hpctrain.cluster.rendezvous import rendezvous
from hpctrain.cluster.ranks import Ranks
from hpctrain.errors import HpctrainError
resource.setrlimit(resource.RLIMIT_NOFILE, ({hard}, {hard}))
try:
    rendezvous(Ranks(0, 30, 0, 30, 0, 1, "127.0.0.1", 0, "test", {key!r}), {{}}, timeout_s={LIMIT_S})
except HpctrainError as error:
    print(type(error).__name__, error)
"""
    number, *_ = candidates(key)
    with (
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as main,
        contextlib.ExitStack() as strangers,
    ):
        if hard > 30:
            strangers.enter_context(connect(number))
            for _ in range(100):
                strangers.enter_context(socket.create_connection(("127.0.0.1", number), timeout=60))
            futures = join_all(*(ranks_of(key, rank, 30) for rank in range(1, 30)))
            assert {future.result().port for future in futures} == {number}
        output = main.communicate(timeout=LIMIT_S)[0]
    if hard < 30:
        assert output.startswith("HpctrainError This process requires 30 connections")
        assert "open only 20 files" in output
    else:
        assert output == ""


@pytest.mark.slow
def test_rank_without_the_secret_is_rejected(key):
    """It knows all ids, which are not secret."""
    secret = new_secret()
    with ThreadPoolExecutor(3) as pool:
        main = pool.submit(rendezvous, ranks_of(key, 0, 2), secret, timeout_s=LIMIT_S)
        stranger = pool.submit(rendezvous, ranks_of(key, 1, 2), new_secret(), timeout_s=SHORT_S)
        (text,) = failures([stranger])
        assert "a server that is not rank 0 of this job" in text
        peer = pool.submit(rendezvous, ranks_of(key, 1, 2), secret, timeout_s=LIMIT_S)
    agreed_port([main, peer])


@pytest.mark.slow
def test_silent_stranger_is_dropped_and_reported_with_its_user(key, monkeypatch):
    monkeypatch.setattr(rendezvous_server, "_PROOF_LIMIT_S", 0.2)
    number, *_ = candidates(key)
    with ThreadPoolExecutor(1) as pool:
        main = pool.submit(rendezvous, ranks_of(key, 0, 2), {}, timeout_s=2.0)
        with connect(number) as connection:
            connection.settimeout(LIMIT_S)
            assert connection.recv(1) == b""
    (text,) = failures([main])
    user = pwd.getpwuid(os.getuid()).pw_name
    assert f"a program run by {user} (uid {os.getuid()}) on 127.0.0.1 connected" in text


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 2},
        {"rank": -1},
        {"rank": True},
        {"left_s": float("inf")},
        {"left_s": float("nan")},
        {"more": 1},
    ],
    ids=str,
)
def test_handshake_with_impossible_values_is_rejected(fields):
    valid = asdict(Handshake(1, 2, "n1", 7))
    assert Handshake.parse(valid) is not None
    assert Handshake.parse({**valid, **fields}) is None


@pytest.mark.slow
def test_wait_message_is_logged_once(key, capfd):
    for rank in (0, 1):
        with pytest.raises(RendezvousError):
            rendezvous(ranks_of(key, rank, 2), {}, timeout_s=1.0, remind_after_s=0.1)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert re.match(
        r"hpctrain: rank 0 on \S+ is waiting for its peers: 0 of 1 peers have connected .* missing: rank 1$",
        lines[0],
    )
    assert re.match(r"hpctrain: rank 1 on \S+ is waiting for its peers: .*Connection refused", lines[1])


def test_given_address_and_port_need_no_rendezvous(key):
    environ = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    result = rendezvous(ranks_of(key, 1, 2), environ)
    assert (result.address, result.port, result.reserved_port) == (
        "localhost",
        next(port_candidates(key)),
        None,
    )


def test_given_port_is_the_only_candidate(key):
    first, *_ = candidates(key)
    environ = {"MASTER_PORT": str(first)}
    assert agreed_port(join_all(*world(key, 2), environ=environ)) == first
    with socket.create_server(("", first)):
        (text,) = failures(join_all(ranks_of(key, 0, 2), environ=environ))
    assert f"cannot bind any of the ports {first} (Address already in use)" in text
