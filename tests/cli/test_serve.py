"""`hpctrain serve`: live pages for clients with the token, and nothing for others."""

import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from helpers import chromium
from helpers.commands import environment
from helpers.waiting import wait_for

from hpctrain.rundir import RunDir

#: They start many processes, so `make test-fast` leaves them out.
pytestmark = pytest.mark.slow

START = 1_764_000_000.0
EVENTS = [
    {"time": START, "attempt": 0, "kind": "submitted", "job_id": "7", "backend": "local"},
    {"time": START, "attempt": 0, "kind": "started", "nodes": 1, "world_size": 1, "hosts": ["n1"]},
    {"time": START + 100, "attempt": 0, "kind": "finished", "state": "COMPLETED", "exit_code": 0},
]


class ReportServer:
    """A server in its own process, with an HTTP client."""

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

    def request(self, path: str, method: str = "GET", *, token: bool = True, **headers: str):
        """Return status, headers and body of a response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        sent_headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if token:
            sent_headers["Authorization"] = f"Bearer {self.token}"
        connection.request(method, path, headers=sent_headers)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, response.headers, text


SPEC = """\
script: /home/me/train.py
name: digits
run_id: {name}
run_dir: {path}
backend: local
python: /usr/bin/python3
workdir: /home/me
args: [--lr, "0.1"]
"""


def write_run(folder: Path, steps: range) -> RunDir:
    """Write a completed run that was submitted."""
    run = RunDir(folder)
    run.path.mkdir(parents=True)
    run.events.write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    run.spec.write_text(SPEC.format(name=json.dumps(run.run_id), path=json.dumps(str(run.path))))
    add_steps(run, steps)
    return run


def add_steps(run: RunDir, steps: range) -> None:
    with run.metrics.open("a") as file:
        for step in steps:
            line = {"step": step, "loss": 1 / step, "time": START + step, "attempt": 0}
            file.write(json.dumps(line) + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "runs"
    for name in ("digits", "a b&<i>"):
        write_run(folder / name, range(1, 51))
    (folder.parent / "secret.txt").write_text("secret")
    (folder / "secret.txt").write_text("secret")
    log = RunDir(folder / "digits").rank_log(0, 0)
    log.parent.mkdir(parents=True)
    log.write_text("first line\n\x1b[31m<b>last</b> line\n")
    os.symlink(folder.parent / "secret.txt", RunDir(folder / "digits").rank_log(0, 1))
    write_run(folder.parent / "outside", range(1, 3))
    return folder


@contextmanager
def serving(folder: Path) -> Iterator[ReportServer]:
    """A server that is ended by Ctrl-C and must print no errors."""
    server = ReportServer(folder)
    try:
        yield server
    finally:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(120) == 0
        server.process.stdout.close()
    assert server.errors.read_text() == ""


@pytest.fixture(scope="module")
def server(folder) -> Iterator[ReportServer]:
    with serving(folder) as server:
        yield server


def test_index_lists_all_runs_and_links_to_their_pages(server):
    status, headers, text = server.request("/")
    assert status == 200
    assert "a b&amp;&lt;i&gt;" in text
    assert "lr=0.1" in text
    assert headers["Cache-Control"] == "no-store"
    addresses = re.findall(r'href="(/run/[^"]*)"', text)
    assert sorted(addresses) == ["/run/a%20b%26%3Ci%3E", "/run/digits"]
    for address in addresses:
        status, _, text = server.request(address)
        assert status == 200
        assert '<table id="ledger">' in text
        assert "connect-src 'self'" in text


def test_token_becomes_an_http_only_same_site_cookie(server):
    path = "/run/a%20b%26%3Ci%3E"
    status, headers, text = server.request(f"{path}?token={server.token}", token=False)
    assert (status, headers["Location"], text) == (303, path, "")
    cookie = headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert server.request(path, token=False, Cookie=cookie.split(";")[0])[0] == 200


@pytest.mark.parametrize(
    "path", ["//evil.example/", "/\\\\evil.example", "/run/..%2F..%2Fx", "/run//evil.example", "/x"]
)
def test_link_with_token_redirects_nowhere_else(server, path):
    status, headers, _ = server.request(f"{path}?token={server.token}", token=False)
    location = headers.get("Location")
    assert status in (303, 404)
    assert location is None or re.fullmatch(r"/(run/[^/\\]+)?", location)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer x"}, {"Cookie": "hpctrain=x; ]["}])
@pytest.mark.parametrize("path", ["/", "/run/digits", "/?token=x", "/?token="])
def test_requests_without_token_are_forbidden(server, path, headers):
    status, response_headers, text = server.request(path, token=False, **headers)
    assert status == 403
    assert "digits" not in text
    assert "Set-Cookie" not in response_headers


@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Host": "127.0.0.1"}, {"Origin": "null"}, {"Sec_Fetch_Site": "same-site"}],
)
def test_cross_site_requests_are_forbidden_even_with_the_token(server, headers):
    status, _, text = server.request("/run/digits", **headers)
    assert status == 403
    assert "digits" not in text


@pytest.mark.parametrize(
    "path",
    [
        "/run/../secret.txt",
        "/run/..%2Foutside",
        "/run/.",
        "/run/secret.txt",
        "/run/%252e%252e%252foutside",
        "/run/digits%2F..%2F..%2Foutside",
        "/run/digits/events.jsonl",
        "/run/digits%00",
        "//secret.txt",
        "http://evil.example/",
    ],
)
def test_no_path_leads_outside_the_runs_folder(server, path):
    status, _, text = server.request(path)
    assert status in (403, 404)
    assert "secret" not in text
    assert "outside" not in text


@pytest.mark.parametrize("method", ["POST", "DELETE", "X"])
def test_other_methods_are_not_allowed(server, method):
    assert server.request("/run/digits", method)[0] == 405


def test_unchanged_page_is_not_sent_again(server, folder):
    _, headers, _ = server.request("/run/digits")
    tag = headers["ETag"]
    status, _, text = server.request("/run/digits", If_None_Match=tag)
    assert (status, text) == (304, "")
    add_steps(RunDir(folder / "digits"), range(51, 53))
    # A page is cached for a few times as long as its rendering took.
    wait_for(
        lambda: server.request("/run/digits", If_None_Match=tag)[0] == 200, 20, "the page with the new steps"
    )
    assert server.request("/run/digits")[1]["ETag"] != tag


def test_idle_connections_do_not_block_others(server):
    """More than are served at once; the oldest is closed."""
    with ExitStack() as stack:
        for _ in range(100):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 5))
            connection.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
        assert server.request("/run/digits")[0] == 200
        tasks = Path(f"/proc/{server.process.pid}/task")
        wait_for(lambda: len(list(tasks.iterdir())) < 40, 20, "the threads of those that were let go")


def test_runs_folder_may_be_missing_and_symlinks_out_of_it_are_not_followed(tmp_path):
    with serving(tmp_path / "runs") as server:
        assert "This folder has no runs yet." in server.request("/")[2]
        write_run(tmp_path / "outside", range(1, 3))
        run = write_run(tmp_path / "runs/inside", range(1, 3))
        os.symlink(tmp_path / "outside", tmp_path / "runs/linked")
        (tmp_path / "secret.txt").write_text("secret")
        run.code.mkdir()
        (run.code / "submission-000.json").write_text('{"commit": "abc"}')
        os.symlink(tmp_path / "secret.txt", run.code / "submission-000.diff")
        os.mkfifo(run.environment)
        assert "Not shown: 1 link that points outside this folder." in server.request("/")[2]
        assert server.request("/run/linked")[0] == 404
        status, _, text = server.request("/run/inside")
        assert status == 200
        assert "commit abc" in text
        assert "secret" not in text


def test_server_listens_on_loopback_only(server):
    other = socket.gethostbyname(socket.gethostname())
    if other.startswith("127.0.0.1"):
        other = "127.0.0.2"
    with socket.socket() as client:
        client.settimeout(5)
        assert client.connect_ex((other, server.port)) != 0


def test_port_in_use_is_refused(hpctrain, server):
    result = hpctrain("serve", "--port", str(server.port))
    assert result.returncode == 2
    assert f"port {server.port} (--port)" in result.stderr


@pytest.mark.ranks
def test_page_in_a_browser_follows_the_run(server, folder, tmp_path):
    if chromium.find() is None:
        pytest.skip("needs a Chromium: scripts/install_for_tests.sh installs one")
    run = RunDir(folder / "digits")
    with chromium.Chromium(tmp_path / "profile") as browser:
        browser.open(server.address)
        assert browser.evaluate("document.querySelectorAll('#runs tbody tr').length") == 2
        browser.focus_with_tab("digits")
        browser.press("Enter")
        wait_for(lambda: browser.evaluate("document.title").startswith("digits"), 30, "the page of the run")
        chart = "document.querySelectorAll('#loss-chart canvas').length"
        wait_for(lambda: browser.evaluate(chart) == 1, 30, "the chart, whose button is then ready")
        browser.evaluate("document.getElementById('loss-chart-log').click()")
        steps = "document.querySelector('.figures dd').textContent"
        before = int(browser.evaluate(steps))
        add_steps(run, range(before + 1, before + 21))
        wait_for(lambda: browser.evaluate(steps) == str(before + 20), 60, "the new steps in the page")
        assert browser.evaluate("document.getElementById('loss-chart-log').ariaPressed") == "true"
        assert browser.evaluate("document.documentElement.dataset.state") == "live"
        assert browser.evaluate(chart) == 1
        assert browser.console == []
        assert {address.split("/")[2] for address in browser.requests} == {f"127.0.0.1:{server.port}"}


def test_comparison_shows_the_runs_that_the_address_names(server):
    status, _, text = server.request("/compare?run=digits&run=a%20b%26%3Ci%3E")
    assert status == 200
    assert "Comparison of 2 runs" in text
    assert "a b&amp;&lt;i&gt;" in text
    assert server.request(f"/compare?run=digits&run=x&token={server.token}", token=False)[1]["Location"] == (
        "/compare?run=digits&run=x"
    )
    for query in ("", "?run=digits", "?run=digits&run=digits", "?run=digits&run=outside"):
        assert server.request(f"/compare{query}")[0] == 404
    assert server.request("/compare?" + "run=digits&" * 49 + "run=a%20b%26%3Ci%3E")[0] == 200
    assert server.request("/compare?" + "run=digits&" * 60)[0] == 400


def test_page_shows_the_end_of_logs_as_text(server):
    text = server.request("/run/digits")[2]
    assert "logs/attempt-000/rank-00000.log" in text
    assert "first line\n" in text
    assert "&lt;b&gt;last&lt;/b&gt; line" in text
    assert "\x1b" not in text
    assert "rank-00001.log" not in text


@pytest.mark.ranks
def test_filter_and_selection_survive_updates(server, folder, tmp_path):
    if chromium.find() is None:
        pytest.skip("needs a Chromium: scripts/install_for_tests.sh installs one")
    with chromium.Chromium(tmp_path / "profile") as browser:
        browser.open(server.address, width=390)
        browser.focus_with_tab("Compare digits")
        browser.press("Space")
        browser.evaluate("document.getElementById('filter').focus()")
        for letter in "digits":
            browser.press(letter)
        rows = "[...document.querySelectorAll('#runs tbody tr:not([hidden]) a')].map(a => a.textContent)"
        assert browser.evaluate(rows) == ["digits"]
        write_run(folder / "new", range(1, 3))
        known = "document.querySelectorAll('#runs tbody tr').length"
        wait_for(lambda: browser.evaluate(known) == 3, 60, "the new run in the list")
        assert browser.evaluate(rows) == ["digits"]
        assert browser.evaluate("[document.activeElement.id, document.activeElement.value]") == [
            "filter",
            "digits",
        ]
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390
        browser.evaluate("document.activeElement.select()")
        for letter in "new":
            browser.press(letter)
        browser.focus_with_tab("Compare new")
        browser.press("Space")
        assert browser.evaluate("document.getElementById('compare').textContent") == "Compare 2 runs"
        browser.evaluate("document.getElementById('compare').focus()")
        browser.press("Enter")
        title = "document.title"
        wait_for(lambda: browser.evaluate(title) == "new · digits", 30, "the comparison")
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390
        assert browser.console == []
    shutil.rmtree(folder / "new")


def test_requests_write_nothing(server, folder):
    def state() -> dict[str, str]:
        files = (path for path in folder.rglob("*") if path.is_file())
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    before = state()
    server.request("/")
    server.request("/run/digits")
    server.request("/run/digits", "HEAD")
    assert state() == before
