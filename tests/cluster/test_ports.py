from __future__ import annotations

from itertools import islice

from hpctrain.cluster.port_candidates import port_candidates


def candidates(key: str, count: int = 100) -> list[int]:
    return list(islice(port_candidates(key), count))


def test_ports_lie_where_neither_services_nor_the_kernel_take_them():
    assert all(20_000 <= port < 32_000 for port in candidates("/7.0.0", 10_000))


def test_the_same_key_gives_the_same_ports_in_every_version():
    # Ranks of one job must agree, whatever Python each runs.
    assert candidates("cluster//4711.0.0", 3) == [23918, 21042, 28008]


def test_steps_that_follow_each_other_share_hardly_a_port():
    jobs = [set(candidates(f"cluster//{job}.{step}.0", 5)) for job in range(50) for step in range(10)]
    together = sum(len(ports) for ports in jobs) - len(set.union(*jobs))
    assert together < 400  # of 2,500 ports out of 12,000 some 240 coincide by chance
