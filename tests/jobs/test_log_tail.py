import json

from hpctrain.records.log_tail import FileTail, RecordTail, read_last_records


def test_tail_reads_new_text_without_splitting_characters(tmp_path):
    path = tmp_path / "log"
    tail = FileTail(path)
    assert tail.read() == ""
    with open(path, "ab") as file:
        file.write("aé".encode()[:2])
        file.flush()
        assert tail.read() == "a"
        file.write("é".encode()[1:])
        file.flush()
    assert tail.read() == "é"
    path.write_text("x")
    assert tail.read() == "x"


def test_tail_returns_only_complete_records(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = RecordTail(path, dict)
    path.write_text('{"a": 1}\n{"a"')
    assert tail.read() == [{"a": 1}]
    with open(path, "a") as file:
        file.write(": 2}\ntorn\n")
    assert tail.read() == [{"a": 2}]


def test_last_records_are_read_backwards_across_blocks(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = [{"step": i, "text": "x" * (i % 977)} for i in range(2000)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"torn')
    assert list(read_last_records(path, dict)) == records[::-1]
