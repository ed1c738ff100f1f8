"""Readers return what the writers of the same records wrote."""

from __future__ import annotations

import pytest
import torch
from helpers.fuzzing import FOLDER
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain import files
from hpctrain.authentication import Signed, seal, unseal
from hpctrain.checkpoint.format.manifest import FileEntry, Manifest
from hpctrain.checkpoint.io import messages
from hpctrain.errors import Unauthenticated
from hpctrain.records.lease import LeaseHolder, newest_lease
from hpctrain.records.log_tail import read_last_records
from hpctrain.rundir import RunDir
from hpctrain.runtime.cpu_binding import _read_cpus, format_cpus
from hpctrain.supervisor.failures.failure_files import RankFailure, _read, _write
from hpctrain.telemetry.loggers.dispatcher import LoggerState
from hpctrain.telemetry.report.jsonl import read_jsonl

FEW = settings(max_examples=25, deadline=None, derandomize=True)
RUN = RunDir(FOLDER / "round-trips")

counts = st.integers(0, 2**53 - 1)
floats = st.floats(allow_nan=False)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | floats | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
records = st.lists(st.dictionaries(st.text(), plain, max_size=4), max_size=6)


@FEW
@given(records)
def test_appended_json_lines_are_read_back_by_every_reader(written):
    path = FOLDER / "lines.jsonl"
    path.unlink(missing_ok=True)
    for record in written:
        files.append_json_line(path, record)
    assert list(files.read_json_lines(path)) == written
    assert list(read_last_records(path)) == written[::-1]
    assert read_jsonl(path) == written


@FEW
@given(st.builds(FileEntry, st.text(), counts, st.text()), counts, counts, floats, st.none() | floats)
def test_manifest_is_read_back_unless_a_byte_is_missing(entry, step, world_size, time, score):
    manifest = Manifest(step, world_size, time, score, (entry,))
    assert Manifest.decode(manifest.encode(), FOLDER) == manifest
    with pytest.raises(Exception, match="is corrupt"):
        Manifest.decode(manifest.encode()[:-1], FOLDER)


@FEW
@given(
    st.builds(LeaseHolder, st.text(max_size=20), counts, st.text(max_size=20), counts, counts, st.booleans())
)
def test_lease_is_read_back(holder):
    path = RUN.lease(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(holder.text())
    state = newest_lease(RUN)
    assert state is not None
    assert state.holder == holder


@FEW
@given(st.binary(), st.binary(), st.integers(0, 255))
def test_sealed_content_opens_only_unchanged(key, content, position):
    sealed = seal(key, content, "context")
    assert unseal(key, sealed, "context") == content
    changed = bytearray(sealed)
    changed[position % len(changed)] ^= 1
    with pytest.raises(Unauthenticated):
        unseal(key, bytes(changed), "context")


@FEW
@given(records)
def test_signed_messages_arrive_in_order(sent):
    sender, receiver = Signed(b"key"), Signed(b"key")
    assert [receiver.open(sender.seal(message)) for message in sent] == sent


@FEW
@given(st.none() | st.text(), counts, st.integers(-1, 99), st.dictionaries(st.text(), counts, max_size=3))
def test_state_of_a_logger_is_read_back(known, offset, attempt, steps):
    state = LoggerState(FOLDER / "logger.json", known, offset, attempt, steps)
    state.save()
    assert LoggerState.load(state.path) == state


@FEW
@given(st.text(), st.text(), st.none() | counts, st.booleans(), st.lists(st.text(), max_size=3))
def test_failure_is_read_back(error, message, order, final, classes):
    failure = RankFailure(3, "n1", "exception", error, message, "log", order, 1.0, final, tuple(classes))
    _write(RUN, 0, failure)
    assert list(_read(RUN, 0)) == [failure]


@FEW
@given(plain | st.tuples(plain, plain) | st.dictionaries(counts, plain, max_size=3))
def test_packed_message_is_unpacked(value):
    tensors = torch.arange(3.0), torch.tensor(True)
    packed = messages._pack([value, *tensors, b"bytes", torch.bfloat16], "a message")
    unpacked, *rest = messages._unpack(packed.text, packed.tensors, "a message")
    assert unpacked == value
    assert torch.equal(rest[0], tensors[0])
    assert rest[2:] == [b"bytes", torch.bfloat16]


@FEW
@given(st.sets(st.integers(0, 500)))
def test_cpus_are_read_back(cpus):
    path = FOLDER / "cpulist"
    path.write_text(format_cpus(cpus))
    assert _read_cpus(path) == cpus
