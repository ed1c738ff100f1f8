"""Report as one JSON document."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hpctrain.telemetry.report.advice import advise
from hpctrain.telemetry.report.run_data import RunData


def json_report(run_data: RunData) -> dict[str, Any]:
    """Return the document printed by `--json`."""
    breakdown = run_data.breakdown
    lowest = run_data.curves.lowest("loss")
    return {
        "run_id": run_data.run_id,
        "folder": run_data.folder,
        "state": run_data.state,
        "cause": run_data.cause,
        "start": run_data.start,
        "end": run_data.end,
        "wall_us": breakdown.wall_us,
        "reports_steps": run_data.reports_steps,
        "step": run_data.step,
        "loss": run_data.curves.last("loss"),
        "loss_is_no_number_since": run_data.curves.no_number_since("loss"),
        "hparams": run_data.hparams,
        "best": None if run_data.best is None else asdict(run_data.best),
        "lowest_loss": None if lowest is None else {"step": lowest[0], "loss": lowest[1]},
        "last": {name: run_data.curves.last(name) for name in run_data.curves.names},
        "steps_per_s": run_data.steps_per_s,
        "lost_steps": breakdown.lost_steps,
        "ledger": [
            {
                "what": what.value,
                "us": us if (known := what in breakdown.measured) else None,
                "measured": known,
            }
            for what, us in breakdown.totals_us.items()
        ],
        **asdict(run_data.goodput),
        "energy": None if run_data.energy is None else asdict(run_data.energy),
        "attempts": [
            {**asdict(attempt), "interrupted": attempt.interrupted} for attempt in run_data.attempts
        ],
        "checkpoints": [asdict(checkpoint) for checkpoint in run_data.checkpoints],
        "gpus": [
            {"gpu": row, **{each.quantity.field: each.means[index] for each in run_data.devices.maps}}
            for index, row in enumerate(run_data.devices.rows)
        ],
        "nodes": [
            {
                **asdict(node),
                **{each.quantity.field: each.means[index] for each in run_data.devices.node_maps},
            }
            for index, node in enumerate(run_data.devices.nodes)
        ],
        "advice": [asdict(one) for one in advise(run_data)],
        "environment": run_data.environment,
        "spec": run_data.spec,
        "code": [
            {"commit": code.commit, "changed": code.changed, "new_files": code.new_files}
            for code in run_data.codes
        ],
        "again": run_data.resubmit_command,
        "notes": run_data.notes,
    }
