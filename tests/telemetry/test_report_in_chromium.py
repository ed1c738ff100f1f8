"""Reports in a real browser: drawn without errors, with the figures of the run folder."""

import json
import math
from collections.abc import Iterator

import pytest
from helpers.chromium import Chromium, find
from helpers.run_histories import disturbed_run, write_run
from test_report_page import SPEC, facts_of, hostile_page, run_with_losses

from hpctrain.telemetry.report.pages import render_comparison, render_run_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find() is None, reason="needs a Chromium: scripts/install_for_tests.sh installs one"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def clean_browser(browser) -> Iterator[Chromium]:
    """The browser; the page must neither log errors nor request anything but itself."""
    browser.console.clear()
    browser.requests.clear()
    yield browser
    assert browser.console == []
    assert {url.split(":")[0] for url in browser.requests} <= {"file"}
    assert len(set(browser.requests)) == 1


@pytest.fixture
def page(tmp_path):
    run = write_run(tmp_path / "digits", disturbed_run(), **SPEC)
    run.telemetry(0).parent.mkdir(exist_ok=True)
    lines = [
        {"time": 1_764_000_100.0 + second, "host": "n1", "gpu_util": [90.0, 10.0]} for second in range(60)
    ]
    run.telemetry(0).write_text("".join(json.dumps(line) + "\n" for line in lines))
    facts = facts_of(run)
    run.report.write_text(render_run_page(facts))
    return run, facts


@pytest.mark.parametrize("width", [1200, 700, 380])
def test_figures_do_not_wrap(tmp_path, clean_browser, width):
    run = write_run(tmp_path / "small", run_with_losses([0.5, -0.00046787123]), **SPEC)
    run.report.write_text(render_run_page(facts_of(run)))
    clean_browser.open(run.report, width=width)
    values = clean_browser.evaluate(
        "[...document.querySelectorAll('.figures dd:nth-of-type(1)')].map(each => "
        "[each.textContent, each.clientHeight, parseFloat(getComputedStyle(each).lineHeight)])"
    )
    loss = next(value for value in values if "0.00046787" in value[0])
    assert loss[1] < 1.5 * loss[2]


def legend(browser: Chromium, chart: str) -> list[str]:
    return browser.evaluate(
        f"[...document.querySelectorAll('#{chart} .u-legend .u-value')].map(each => each.textContent)"
    )


def bounding_box(browser: Chromium, selector: str) -> dict[str, float]:
    browser.evaluate(f"document.querySelector('{selector}').scrollIntoView({{block: 'center'}})")
    return browser.evaluate(
        f"(({{x, y, width, height}}) => ({{x, y, width, height}}))"
        f"(document.querySelector('{selector}').getBoundingClientRect())"
    )


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 360])
def test_charts_are_drawn(clean_browser, page, dark, width):
    run, facts = page
    clean_browser.open(run.report, width=width, dark=dark)
    assert clean_browser.evaluate("document.querySelectorAll('.uplot canvas').length") == 3
    # Nothing is wider than the window, and every chart has been drawn.
    assert clean_browser.evaluate("document.documentElement.scrollWidth") <= width
    drawn = clean_browser.evaluate(
        "[...document.querySelectorAll('canvas')].map(c => new Set(new Uint32Array("
        "c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size > 1)"
    )
    assert drawn == [True] * 3
    rows = clean_browser.evaluate(
        "[...document.querySelectorAll('#ledger tbody tr')].map(r => [r.dataset.what, +r.dataset.us])"
    )
    assert dict(rows) == {category.value: us for category, us in facts.breakdown.totals_us.items()}


def test_hovering_shows_the_value_and_dragging_zooms(clean_browser, page):
    run, _ = page
    clean_browser.open(run.report)
    box = bounding_box(clean_browser, "#loss-chart .u-over")
    middle = box["y"] + box["height"] / 2
    clean_browser.mouse("mouseMoved", box["x"] + box["width"] / 2, middle)
    step, loss, before = legend(clean_browser, "loss-chart")
    losses = {record["step"]: record["loss"] for record in map(json.loads, run.metrics.open())}
    assert float(loss) == float(f"{losses[int(step)]:.7g}")
    assert before == "–"
    clean_browser.drag(box["x"] + box["width"] * 0.5, middle, box["x"] + box["width"] * 0.6)
    clean_browser.mouse("mouseMoved", box["x"] + box["width"] - 1, middle)
    zoomed, _, _ = legend(clean_browser, "loss-chart")
    assert int(step) < int(zoomed) < 200
    # Numbers with more digits may have moved the chart.
    box = bounding_box(clean_browser, "#loss-chart .u-over")
    for clicks in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            clean_browser.mouse(kind, box["x"] + 5, middle, button="left", clickCount=clicks)
    clean_browser.mouse("mouseMoved", box["x"] + box["width"] - 1, middle)
    assert legend(clean_browser, "loss-chart")[0] == "300"


@pytest.mark.parametrize(
    "values",
    [
        [1 / 1, 1 / 2, math.nan, math.nan],
        [math.nan] * 4,
        [10.0 ** (3 * exponent) for exponent in range(1, 40)],
        [-1.7e308, 1.7e308, math.inf],
    ],
)
def test_axes_have_labels_for_all_values(clean_browser, tmp_path, values):
    path = tmp_path / "page.html"
    path.write_text(render_run_page(facts_of(write_run(tmp_path / "run", run_with_losses(values)))))
    clean_browser.open(path)
    # Pixels of the text to the left of the chart.
    text = """(() => {
        const chart = document.getElementById("loss-chart"), over = chart.querySelector(".u-over");
        const canvas = chart.querySelector("canvas"), ratio = devicePixelRatio;
        const area = [0, over.offsetTop, over.offsetLeft - 8, over.offsetHeight].map((size) => size * ratio);
        const { data } = canvas.getContext("2d").getImageData(...area);
        return data.filter((value, index) => index % 4 === 3 && value > 0).length;
    })()"""
    for _ in ("linear", "logarithmic"):
        assert clean_browser.evaluate(text) > 20
        clean_browser.evaluate("document.getElementById('loss-chart-log').click()")
    assert clean_browser.evaluate("document.getElementById('loss-chart-log').ariaPressed") == "false"
    if not math.isfinite(values[-1]):
        box = bounding_box(clean_browser, "#loss-chart .u-over")
        clean_browser.mouse("mouseMoved", box["x"] + box["width"] - 1, box["y"] + box["height"] / 2)
        assert legend(clean_browser, "loss-chart") == [
            str(len(values)),
            "NaN" if math.isnan(values[-1]) else "inf",
        ]


def test_hostile_texts_are_not_executed(clean_browser, tmp_path):
    # The browser would log a refused script, or open a dialog.
    path = tmp_path / "hostile.html"
    path.write_text(hostile_page(tmp_path / "run"))
    clean_browser.open(path)
    assert clean_browser.evaluate("document.querySelectorAll('script').length") == 3
    assert (
        clean_browser.evaluate(
            "document.querySelectorAll('img, b, [onload], [onerror], [onmouseover]').length"
        )
        == 0
    )


def test_comparison_is_drawn(clean_browser, tmp_path):
    runs = [facts_of(write_run(tmp_path / str(last), disturbed_run(last_step=last))) for last in (230, 300)]
    path = tmp_path / "comparison.html"
    path.write_text(render_comparison(runs))
    clean_browser.open(path)
    assert clean_browser.evaluate("document.querySelectorAll('.uplot canvas').length") == 2
    box = bounding_box(clean_browser, "#metric-0 .u-over")
    clean_browser.mouse("mouseMoved", box["x"] + box["width"] / 4, box["y"] + 50)
    step, first, second = legend(clean_browser, "metric-0")
    assert first == second == f"{1 / int(step):.7g}"
