"""Report as one JSON document."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hpctrain.telemetry.report.advice import advise
from hpctrain.telemetry.report.run_data import RunData


def json_report(facts: RunData) -> dict[str, Any]:
    """Return the document that `--format json` prints."""
    ledger = facts.ledger
    lowest = facts.curves.lowest("loss")
    return {
        "run_id": facts.run_id,
        "folder": facts.folder,
        "state": facts.state,
        "cause": facts.cause,
        "start": facts.start,
        "end": facts.end,
        "wall_us": ledger.wall_us,
        "reports_steps": facts.reports_steps,
        "step": facts.step,
        "loss": facts.curves.last("loss"),
        "loss_is_no_number_since": facts.curves.no_number_since("loss"),
        "lowest_loss": None if lowest is None else {"step": lowest[0], "loss": lowest[1]},
        "last": {name: facts.curves.last(name) for name in facts.curves.names},
        "steps_per_s": facts.steps_per_s,
        "lost_steps": ledger.lost_steps,
        "ledger": [
            {
                "what": what.value,
                "us": us if (known := what in ledger.measured) else None,
                "measured": known,
            }
            for what, us in ledger.totals_us.items()
        ],
        **asdict(facts.goodput),
        "attempts": [{**asdict(attempt), "interrupted": attempt.interrupted} for attempt in facts.attempts],
        "checkpoints": [asdict(checkpoint) for checkpoint in facts.checkpoints],
        "gpus": [
            {"gpu": row, **{each.quantity.field: each.means[index] for each in facts.devices.maps}}
            for index, row in enumerate(facts.devices.rows)
        ],
        "nodes": [
            {
                **asdict(node),
                **{each.quantity.field: each.means[index] for each in facts.devices.node_maps},
            }
            for index, node in enumerate(facts.devices.nodes)
        ],
        "advice": [asdict(one) for one in advise(facts)],
        "environment": facts.environment,
        "spec": facts.spec,
        "code": [
            {"commit": code.commit, "changed": code.changed, "new_files": code.new_files}
            for code in facts.codes
        ],
        "again": facts.again,
        "notes": facts.notes,
    }
