// Curves of runs in a grid: means as lines, least and largest values as bands. The x-axis, the
// smoothing and the zoom are common to all; charts out of sight are drawn when they come into it.
"use strict";

const FIRST = ["return_mean", "episode_return", "episode_length", "steps/s", "lag_mean", "lag_max"];
const AXES = { env_steps: "environment steps", seconds: "time", tick: "ticks" };
const PLOT_HEIGHT = 190;

function compact(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e4) return Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: digits }).format(value);
  if (size && size < 1e-3) return value.toExponential(1);
  return Number(value.toPrecision(digits + 1)).toLocaleString("en", { maximumSignificantDigits: digits + 1 });
}

function clock(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const s = Math.max(0, Math.round(seconds)), two = (x) => String(x).padStart(2, "0");
  if (s < 60) return seconds < 10 && seconds % 1 ? `${seconds.toFixed(1)} s` : `${s} s`;
  return s < 3600 ? `${Math.floor(s / 60)}:${two(s % 60)}` : `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
}

// One run's columns, as they arrive: all of them, or those from some span on.
class Columns {
  constructor() {
    this.width = 0;
    this.columns = {};
  }

  merge({ first, width, columns }) {
    if (first === 0) this.columns = {};
    this.width = width;
    const before = this.columns.tick?.[0].length ?? 0;
    for (const [name, parts] of Object.entries(columns)) {
      const held = (this.columns[name] ??= parts.map(() => Array(Math.min(first, before)).fill(null)));
      parts.forEach((part, i) => {
        held[i] ??= Array(first).fill(null);
        held[i].length = first;
        held[i].push(...part);
      });
    }
  }

  get length() {
    return this.columns.tick?.[0].length ?? 0;
  }

  // Steps of environments a second, each over a little time: ticks may be reported together.
  get rates() {
    const steps = this.columns.env_steps?.[0], seconds = this.columns.seconds?.[0];
    if (!steps || !seconds) return null;
    const least = Math.max(0.5, (seconds.at(-1) - seconds[0]) / 100);
    let from = 0;
    return [steps.map((count, i) => {
      while (from + 1 < i && seconds[from + 1] <= seconds[i] - least) from += 1;
      const passed = seconds[i] - seconds[from];
      return passed >= least ? (count - steps[from]) / passed : null;
    })];
  }

  get names() {
    const known = Object.keys(this.columns).filter((name) => !(name in AXES));
    const rated = this.rates && this.columns.env_steps[0].some((x) => x) ? ["steps/s"] : [];
    return [...FIRST.filter((name) => [...known, ...rated].includes(name)), ...known.filter((name) => !FIRST.includes(name))];
  }

  // x, mean, low and high of a metric over an axis, where both are known.
  over(axis, name) {
    const xs = this.columns[axis]?.[0] ?? [], parts = name === "steps/s" ? this.rates : this.columns[name];
    if (!parts) return null;
    const kept = [[], [], [], []];
    let last = -Infinity;
    for (let i = 0; i < xs.length; i += 1) {
      if (xs[i] === null || xs[i] <= last || parts[0][i] === null || parts[0][i] === undefined) continue;
      last = xs[i];
      kept[0].push(last);
      kept[1].push(parts[0][i]);
      kept[2].push(parts[1]?.[i] ?? parts[0][i]);
      kept[3].push(parts[2]?.[i] ?? parts[0][i]);
    }
    return kept;
  }
}

function smoothed(values, part) {
  if (!part) return values;
  let mean = 0, weight = 0;
  return values.map((value) => {
    mean = part * mean + (1 - part) * value;
    weight = part * weight + (1 - part);
    return mean / weight;
  });
}

// Axis ticks of time in minutes and hours.
const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000];

class CurveGrid {
  // `runs()`: the runs to show, each with `columns`, `colour`, `name` and `evaluations`.
  constructor(parent, runs) {
    Object.assign(this, { parent, runs, axis: "env_steps", smoothing: 0, filter: "", range: null, charts: new Map() });
    this.eyes = new IntersectionObserver((seen) => seen.forEach(({ target, isIntersecting }) => {
      const chart = target.chart;
      chart.isSeen = isIntersecting;
      if (isIntersecting && chart.isStale) chart.draw();
    }), { rootMargin: "200px" });
    this.sizes = new ResizeObserver((found) => found.forEach(({ target }) => target.chart.resize()));
    document.addEventListener("themechange", () => this.update(true));
    addEventListener("beforeprint", () => this.drawAll());
  }

  drawAll() {
    for (const chart of this.charts.values()) if (chart.isStale) chart.draw();
  }

  change(settings) {
    const isRedrawn = "axis" in settings;
    if (isRedrawn) this.range = null;
    Object.assign(this, settings);
    this.update(isRedrawn);
  }

  // Zooms all charts to a part of the x-axis; null for all of it.
  zoom(range) {
    this.range = range;
    this.onzoom?.(range);
    for (const chart of this.charts.values()) chart.look();
  }

  update(isRedrawn = false) {
    const names = [...new Set(this.runs().flatMap((run) => run.columns.names))];
    const order = [...FIRST.filter((name) => names.includes(name)), ...names.filter((name) => !FIRST.includes(name))];
    const wanted = order.filter((name) => name.toLowerCase().includes(this.filter.toLowerCase()));
    for (const [name, chart] of this.charts) {
      if (!wanted.includes(name)) { chart.remove(); this.charts.delete(name); }
    }
    wanted.forEach((name, i) => {
      if (!this.charts.has(name)) this.charts.set(name, new Chart(this, name));
      const chart = this.charts.get(name);
      if (this.parent.children[i] !== chart.card) this.parent.insertBefore(chart.card, this.parent.children[i] ?? null);
      if (isRedrawn) chart.clear();
      chart.isStale = true;
      if (chart.isSeen) chart.draw();
    });
    requestIdleCallback(() => { // those out of sight have a first picture, and are ready to scroll to
      for (const chart of this.charts.values()) if (!chart.plot) chart.draw();
    });
  }
}

class Chart {
  constructor(grid, name) {
    Object.assign(this, { grid, name, isLog: false, isSeen: false, isStale: true, plot: null, shape: "" });
    this.card = add(grid.parent, "article", { class: "card chart", tabindex: "0", role: "group", "aria-label": name });
    this.card.chart = this;
    const head = add(this.card, "header");
    add(head, "h3", {}, name);
    this.values = add(head, "div", { class: "values" });
    const log = add(head, "button", { type: "button", "aria-pressed": "false", title: "Logarithmic scale" }, "log");
    log.addEventListener("click", () => {
      this.isLog = !this.isLog;
      log.setAttribute("aria-pressed", this.isLog);
      this.clear();
      this.draw();
    });
    this.host = add(this.card, "div", { class: "plot" });
    this.card.addEventListener("keydown", (event) => this.press(event));
    grid.eyes.observe(this.card);
    grid.sizes.observe(this.card);
  }

  remove() {
    this.clear();
    this.grid.eyes.unobserve(this.card);
    this.grid.sizes.unobserve(this.card);
    this.card.remove();
  }

  clear() {
    this.plot?.destroy();
    this.plot = null;
    this.isStale = true;
  }

  // The tables of all runs with this metric, and what is to be drawn of each.
  tables() {
    const found = [];
    for (const run of this.grid.runs()) {
      const data = run.columns.over(this.grid.axis, this.name);
      if (data?.[0].length) {
        const [xs, means, low, high] = data;
        const hasBand = run.columns.width > 1 && this.name !== "steps/s";
        const line = smoothed(means, this.grid.smoothing);
        found.push({ run, table: hasBand ? [xs, line, low, high] : [xs, line], hasBand });
      }
      if (this.name === "return_mean" && run.evaluations.length) {
        const rows = run.evaluations.filter((row) => Number.isFinite(row.return_mean));
        const xs = rows.map((row) => this.xOf(row, run)), ys = rows.map((row) => row.return_mean);
        if (xs.every(Number.isFinite)) found.push({ run, table: [xs, ys], isEvaluation: true });
      }
    }
    return found;
  }

  // Where an evaluation lies on the axis; its seconds are those of its tick.
  xOf(row, run) {
    if (this.grid.axis !== "seconds") return row[this.grid.axis];
    const { tick, seconds } = run.columns.columns;
    const at = tick?.[0].findIndex((found) => found >= row.tick) ?? -1;
    return seconds?.[0].at(at);
  }

  draw() {
    this.isStale = false;
    const found = this.tables();
    if (!found.length) return;
    const shape = found.map(({ run, hasBand, isEvaluation }) => `${run.name} ${hasBand} ${isEvaluation}`).join();
    const data = found.length > 1 ? uPlot.join(found.map(({ table }) => table)) : found[0].table;
    if (!this.plot || shape !== this.shape) {
      this.shape = shape;
      this.plot?.destroy();
      this.plot = new uPlot(this.options(found), data, this.host);
      this.look();
    } else {
      this.plot.setData(data, !this.grid.range);
    }
    this.found = found;
    this.show();
  }

  look() {
    if (!this.plot) return;
    const xs = this.plot.data[0], [min, max] = this.grid.range ?? [xs[0], xs.at(-1)];
    this.plot.setScale("x", { min, max });
  }

  resize() {
    this.plot?.setSize({ width: this.host.clientWidth, height: PLOT_HEIGHT });
  }

  options(found) {
    const series = [{}], bands = [];
    for (const { run, hasBand, isEvaluation } of found) {
      const stroke = colour(run.colour);
      series.push(isEvaluation
        ? { stroke, width: 0, spanGaps: true, points: { show: true, size: 7, fill: colour("card"), width: 2 } }
        : { stroke, width: 1.75, spanGaps: true, points: { show: (u) => u.data[0].length < 3 } });
      if (hasBand) {
        const hidden = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
        series.push(hidden, { ...hidden });
        bands.push({ series: [series.length - 1, series.length - 2], fill: `color-mix(in srgb, ${stroke} 20%, transparent)` });
      }
    }
    const isTime = this.grid.axis === "seconds";
    const lines = { stroke: colour("soft"), font: `11px ${FONT}`, grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
    return {
      width: this.host.clientWidth, height: PLOT_HEIGHT, series, bands,
      legend: { show: false }, padding: [8, 10, 0, 0],
      cursor: { sync: { key: "runs", scales: ["x", null] }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
      scales: { x: { time: false }, y: { distr: this.isLog ? 3 : 1, range: (u, low, high) => spanOf(low, high, this.isLog) } },
      axes: [
        { ...lines, size: 28, gap: 4, ...(isTime ? { incrs: TIMES } : {}), values: (u, at) => at.map((x) => (isTime ? clock(x) : compact(x))) },
        { ...lines, size: 50, gap: 4, values: (u, at) => at.map((y) => (y === null ? "" : compact(y))) },
      ],
      hooks: {
        setCursor: [() => this.show()],
        setSelect: [(u) => {
          if (u.select.width < 8) return;
          const [from, to] = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          this.grid.zoom([from, to]);
        }],
        ready: [(u) => u.over.addEventListener("dblclick", () => this.grid.zoom(null))],
      },
    };
  }

  // Writes the values under the cursor, or else the last.
  show() {
    if (!this.plot || !this.found) return;
    const at = this.plot.cursor.idx, parts = [], said = [];
    let column = 1;
    for (const { run, hasBand, isEvaluation } of this.found) {
      const values = this.plot.data[column];
      column += hasBand ? 3 : 1;
      const value = nearest(values, at ?? values.length - 1);
      const text = isEvaluation ? `evaluated ${compact(value)}` : compact(value);
      const part = Object.assign(document.createElement("span"), { textContent: text, title: run.name });
      part.style.color = `var(--${run.colour})`;
      parts.push(part);
      said.push(`${run.name} ${text}`);
    }
    this.values.replaceChildren(...parts);
    this.card.setAttribute("aria-label", `${this.name}: ${said.join(", ")}`);
  }

  // The arrow keys move the cursor.
  press(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.plot || event.target !== this.card) return;
    event.preventDefault();
    const xs = this.plot.data[0], now = this.plot.cursor.idx ?? (step > 0 ? -1 : xs.length);
    const at = Math.min(xs.length - 1, Math.max(0, now + step * Math.max(1, Math.round(xs.length / 100))));
    this.plot.setCursor({ left: this.plot.valToPos(xs[at], "x"), top: 10 });
  }
}

// The value at a place or, where there is none, the last before it.
function nearest(values, at) {
  for (let i = at; i >= 0; i -= 1) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
}

function spanOf(low, high, isLog) {
  if (low === null || high === null) return [0, 1];
  if (isLog) return low > 0 ? [low / 1.2, high * 1.2] : [Math.max(high * 1e-6, 1e-12), Math.max(high, 1e-6) * 1.2];
  const pad = (high - low || Math.abs(high) || 1) * 0.06;
  return [low >= 0 && low - pad < 0 ? Math.min(low, 0) : low - pad, high + pad];
}
