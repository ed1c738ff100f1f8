import json
import math
import re
from html import unescape
from pathlib import Path

import pytest
from helpers.run_histories import START, RunHistory, disturbed_run, started_run, write_run

from hpctrain.cli.report import json_report
from hpctrain.files import append_json_line
from hpctrain.rundir import RunDir
from hpctrain.telemetry.report.pages import (
    build_timeline,
    render_comparison,
    render_run_page,
    spec_differences,
)
from hpctrain.telemetry.report.run_data import RunData
from hpctrain.telemetry.report.summary import describe_attempt_end, key_figures, summarize

SPEC = {"script": "/home/me/train.py", "args": ["--lr", "0.1"], "workdir": "/home/me", "nodes": 2}


def facts_of(run: RunDir, state: str | None = None, **options) -> RunData:
    return RunData(run, state, now=START + 5000, **options)


@pytest.fixture
def run(tmp_path) -> RunDir:
    return write_run(tmp_path / "digits", disturbed_run(), **SPEC)


def page_data(page: str) -> dict:
    """Return the data of the page's script."""
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(block[1])


def test_summary_shows_what_happened_and_what_it_cost(run):
    facts = facts_of(run)
    ends = [(item.end, item.followed_by, item.lost_us / 1e6) for item in facts.attempts]
    assert ends == [
        ("failure", "restart", pytest.approx(11.2)),
        ("stop", "requeue", 0.0),
        ("vanished", "requeue", 10.0),
        ("completed", None, 0.0),
    ]
    assert [item.away_us / 1e6 for item in facts.attempts[:3]] == pytest.approx([6.6, 127.0, 96.0])
    text = " ".join(summarize(facts))
    assert "1 failure, 1 stop, 1 lost job" in text
    assert "(40 steps repeated)" in text
    assert facts.attempts[0].host == "n2"


@pytest.mark.parametrize(
    ("events", "end"),
    [
        (
            [
                ("grow", {"nodes": 2}),
                ("signal", {"signal": "SIGUSR2", "step": 5, "saved": True}),
                ("requeue", {}),
            ],
            "stopped by SIGUSR2 after step 5 (requeued to continue on 2 nodes)",
        ),
        (
            [
                ("signal", {"signal": "SIGTERM", "step": 5, "saved": True}),
                ("requeue", {"class": "preempted"}),
            ],
            "preempted by SIGTERM after step 5",
        ),
        ([("requeue", {"by": "slurm", "cause": "requeued"})], "requeued"),
        (
            [
                ("signal", {"signal": "SIGTERM", "step": 5, "saved": True}),
                ("requeue", {"by": "slurm", "cause": "requeued"}),
            ],
            "requeued: stopped by SIGTERM after step 5",
        ),
        (
            [
                ("chaos", {"fault": "kill-rank"}),
                ("failure", {"rank": 3, "cause": "SIGKILL"}),
                ("restart", {}),
            ],
            "SIGKILL (fault injected by hpctrain chaos: kill-rank)",
        ),
    ],
)
def test_end_of_an_attempt_is_explained(tmp_path, events, end):
    history = started_run(0).steps(1, 5, every=1)
    for kind, fields in events:
        history.after(1, kind, **fields)
    (attempt,) = facts_of(write_run(tmp_path / "run", history)).attempts
    assert describe_attempt_end(attempt) == end


def test_figures_match_the_run_folder(run):
    facts = facts_of(run)
    document = json_report(facts)
    last = json.loads(run.metrics.read_text().splitlines()[-1])
    assert (document["step"], document["loss"]) == (last["step"], last["loss"])
    assert sum(row["us"] or 0 for row in document["ledger"]) == document["wall_us"] == facts.breakdown.wall_us
    assert document["wall_us"] == round((document["end"] - document["start"]) * 1e6)
    data = page_data(render_run_page(facts))
    loss = data["charts"][0]["series"][0]
    losses = {record["step"]: record["loss"] for record in map(json.loads, run.metrics.open())}
    assert dict(zip(loss["x"], loss["y"], strict=True)) == losses
    marks = [(mark["x"], mark["label"]) for mark in data["charts"][0]["marks"]]
    assert marks == [(100, "attempt 1"), (200, "attempts 2, 3")]


def test_page_loads_no_other_resources(run):
    page = render_run_page(facts_of(run))
    own_text = page.replace("http://www.w3.org/2000/svg", "")
    # Addresses appear only in comments of the chart library.
    assert not re.search(r"(src|href|url)\s*[=(]\s*[\"']?(https?:)?//", own_text)
    assert "default-src 'none'" in page


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    '"><svg onload=alert(3)>',
    "<!--<script>",
    "{{ 7 * 7 }}${alert(4)}",
    "javascript:alert(5)",
    "' onmouseover='alert(6)",
    "\u2028\u2029\x00\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
    "]]>--></style><b>",
    "\x1b]0;title\x07\x1b[2J\u202e",
]


def hostile_run(folder: Path) -> RunDir:
    """Return a run whose files have only texts that try to be executed."""
    history = RunHistory()
    for index, text in enumerate(HOSTILE):
        history.after(1, "submitted", job_id=text, backend=text)
        history.after(1, "started", hosts=[text], nodes=1, world_size=1)
        history.after(1, "resumed", step=index, checkpoint=text, broken=[text])
        history.steps(index + 1, index + 6, every=1, **{text: 1.5})
        history.after(1, "checkpoint", step=index + 6, path=text, tier=text, bytes=1, seconds=0.1)
        history.after(1, "failure", rank=0, host=text, cause=text, log=text)
        history.after(0, "restart", by=text).after(0, "straggler", host=text, cause=text)
    history.after(1, "signal", signal=HOSTILE[0], step=1).after(1, "requeue", by=HOSTILE[0])
    history.after(1, "finished", state=HOSTILE[0], cause=HOSTILE[1])
    run = write_run(folder, history, script=HOSTILE[0], args=HOSTILE, env={HOSTILE[1]: HOSTILE[2]})
    run.code.mkdir()
    (run.code / "submission-000.json").write_text(
        json.dumps({"commit": HOSTILE[0], "changed": True, "new_files": HOSTILE, "source": HOSTILE[1]})
    )
    (run.code / "submission-000.diff").write_text("\n".join(f"+{text}" for text in HOSTILE))
    lines = [
        {"time": START + 4, "host": HOSTILE[0], "cpus": 8, "gpu_names": HOSTILE},
        {"time": START + 5, "host": HOSTILE[0], "gpu_util": [1, 2, None], "gpu_xids": [[], [79]]},
        {"time": START + 6, "host": HOSTILE[1], "gpu_throttled": [HOSTILE], "cpu": 5.0},
    ]
    run.telemetry(0).write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = dict.fromkeys(HOSTILE, HOSTILE[2])
    run.environment.write_text(json.dumps({"torch": HOSTILE[0], "settings": settings}) + "\n")
    return run


def hostile_page(folder: Path) -> str:
    return render_run_page(
        facts_of(hostile_run(folder), HOSTILE[0], words=HOSTILE[1], resubmit_command=HOSTILE)
    )


def test_hostile_texts_are_escaped(tmp_path):
    page = hostile_page(tmp_path / "run")
    facts = facts_of(RunDir(tmp_path / "run"), resubmit_command=[*HOSTILE, "echo ```"])
    for html in (page, render_comparison([facts, facts])):
        assert html.count("<script") == html.count("</script>") == 3
        assert not re.search(r"<(img|b)\b|<svg onload", html)
    assert page.count("<style") == page.count("</style>") == 1
    for text in ("alert(1)", "alert(2)", "alert(3)"):
        assert text in unescape(page)
    assert "49" not in re.findall(r"\{\{ 7 \* 7 \}\}|49\$", page)
    charts = page_data(page)["charts"]
    assert HOSTILE[0] in [series["name"] for chart in charts for series in chart["series"]]


def test_empty_folder_gives_a_report(tmp_path):
    facts = facts_of(RunDir(tmp_path))
    assert "Nothing has been recorded" in render_run_page(facts)


def test_active_run_is_reported_up_to_now(tmp_path):
    run = write_run(tmp_path / "run", started_run(60).steps(1, 10, every=1))
    facts = facts_of(run, "RUNNING")
    assert facts.end == START + 5000
    assert "so far" in " ".join(summarize(facts))
    assert "now" in {name: meaning for name, _, meaning in key_figures(facts)}["Time"]


def test_figures_from_steps_are_unknown_without_steps(tmp_path):
    history = started_run(5).after(20, "signal", signal="SIGTERM", step=None, saved=False)
    history.after(1, "requeue", by="requeue").after(60, "started", nodes=2)
    run = write_run(tmp_path / "run", history.after(30, "finished", state="COMPLETED"))
    facts = facts_of(run)
    reason = "the script reports no steps"
    assert key_figures(facts)[0] == ("Steps", "unknown", reason)
    assert {("Productive", "unknown", reason), ("Lost work", "unknown", reason)} <= set(key_figures(facts))
    page = render_run_page(facts)
    assert "lost work unknown, 1 min 1 s of downtime" in page
    assert "0 s lost" not in page
    assert f"unknown: {reason}" in page
    assert re.search(r'lost work</td>\n<td class="n">–</td>.*\n.*; not measured, included in training', page)
    document = json_report(facts)
    unknown = ("lost_steps", "ettr", "training", "step")
    assert [document[name] for name in unknown] == [None] * 4
    assert document["reports_steps"] is False
    assert [attempt["lost_us"] for attempt in document["attempts"]] == [None, None]
    assert {row["what"]: row["us"] for row in document["ledger"]}["lost work"] is None
    comparison = render_comparison([facts, facts])
    assert comparison.count('<td class="n">unknown</td>') == 6


def test_cancelled_run_without_a_recorded_end_is_not_a_lost_job(tmp_path):
    """The supervisor was killed before it recorded the end."""
    history = started_run(5).steps(1, 5, every=1)
    run = write_run(tmp_path / "run", history.after(10, "seen", job_id="7", job_state="CANCELLED by 1000"))
    run.cancel_request.touch()
    for facts in (facts_of(run), facts_of(run, "CANCELLED")):
        (attempt,) = facts.attempts
        assert (facts.state, attempt.end, attempt.interrupted) == ("CANCELLED", "cancelled", False)
        assert "lost job" not in render_run_page(facts)
        assert "cause unknown" not in render_run_page(facts)


def run_with_losses(values: list[float]) -> RunHistory:
    """Return a run with these losses, one per step."""
    history = started_run(0)
    for step, value in enumerate(values, 1):
        history.steps(step, step, every=1, loss=value, val_loss=value)
    return history


def test_nan_is_shown_with_its_step(tmp_path):
    run = write_run(tmp_path / "run", run_with_losses([1.0, 1.7e308, math.nan, math.inf]))
    charts = {chart["id"]: chart for chart in page_data(render_run_page(facts_of(run)))["charts"]}
    for name in ("loss-chart", "metric-0"):
        (series,) = charts[name]["series"]
        assert (series["x"], series["y"]) == ([1, 2, 3, 4], [1.0, 1e300, None, None])
        assert series["not_finite"] == [[3, "NaN"], [4, "inf"]]
        assert charts[name]["marks"] == [{"x": 3, "label": "NaN"}]
    run = write_run(tmp_path / "other", run_with_losses([0.5, math.nan]))
    assert "<h3>val_loss: NaN</h3>" in render_run_page(facts_of(run))


def test_means_of_each_gpu_are_shown_by_the_name_of_its_node(tmp_path):
    """A requeued run continues elsewhere: the same file then has records of another node."""
    run = write_run(tmp_path / "run", started_run(0).steps(1, 100, every=1))
    for node, host in ((0, "n1"), (0, "n2"), (1, "n1")):
        hardware = {"cpus": 64, "gpu_names": ["H100"] * 2}
        values = [{"gpu_util": [100 * (n < 25), 50 * (host == "n2")], "cpu": 5.0} for n in range(50)]
        for second, fields in enumerate([hardware, *({**line, "gpu_temp_c": [None, 60]} for line in values)]):
            append_json_line(run.telemetry(node), {"time": START + 2 * second, "host": host, **fields})
    facts = facts_of(run)
    rows = json_report(facts)["gpus"]
    assert [row["gpu"] for row in rows] == ["n1 · GPU 0", "n1 · GPU 1", "n2 · GPU 0", "n2 · GPU 1"]
    assert [row["gpu_util"] for row in rows] == [50.0, 0.0, 50.0, 50.0]
    assert [row["gpu_temp_c"] for row in rows] == [None, 60.0, None, 60.0]
    nodes = [(node.host, node.cpus, node.gpu_names) for node in facts.devices.nodes]
    assert nodes == [(host, 64, ["H100", "H100"]) for host in ("n1", "n2")]
    assert [means["cpu"] for means in facts.devices.node_means] == [5.0, 5.0]
    page = render_run_page(facts)
    assert '<tr><td>n2 · GPU 1</td><td class="n">50</td><td class="n">60</td></tr>' in page


def test_energy_of_lost_work_is_that_of_the_lost_time(tmp_path):
    history = started_run(0).steps(1, 10, every=1).after(0, "failure", rank=0).after(0, "restart")
    history.after(0, "started").after(0, "resumed", step=5).steps(6, 10, every=1)
    run = write_run(tmp_path / "run", history)
    for second, joules in ((5, [3.6e6]), (10, [3.6e6, None, 3.6e6]), (15, [3.6e6])):
        append_json_line(run.telemetry(0), {"time": START + second, "seconds": 5.0, "gpu_energy_j": joules})
    run.environment.write_text('{"settings": {"global_batch_size": 2}}\n')
    energy = json_report(facts_of(run))["energy"]
    assert energy == {"total_kwh": 4.0, "lost_kwh": pytest.approx(2.0), "per_sample_kwh": 0.2}


def test_runs_are_compared_by_their_differences(tmp_path):
    runs = [
        facts_of(write_run(tmp_path / name, disturbed_run(last_step=last), **SPEC, max_failures=number))
        for name, last, number in (("one", 240, 3), ("two", 300, 5))
    ]
    assert spec_differences(runs) == [["max_failures", "3", "5"]]
    page = render_comparison(runs)
    loss = page_data(page)["charts"][0]
    assert [series["name"] for series in loss["series"]] == ["one", "two"]
    assert [series["x"][-1] for series in loss["series"]] == [240, 300]


def test_timeline_shows_categories_saves_and_failures(run):
    timeline = build_timeline(facts_of(run))
    assert {bar["kind"] for bar in timeline["time"]} >= {"queued", "training", "lost", "starting"}
    assert sum(bar["width"] for bar in timeline["time"]) == 1000
    assert [bar["kind"] for bar in timeline["attempts"]][:4] == ["attempt", "fault", "attempt", "stop"]
    assert "checkpoint of step 100" in timeline["saves"][0]["title"]


def test_start_of_each_attempt_is_shown_by_part(tmp_path):
    parts = {
        "launch": {"median": 1.0, "max": 2.5, "host": "n2"},
        "imports": {"median": 4.0, "max": 4.0, "host": "n1"},
    }
    nodes = {"n2": {"launch": 2.5, "imports": 4.0}, "n1": {"launch": 1.0, "imports": 4.0}}
    history = started_run(0).after(7, "startup", seconds=6.5, parts=parts, slowest_nodes=nodes)
    facts = facts_of(write_run(tmp_path / "run", history.steps(1, 5, every=1)))
    page = render_run_page(facts)
    assert "Start of attempt 0: 6.5 s" in page
    assert '<td>launch</td><td class="n">1.0 s</td><td class="n">2.5 s</td><td>n2</td>' in page
    assert json_report(facts)["attempts"][0]["startup"]["parts"]["launch"]["max"] == 2.5
