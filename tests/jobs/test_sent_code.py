import json
from pathlib import Path

import pytest

from hpctrain.errors import SpecError
from hpctrain.jobs.submit.code_snapshot import SENT_CODE_FILE, SentCode


def send(folder: Path, **changes: object) -> None:
    record = {"commit": None, "files": {"a.py": True, "gone.py": False}, "diff": "", **changes}
    (folder / SENT_CODE_FILE).write_text(json.dumps(record))


def test_only_files_that_were_sent_and_exist_belong_to_the_code(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    for name in ("a.py", "left by an earlier submission.py"):
        (tmp_path / name).touch()
    assert SentCode.containing(tmp_path / "sub") is None
    send(tmp_path)
    sent = SentCode.containing(tmp_path / "sub")
    assert sent is not None
    assert sent.files() == {"a.py": True}


def test_a_repository_in_the_folder_takes_precedence(tmp_path: Path):
    (tmp_path / "clone" / ".git").mkdir(parents=True)
    send(tmp_path)
    assert SentCode.containing(tmp_path / "clone") is None


@pytest.mark.parametrize("changes", [{"files": {"../a": True}}, {"files": {"/etc/a": True}}, {"files": []}])
def test_damaged_lists_are_refused(tmp_path: Path, changes: dict[str, object]):
    send(tmp_path, **changes)
    with pytest.raises(SpecError, match=r"\.hpctrain-code\.json"):
        SentCode.containing(tmp_path)
