"""`hpctrain serve`: pages for whoever has the token, live, and nothing else for anybody."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
from helpers import chromium
from helpers.commands import environment
from helpers.waiting import wait_for

from hpctrain.cli.serve import RunPages
from hpctrain.rundir import RunDir

START = 1_764_000_000.0
EVENTS = [
    {"time": START, "attempt": 0, "kind": "submitted", "job_id": "7", "backend": "local"},
    {"time": START, "attempt": 0, "kind": "started", "nodes": 1, "world_size": 1, "hosts": ["n1"]},
    {"time": START + 100, "attempt": 0, "kind": "finished", "state": "COMPLETED", "exit_code": 0},
]


class Served:
    """A server in a process of its own, and how to ask it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-u", "-m", "hpctrain", "serve", "--runs-dir", str(folder)]
        self.errors = folder.with_name("errors.txt")
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", line)
        assert match, line
        self.address, self.port, self.token = match[0], int(match[1]), match[2]

    def ask(self, path: str, method: str = "GET", *, token: bool = True, **headers: str):
        """Status, headers and text of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if token:
            sent["Authorization"] = f"Bearer {self.token}"
        connection.request(method, path, headers=sent)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, answer.headers, text


def write(run: RunDir, events: list[dict], steps: range) -> None:
    run.path.mkdir(parents=True, exist_ok=True)
    with run.events.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    with run.metrics.open("a") as file:
        for step in steps:
            line = {"step": step, "loss": 1 / step, "time": START + step, "attempt": 0}
            file.write(json.dumps(line) + "\n")


SPEC = """\
script: /home/me/train.py
name: digits
run_id: {name}
run_dir: {path}
backend: local
python: /usr/bin/python3
workdir: /home/me
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "runs"
    for name in ("digits", "a b&<i>"):
        run = RunDir(folder / name)
        write(run, EVENTS, range(1, 51))
        run.spec.write_text(SPEC.format(name=json.dumps(name), path=json.dumps(str(run.path))))
    (folder.parent / "secret.txt").write_text("secret")
    (folder / "secret.txt").write_text("secret")
    outside = RunDir(folder.parent / "outside")
    write(outside, EVENTS, range(1, 3))
    outside.spec.write_text(SPEC.format(name="outside", path=json.dumps(str(outside.path))))
    return folder


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """A server that ends with Ctrl-C, and has had nothing to complain about."""
    served = Served(folder)
    try:
        yield served
    finally:
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(20) == 0
        served.process.stdout.close()
    assert served.errors.read_text() == ""


@pytest.fixture(scope="module")
def served(folder) -> Iterator[Served]:
    with serving(folder) as served:
        yield served


@pytest.mark.slow
def test_all_runs_and_the_page_of_each(served):
    status, headers, text = served.ask("/")
    assert status == 200
    assert "a b&amp;&lt;i&gt;" in text
    assert headers["Cache-Control"] == "no-store"
    addresses = re.findall(r'href="(/run/[^"]*)"', text)
    assert sorted(addresses) == ["/run/a%20b%26%3Ci%3E", "/run/digits"]
    for address in addresses:
        status, _, text = served.ask(address)
        assert status == 200
        assert '<table id="ledger">' in text
        assert "connect-src 'self'" in text


def test_the_token_becomes_a_cookie_that_no_script_and_no_other_page_has(served):
    path = served.address.partition(str(served.port))[2]
    status, headers, text = served.ask(path, token=False)
    assert (status, headers["Location"], text) == (303, "/", "")
    cookie = headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert served.ask("/", token=False, Cookie=cookie.split(";")[0])[0] == 200


def test_a_link_to_a_run_leads_to_its_page(served):
    for path in ("/run/digits", "/run/a%20b%26%3Ci%3E"):
        status, headers, _ = served.ask(f"{path}?token={served.token}", token=False)
        assert (status, headers["Location"]) == (303, path)
        cookie = headers["Set-Cookie"].split(";")[0]
        assert served.ask(headers["Location"], token=False, Cookie=cookie)[0] == 200


@pytest.mark.parametrize(
    "path", ["//evil.example/", "/\\\\evil.example", "/run/..%2F..%2Fx", "/run//evil.example", "/x"]
)
def test_a_link_with_the_token_leads_to_no_other_place(served, path):
    status, headers, _ = served.ask(f"{path}?token={served.token}", token=False)
    location = headers.get("Location")
    assert status in (303, 404)
    assert location is None or re.fullmatch(r"/(run/[^/\\]+)?", location)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer x"},
        {"Cookie": "hpctrain=x; ]["},
        {"Cookie": "\xff=\xfe"},
    ],
)
@pytest.mark.parametrize("path", ["/", "/run/digits", "/?token=x", "/?token=", "/?" + "token=x&" * 8])
def test_without_the_token_there_is_nothing(served, path, headers):
    status, answer, text = served.ask(path, token=False, **headers)
    assert status == 403
    assert "digits" not in text
    assert "Set-Cookie" not in answer


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Host": "127.0.0.1"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_pages_of_others_get_nothing_even_with_the_token(served, headers):
    status, _, text = served.ask("/run/digits", **headers)
    assert status == 403
    assert "digits" not in text


def test_the_page_itself_may_ask(served):
    own = f"127.0.0.1:{served.port}"
    for host in (own, f"localhost:{served.port}"):
        asked = {"Host": host, "Origin": f"http://{host}", "Sec_Fetch_Site": "same-origin"}
        assert served.ask("/run/digits", **asked)[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/run/../secret.txt",
        "/run/..%2Fsecret.txt",
        "/run/..%2Foutside",
        "/run/..",
        "/run/.",
        "/run/",
        "/run/secret.txt",
        "/run/%2e%2e%2foutside",
        "/run/%252e%252e%252foutside",
        "/run/digits%2F..%2F..%2Foutside",
        "/run/digits/events.jsonl",
        "/run/digits%2Fevents.jsonl",
        "/run/digits%00",
        "/../secret.txt",
        "/secret.txt",
        "//secret.txt",
        "/static/report.js",
        "http://evil.example/",
        "/run/" + quote("/etc/passwd", safe=""),
    ],
)
def test_no_path_leads_out_of_the_runs(served, path):
    status, _, text = served.ask(path)
    assert status in (403, 404)
    assert "secret" not in text
    assert "outside" not in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "X"])
def test_nothing_can_be_changed(served, method):
    assert served.ask("/run/digits", method)[0] == 405


def test_looking_writes_nothing(served, folder):
    def state() -> dict[str, str]:
        files = (path for path in folder.rglob("*") if path.is_file())
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    before = state()
    served.ask("/")
    served.ask("/run/digits")
    served.ask("/run/digits", "HEAD")
    assert state() == before


def test_what_has_not_changed_is_not_sent_again(served, folder):
    _, headers, _ = served.ask("/run/digits")
    tag = headers["ETag"]
    status, _, text = served.ask("/run/digits", If_None_Match=tag)
    assert (status, text) == (304, "")
    write(RunDir(folder / "digits"), [], range(51, 53))
    # A page is kept for a few times as long as it took to make it.
    wait_for(
        lambda: served.ask("/run/digits", If_None_Match=tag)[0] == 200, 20, "the page with the new steps"
    )
    assert served.ask("/run/digits")[1]["ETag"] != tag


@pytest.mark.parametrize("path", ["//[x/", "/?" + "token=x&" * 80, "/?token=%ff%fe"])
def test_what_is_no_address_gets_a_word_and_nothing_is_printed(served, path):
    assert served.ask(path)[0] < 500


def test_strangers_that_say_nothing_keep_nobody_out(served):
    """More of them than are listened to at once; the oldest makes room."""
    with ExitStack() as stack:
        for _ in range(100):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", served.port), 5))
            one.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
        assert served.ask("/run/digits")[0] == 200
        tasks = Path(f"/proc/{served.process.pid}/task")
        wait_for(lambda: len(list(tasks.iterdir())) < 40, 20, "the threads of those that were let go")


def test_a_link_that_leads_out_of_the_folder_is_not_followed(tmp_path):
    for folder in ("runs/inside", "outside"):
        run = RunDir(tmp_path / folder)
        write(run, EVENTS, range(1, 3))
        run.spec.write_text(SPEC.format(name=run.run_id, path=json.dumps(str(run.path))))
    os.symlink(tmp_path / "outside", tmp_path / "runs/linked")
    (tmp_path / "secret.txt").write_text("secret")
    run = RunDir(tmp_path / "runs/inside")
    run.code.mkdir()
    (run.code / "submission-000.json").write_text('{"commit": "abc"}')
    os.symlink(tmp_path / "secret.txt", run.code / "submission-000.diff")
    os.mkfifo(run.environment)
    with serving(tmp_path / "runs") as served:
        assert "Not shown: 1 link that points outside this folder." in served.ask("/")[2]
        assert served.ask("/run/linked")[0] == 404
        status, _, text = served.ask("/run/inside")
        assert status == 200
        assert "commit abc" in text
        assert "secret" not in text


def test_a_page_that_takes_long_is_made_once_for_all_who_look_and_not_at_every_change(folder, monkeypatch):
    pages, made = RunPages(folder), []

    def render(status: object) -> str:
        made.append(status)
        time.sleep(0.2)
        return "the page"

    monkeypatch.setattr(pages, "_render", render)
    tag = pages.tag("digits")
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(pages.page, ["digits"] * 4)) == {"the page"}
    write(RunDir(folder / "digits"), [], range(101, 103))
    assert pages.tag("digits") == tag
    assert len(made) == 1
    wait_for(lambda: pages.tag("digits") != tag, 10, "the time until it is worth another")
    pages.page("digits")
    assert len(made) == 2


def test_it_listens_on_this_machine_only(served):
    other = socket.gethostbyname(socket.gethostname())
    if other.startswith("127.0.0.1"):
        other = "127.0.0.2"
    with socket.socket() as one:
        one.settimeout(5)
        assert one.connect_ex((other, served.port)) != 0


def test_a_port_that_is_taken(hpctrain, served):
    done = hpctrain("serve", "--port", str(served.port))
    assert done.returncode == 2
    assert f"port {served.port} (--port)" in done.stderr


@pytest.mark.ranks
def test_a_page_in_a_browser_follows_the_run(served, folder, tmp_path):
    if chromium.find() is None:
        pytest.skip("needs a Chromium: scripts/install_for_tests.sh installs one")
    run = RunDir(folder / "digits")
    with chromium.Chromium(tmp_path / "profile") as browser:
        browser.open(served.address)
        assert browser.evaluate("document.querySelectorAll('#runs tbody tr').length") == 2
        browser.open(f"http://127.0.0.1:{served.port}/run/digits")
        browser.evaluate("document.getElementById('loss-chart-log').click()")
        steps = "document.querySelector('.figures dd').textContent"
        before = int(browser.evaluate(steps))
        write(run, [], range(before + 1, before + 21))
        wait_for(lambda: browser.evaluate(steps) == str(before + 20), 30, "the new steps in the page")
        assert browser.evaluate("document.getElementById('loss-chart-log').ariaPressed") == "true"
        assert browser.evaluate("document.documentElement.dataset.state") == "live"
        assert browser.evaluate("document.querySelectorAll('#loss-chart canvas').length") == 1
        assert browser.console == []
        assert {address.split("/")[2] for address in browser.requests} == {f"127.0.0.1:{served.port}"}


def test_a_folder_that_is_not_there_yet(tmp_path):
    with serving(tmp_path / "runs") as served:
        assert "This folder has no runs yet." in served.ask("/")[2]
        os.mkdir(tmp_path / "runs")
        assert served.ask("/")[0] == 200
