from __future__ import annotations

from itertools import islice

from hpctrain.cluster.port_candidates import port_candidates


def candidates(key: str, count: int = 100) -> list[int]:
    return list(islice(port_candidates(key), count))


def test_candidates_avoid_service_and_ephemeral_ports():
    assert all(20_000 <= port < 32_000 for port in candidates("/7.0.0", 10_000))


def test_candidates_are_the_same_in_every_python_version():
    # Ranks of one job must agree, whatever Python each runs.
    assert candidates("cluster//4711.0.0", 3) == [23918, 21042, 28008]


def test_successive_steps_share_few_candidates():
    jobs = [set(candidates(f"cluster//{job}.{step}.0", 5)) for job in range(50) for step in range(10)]
    duplicates = sum(len(ports) for ports in jobs) - len(set.union(*jobs))
    assert duplicates < 400  # of 2,500 ports out of 12,000, about 240 coincide by chance
