from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.sandbox import etc_hosts

ADDRESSES = {"box-1": "127.26.1.1", "box-2": "127.26.1.2"}


def _file(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "hosts"
    path.write_bytes(content)
    return path


def test_each_node_gets_a_line(tmp_path: Path) -> None:
    path = _file(tmp_path, b"127.0.0.1 localhost\n")
    path.chmod(0o640)
    before = path.stat()
    etc_hosts.add_hosts("box", ADDRESSES, path)
    etc_hosts.add_hosts("box-2", {"box-2-1": "127.26.2.1"}, path)
    other_lines = ["127.26.2.1 box-2-1 # hpctrain sandbox box-2"]
    lines = ["127.26.1.1 box-1 # hpctrain sandbox box", "127.26.1.2 box-2 # hpctrain sandbox box"]
    assert path.read_text().splitlines() == [*other_lines, *lines, "127.0.0.1 localhost"]
    etc_hosts.remove_hosts("box", path)
    assert path.read_text().splitlines() == [*other_lines, "127.0.0.1 localhost"]
    assert (path.stat().st_ino, path.stat().st_mode) == (before.st_ino, before.st_mode)


@settings(deadline=None)
@given(content=st.binary())
def test_other_lines_are_unchanged(tmp_path_factory: object, content: bytes) -> None:
    path = _file(tmp_path_factory.mktemp("etc"), content)  # type: ignore[attr-defined]
    etc_hosts.add_hosts("box", ADDRESSES, path)
    etc_hosts.remove_hosts("box", path)
    assert path.read_bytes() == content
