"""When it is worth to give an allocation back and ask for a larger one."""

from __future__ import annotations

import pytest

from hpctrain.supervisor.scale_up import should_scale_up


@pytest.mark.parametrize(
    ("nodes", "then", "left_s", "pause_s", "worth"),
    [
        (2, 4, 3600, 180, True),
        # 4 × (400 − 180) = 880 = 1.1 × 2 × 400: no more than the margin.
        (2, 4, 400, 180, False),
        (2, 4, 401, 180, True),
        (3, 4, 3600, 180, True),
        (31, 32, 86400, 180, False),
        (4, 4, 86400, 180, False),
        (2, 4, 180, 180, False),
        (2, 4, 10, 180, False),
    ],
)
def test_more_nodes_are_worth_a_pause(nodes, then, left_s, pause_s, worth):
    assert should_scale_up(nodes, then, left_s, pause_s) is worth
