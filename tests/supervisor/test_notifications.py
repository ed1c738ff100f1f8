"""Notifications about the end, a failure or a stall of a run, by webhook and by command."""

import errno
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.commands import run_command
from helpers.disks import mounted_disk
from helpers.run_histories import event
from helpers.waiting import slowness, wait_for

from hpctrain.cluster.processes import processes
from hpctrain.errors import SpecError
from hpctrain.jobspec.notify import NotifyConfig
from hpctrain.records.log_tail import RecordTail
from hpctrain.rundir import RunDir
from hpctrain.supervisor import notifications
from hpctrain.supervisor.notifications import (
    Notifier,
    StallDetector,
    notification_kind,
    post_json,
    send_notifications,
)

TRAINING = """
import json, os, sys, time
run, attempt = os.environ["HPCTRAIN_RUN_DIR"], int(os.environ["HPCTRAIN_ATTEMPT"])
for step in range(1, 4):
    with open(run + "/metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "time": time.time(), "attempt": attempt, "loss": 1.0}) + "\\n")
    time.sleep(0.1)
if attempt == 0:
    raise ValueError("bad 'data' $(touch executed)")
time.sleep(9)
"""


class WebhookServer:
    """A server that records the posted messages."""

    def __init__(self) -> None:
        self.got: list[dict] = []
        self.answers: list[int] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers["Content-Length"]))
                status = hook.answers.pop(0) if hook.answers else 200
                if status == 200:
                    hook.got.append(json.loads(text))
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/hook?key=1"


@pytest.fixture
def hook() -> Iterator[WebhookServer]:
    hook = WebhookServer()
    thread = threading.Thread(target=hook.server.serve_forever, args=(0.05,))
    thread.start()
    yield hook
    hook.server.shutdown()
    thread.join()
    hook.server.server_close()


def submit(tmp_path: Path, *options: str) -> RunDir:
    (tmp_path / "train.py").write_text(TRAINING)
    run = RunDir(tmp_path / "run")
    args = ["submit", "--backend=local", "--run-dir", str(run.path), *options, "train.py"]
    run_command([sys.executable, "-m", "hpctrain", *args], cwd=tmp_path)
    run_command([sys.executable, "-m", "hpctrain", "wait", str(run.path)], cwd=tmp_path, check=False)
    return run


@pytest.mark.ranks
def test_failure_stall_and_end_reach_webhook_and_command(hook, tmp_path):
    output = tmp_path / "told.txt"
    line = f"cat >> '{output}'; echo >> '{output}'; touch here; test -n \"$HPCTRAIN_TEXT\""
    run = submit(tmp_path, "--notify", hook.address, "--notify", line, "--set=notify_stall_after=6")
    by_command = [json.loads(row) for row in output.read_text().splitlines() if row]
    assert by_command == hook.got
    failure, stall, finish = hook.got
    assert [message["occasion"] for message in hook.got] == ["failure", "stall", "finish"]
    assert "bad 'data' $(touch executed)" in failure["text"]
    assert failure["rank"] == 0
    assert "no step has been logged for" in stall["text"]
    assert finish["text"] == finish["content"] == "Run run has ended (COMPLETED)."
    assert finish["folder"] == str(run.path)
    assert not list(tmp_path.rglob("executed"))
    assert (run.path / "here").exists()
    resubmit_commands = json.loads(
        run_command([sys.executable, "-m", "hpctrain", "report", str(run.path), "--json"]).stdout
    )["again"]
    assert "--set=notify_stall_after=6" in resubmit_commands[-1]


@pytest.mark.parametrize("status", [503, 302, 308])
def test_message_is_sent_once_and_the_log_hides_the_answer_and_the_secret(hook, tmp_path, caplog, status):
    hook.answers = [status]
    run = RunDir(tmp_path)
    notifier = Notifier(run, NotifyConfig((hook.address, "exit 3"), on=("failure",)), {})
    run.log_event("failure", 0, rank=0, cause="a cause")
    run.log_event("finished", 0, state="FAILED")
    notifier.ended.set()
    notifier.run()
    assert hook.answers == hook.got == []
    lines = sorted(record.getMessage().rpartition("was not delivered: ")[2] for record in caplog.records)
    assert lines == [
        "OSError: the command exited with code 3",
        f"OSError: the server returned HTTP status {status}",
    ]


def test_failed_connection_is_tried_again(hook, monkeypatch):
    connections = []

    def connect(address, *args, **kwargs):
        connections.append(address)
        if len(connections) < 3:
            raise ConnectionRefusedError
        return create_connection(address, *args, **kwargs)

    monkeypatch.setattr("hpctrain.supervisor.notifications._PAUSE_S", 0.01)
    create_connection = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", connect)
    post_json(hook.address, {"text": "a"})
    assert len(connections) == 3
    assert hook.got == [{"text": "a"}]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")
def test_untrusted_certificate_gets_no_message(tmp_path, monkeypatch):
    monkeypatch.setattr("hpctrain.supervisor.notifications._PAUSE_S", 0.01)
    key, certificate, received = tmp_path / "key", tmp_path / "certificate", []
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=x"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            for _ in range(3):
                with suppress(OSError), server.accept()[0] as connection:
                    received.append(context.wrap_socket(connection, server_side=True).recv(4096))

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            post_json(f"https://127.0.0.1:{server.getsockname()[1]}/sekrit", {"text": "a"})
    assert received == []


def test_endless_command_is_killed_with_its_children(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(notifications, "_TARGET_LIMIT_S", 0.5)
    run = RunDir(tmp_path)
    notifier = Notifier(
        run, NotifyConfig((f"sleep 100 & sleep 100 # {tmp_path}",)), {"PATH": "/usr/bin:/bin"}
    )
    run.log_event("finished", 0, state="FAILED")
    notifier.ended.set()
    notifier.run()
    assert "the command took longer than" in caplog.text
    assert not [item for item in processes() if any(str(tmp_path) in word for word in item.argv)]


@pytest.mark.slow
def test_hanging_target_does_not_delay_the_end(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(notifications, "_LAST_LIMIT_S", 1.0)
    run, output = RunDir(tmp_path), tmp_path / "told"
    notify = NotifyConfig((f"cat >> {output}; sleep 50 # {tmp_path}",))
    run.spec.write_text("{}")
    monkeypatch.setattr(notifications, "load_spec", lambda path: SimpleNamespace(notify=notify))
    start = time.monotonic()
    with send_notifications(run, {"PATH": "/usr/bin:/bin"}):
        run.log_event("failure", 0, rank=1, cause="SIGKILL")
        wait_for(lambda: output.exists() and output.read_text(), 20, "the command")
    assert time.monotonic() - start < 40 * slowness()
    wait_for(lambda: not [item for item in processes() if str(tmp_path) in str(item.argv)], 20, "its end")
    wait_for(lambda: "hpctrain-notifications" not in [item.name for item in threading.enumerate()], 20, "it")
    assert "was not delivered before the supervisor exited" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOTCONN])
def test_temporarily_unreadable_events_are_retried(monkeypatch, tmp_path, caplog, number):
    monkeypatch.setattr(notifications, "_POLL_INTERVAL_S", 0.02)
    run, output = RunDir(tmp_path), tmp_path / "told"
    run.log_event("failure", 0, rank=0, cause="before")
    read, errors = RecordTail.read, [OSError(number, os.strerror(number))] * 5

    def fail_at_first(self) -> list[dict]:
        if errors:
            raise errors.pop()
        return read(self)

    monkeypatch.setattr(RecordTail, "read", fail_at_first)
    notifier = Notifier(run, NotifyConfig((f"cat >> {output}",)), {"PATH": "/usr/bin:/bin"})
    thread = threading.Thread(target=notifier.run)
    thread.start()
    run.log_event("finished", 0, state="COMPLETED")
    wait_for(lambda: output.exists() and "finish" in output.read_text(), 20, "the command")
    notifier.ended.set()
    thread.join(120)
    assert not thread.is_alive()
    assert "before" not in output.read_text()
    assert caplog.text.count("cannot read the run's events") == 1


@pytest.mark.parametrize(
    ("fields", "occasion"),
    [
        ({"rank": 1, "class": "hang"}, "stall"),
        ({"class": "disk-full"}, "stall"),
        ({"cause": "disk full"}, None),
    ],
)
def test_occasion_follows_from_the_event(fields, occasion):
    assert notification_kind(event("failure", **fields)) == occasion


def test_stall_is_reported_once_and_only_after_a_logged_step():
    stall = StallDetector(10)
    stall.on_event(event("started", attempt=1), 0)
    assert stall.find_stall(50, 0) is None  # of the previous attempt
    assert stall.find_stall(100, None) is None
    assert stall.find_stall(101, 1) is None
    assert stall.find_stall(110.5, None) is None
    stall.on_event(event("checkpoint"), 111)
    assert stall.find_stall(120, None) is None
    assert stall.find_stall(121, None) == 10
    assert stall.find_stall(200, None) is None
    assert stall.find_stall(201, 1) is None
    assert stall.find_stall(300, None) == 99
    stall.on_event(event("finished", state="COMPLETED"), 301)
    assert stall.find_stall(302, 1) is None
    assert stall.find_stall(400, None) is None


@pytest.mark.parametrize(
    ("fields", "error_message"),
    [
        ({"targets": ("https:///path",)}, "has no host"),
        ({"targets": ("https://me:sekrit-42@127.0.0.1/hook",)}, "--notify"),
        ({"targets": ("https://127.0.0.1:port/sekrit-42",)}, "--notify"),
        ({"targets": ("https://[127.0.0.1/sekrit-42",)}, "--notify"),
        ({"targets": ("https://127.0.0.1/sekrit-42\x7f",)}, "--notify"),
        ({"targets": ("http://a b/",)}, "not allowed in a URL"),
        ({"targets": ("ftp://host/path",)}, "neither a URL"),
        ({"targets": ("hooks.slack.com/services/x",)}, "neither a URL"),
        ({"stall_s": 0}, "at least 1"),
    ],
)
def test_invalid_notify_options_are_refused(fields, error_message):
    with pytest.raises(SpecError, match=error_message) as error:
        NotifyConfig(**fields)
    assert "sekrit-42" not in str(error.value)


@pytest.mark.slow
def test_full_disk_is_reported_once_without_an_event(tmp_path):
    output = tmp_path / "told"
    with mounted_disk(tmp_path / "disk", "size=64k") as disk:
        run = RunDir(disk / "run")
        run.path.mkdir()
        notifier = Notifier(
            run, NotifyConfig(targets=(f"cat >> '{output}'; echo >> '{output}'",)), dict(os.environ)
        )
        with suppress(OSError), open(disk / "filler", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        thread = threading.Thread(target=notifier.run)
        thread.start()
        wait_for(output.exists, 30, "the notification")
        notifier.ended.set()
        thread.join()
    (message,) = [json.loads(line) for line in output.read_text().splitlines() if line]
    assert (message["occasion"], message["cause"]) == (
        "stall",
        f"disk full at {run.path}; the run cannot save until space is freed",
    )
