"""Metrics from the local files of trackers, as (name, step, value)."""

import csv
import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

Points = list[tuple[str, int, float]]


def csv_points(folder: Path) -> Points:
    rows = csv.DictReader((folder / "metrics.csv").open())
    return [
        (name, int(row["step"]), float(value))
        for row in rows
        for name, value in row.items()
        if value and name not in ("step", "epoch", "time", "attempt")
    ]


def tensorboard_points(folder: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [
        (tag, event.step, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)
    ]


def mlflow_points(folder: Path) -> Points:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("hpctrain").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["global_batch_size"] == "32"
    return [
        (name, metric.step, metric.value)
        for name in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, name)
    ]


def wandb_points(folder: Path) -> Points:
    from wandb.proto import wandb_internal_pb2

    points, ids = [], set()
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for data in _records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if record.HasField("history"):
                items = {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in record.history.item
                }
                points += [
                    (name, items["step"], items[name])
                    for name in items
                    if name in ("loss", "val_loss") or name.startswith("gpu/")
                ]
    assert len(ids) == 1
    return points


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log: blocks of 32 KiB, the first after a header of 7 bytes."""
    offset, record = 7, b""
    while offset + 7 <= len(data):
        remaining = 32768 - offset % 32768
        if remaining < 7:
            offset += remaining
            continue
        _, length, kind = struct.unpack("<IHB", data[offset : offset + 7])
        record += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield record
            record = b""


def neptune_points(folder: Path) -> Points:
    from neptune_api.proto.neptune_pb.ingest.v1.common_pb2 import UpdateRunSnapshot

    points, ids = [], set()
    for path in (folder / "neptune").glob("*/run_operations.sqlite3"):
        with sqlite3.connect(path) as connection:
            ids |= {row[0] for row in connection.execute("SELECT run_id FROM metadata")}
            rows = connection.execute("SELECT operation FROM run_operations WHERE operation_type = 0")
            for (operation,) in rows:
                update = UpdateRunSnapshot.FromString(operation)
                step = update.step.whole + update.step.micro / 1e6
                points += [(name, int(step), value.float64) for name, value in update.append.items()]
        connection.close()
    assert len(ids) == 1
    return points
