"use strict";
// Draws the charts of a report from the data in the page. Texts are added as text, never as markup.
(() => {
  let charts = [];
  const root = document.documentElement;
  const color = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const palette = ["accent", "lost", "validating", "data", "saving", "restarting", "communicating", "soft"];

  const number = (value) => {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(4);
    return String(+value.toPrecision(7));
  };

  // Distances of marks on the axis of values, however large these are.
  const increments = (_plot, _axis, low, high, size, space) => {
    const least = (high - low) * space / size, power = Math.floor(Math.log10(least));
    return [power, power + 1].flatMap((p) => [1, 2, 2.5, 5].map((m) => Number(m + "e" + p))).filter((step) => step >= least);
  };
  // The axis of values; one without any finite value has a range, too.
  const valueRange = (chart) => (_, low, high) => {
    if (low == null) return chart.log ? [0.1, 1] : [0, 1];
    return chart.log ? uPlot.rangeLog(low, high, 10, false) : uPlot.rangeNum(low, high, 0.1, true);
  };

  // Vertical lines with labels, such as at restarts; a label that would cover another is omitted.
  const drawMarks = (marks) => ({ ctx: context, bbox, valToPos }) => {
    const ratio = devicePixelRatio, end = bbox.left + bbox.width;
    context.save();
    Object.assign(context, { strokeStyle: color("restarting"), fillStyle: color("restarting"), lineWidth: ratio,
      font: 11 * ratio + "px system-ui, sans-serif", textAlign: "left", textBaseline: "alphabetic" });
    context.setLineDash([3 * ratio, 3 * ratio]);
    let free = -Infinity;
    for (const mark of marks) {
      const x = Math.round(valToPos(mark.x, "x", true)) + 0.5;
      if (x < bbox.left || x > end + 1) continue;
      context.beginPath();
      context.moveTo(x, bbox.top);
      context.lineTo(x, bbox.top + bbox.height);
      context.stroke();
      const width = context.measureText(mark.label).width + 8 * ratio, left = Math.min(x, end - width);
      if (left < free) continue;
      context.fillText(mark.label, left + 4 * ratio, bbox.top + 10 * ratio);
      free = left + width;
    }
    context.restore();
  };

  // Room for the numbers at an axis: as much as they have ever needed, so that the chart stays where it is.
  const labelRoom = (chart, values) => {
    const longest = Math.max(4, ...(values || []).map((text) => text.length));
    return chart.room = Math.max(chart.room || 0, 20 + 6.5 * longest);
  };

  const draw = (chart) => {
    const host = document.getElementById(chart.id);
    if (chart.plot) chart.plot.destroy();
    const many = chart.series.length > 1;
    // 2: a gap of one series goes on where only the others have points.
    const columns = many ? uPlot.join(chart.series.map((s) => [s.x, s.y]), chart.series.map(() => [0, 2])) : [chart.series[0].x, chart.series[0].y];
    const notFinite = chart.series.map((series) => new Map(series.not_finite));
    const axis = { stroke: color("soft"), grid: { stroke: color("grid"), width: 1 }, ticks: { stroke: color("grid"), width: 1, size: 4 },
      font: "11px system-ui, sans-serif" };
    chart.plot = new uPlot({
      width: host.clientWidth,
      height: chart.height,
      padding: [14, 20, 0, 0],
      cursor: { drag: { x: true, y: false }, sync: { key: "step", setSeries: false } },
      scales: {
        x: { time: false },
        y: { distr: chart.log ? 3 : 1, range: valueRange(chart) },
      },
      axes: [
        { ...axis, size: 30, space: 70 },
        { ...axis, incrs: increments, size: (_, values) => labelRoom(chart, values), values: (_, values) => values.map((v) => v == null ? "" : number(v)) },
      ],
      series: [
        { label: "step", value: (_, v) => number(v) },
        ...chart.series.map((series, index) => ({
          label: series.name,
          stroke: color(series.faint ? "lost" : palette[index % palette.length]),
          width: series.faint ? 1 : 1.4,
          dash: series.faint ? [4, 3] : undefined,
          spanGaps: many && !chart.series.some((s) => s.faint),
          points: { show: series.x.length < 60, size: 4, fill: color("raised") },
          value: (plot, v, _, at) => v == null && at != null && notFinite[index].get(plot.data[0][at]) || number(v),
        })),
      ],
      hooks: {
        draw: [drawMarks(chart.marks)],
        setSelect: [(plot) => setTimeout(() => { chart.zoom = { min: plot.scales.x.min, max: plot.scales.x.max }; })],
      },
    }, columns, host);
    host.querySelector(".u-over").addEventListener("dblclick", () => { chart.zoom = null; });
    if (chart.zoom) chart.plot.setScale("x", chart.zoom);
  };

  // Draws all that the page has data for; what was zoomed into, and seen on a logarithmic scale, stays so.
  const start = (kept) => {
    charts = JSON.parse(document.getElementById("data").textContent).charts;
    for (const chart of charts) {
      Object.assign(chart, kept[chart.id]);
      draw(chart);
      const button = document.getElementById(chart.id + "-log");
      if (!button) continue;
      button.setAttribute("aria-pressed", String(chart.log === true));
      button.addEventListener("click", () => {
        chart.log = !chart.log;
        button.setAttribute("aria-pressed", String(chart.log));
        draw(chart);
      });
    }
    document.querySelectorAll(".log").forEach((log) => { log.scrollTop = log.scrollHeight; });
    filterRuns();
  };
  const redraw = () => charts.forEach(draw);
  window.addEventListener("resize", redraw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  // The list of all runs: shows the rows that contain all words of the filter, and compares the marked ones.
  const filterRuns = () => {
    const filter = document.getElementById("filter");
    if (!filter) return;
    const words = filter.value.toLowerCase().split(/\s+/);
    for (const row of document.querySelectorAll("#runs tbody tr")) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    const marked = document.querySelectorAll("#runs input:checked").length, button = document.getElementById("compare");
    button.disabled = marked < 2;
    button.textContent = marked < 2 ? "Compare" : "Compare " + marked + " runs";
  };
  document.addEventListener("input", filterRuns);
  start({});

  // A page of `hpctrain serve` polls for updates. What the user has zoomed, opened, typed and marked is kept.
  const update = (text) => {
    const next = new DOMParser().parseFromString(text, "text/html"), kept = {};
    for (const { id, log, zoom, plot } of charts) {
      kept[id] = { log, zoom };
      plot.destroy();
    }
    const open = new Map([...document.querySelectorAll("details")].map((details) => [details.firstElementChild.textContent, details.open]));
    const inputs = new Map([...document.querySelectorAll("main input[id]")].map((input) => [input.id, input]));
    const focused = document.activeElement, top = window.scrollY;
    document.querySelector("main").replaceWith(document.adoptNode(next.querySelector("main")));
    document.getElementById("data").textContent = next.getElementById("data").textContent;
    document.title = next.title;
    for (const details of document.querySelectorAll("details")) details.open = open.get(details.firstElementChild.textContent) ?? details.open;
    for (const input of document.querySelectorAll("main input[id]")) if (inputs.has(input.id)) input.replaceWith(inputs.get(input.id));
    start(kept);
    if (focused.id) document.getElementById(focused.id)?.focus();
    window.scrollTo(0, top);
  };
  let tag = null;
  const poll = async () => {
    try {
      const response = await fetch(location.href, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (response.status === 200) {
        tag = response.headers.get("ETag");
        update(await response.text());
      }
      root.dataset.state = response.status < 400 ? "live" : "refused";
    } catch {
      root.dataset.state = "away";
    }
    setTimeout(poll, 1000 * root.dataset.live);
  };
  if (root.dataset.live) setTimeout(poll, 1000 * root.dataset.live);
  root.dataset.ready = "yes";
})();
