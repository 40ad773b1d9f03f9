// The page of one or several runs: live from events, or from data that the page holds.
"use strict";

const COLOURS = ["tone0", "tone1", "tone2", "tone3", "tone4"];
const MOST_LINES = 2000;
const page = dataOf("page"); // names of the runs, and where the events come from, if they do
const section = (name) => document.getElementById(name);
const runs = page.names.map((name, i) => ({
  name, colour: COLOURS[i % COLOURS.length], facts: null, plan: null, load: null, columns: new Columns(), evaluations: [], log: [], isShown: true,
}));
const isOne = runs.length === 1;
const chosen = { window: "now", log: 0, isFollowed: true };
const dirty = new Set();

// ---- what arrives ------------------------------------------------------------------------------

function receive(news) {
  for (const { run: number, ...parts } of news) {
    const run = runs[number];
    for (const [name, part] of Object.entries(parts)) {
      if (name === "curves") run.columns.merge(part);
      else if (name === "log") run.log.push(...part);
      else run[name] = part;
      dirty.add(name);
    }
    run.log.splice(0, run.log.length - MOST_LINES);
  }
  schedule();
}

let isScheduled = false;

function schedule() {
  if (isScheduled || !dirty.size) return;
  isScheduled = true;
  requestAnimationFrame(() => {
    isScheduled = false;
    const changed = new Set(dirty);
    dirty.clear();
    for (const [part, render] of PARTS) if (changed.has(part)) render();
    document.body.dataset.painted = "true";
  });
}

function listen() {
  const stream = new EventSource(`events${location.search}`);
  const state = document.querySelector(".link");
  stream.addEventListener("open", () => {
    state.hidden = true;
    for (const run of runs) Object.assign(run, { log: [], columns: new Columns() });
    logged.clear();
  });
  stream.addEventListener("message", (event) => receive(JSON.parse(event.data)));
  stream.addEventListener("error", () => { state.hidden = false; });
}

// ---- head and numbers --------------------------------------------------------------------------

function pill(status) {
  return Object.assign(document.createElement("span"), { className: `pill ${status}`, textContent: status });
}

function rateOf(run) {
  const rates = run.columns.rates?.[0];
  return run.facts.running && rates ? nearest(rates, rates.length - 1) : run.facts.env_steps_per_second;
}

function remaining({ facts }) {
  const left = (facts.total - facts.ticks) * (facts.seconds / facts.ticks);
  return facts.running && facts.ticks > 0 && left > 0 ? left : null;
}

let wasRunning = null;

function renderHead() {
  const unread = runs.filter((run) => run.facts && run.facts.read < 1);
  section("reading").hidden = !unread.length;
  section("reading").textContent = `a sample; reading all rows: ${percent(Math.min(...unread.map((run) => run.facts.read)))}`;
  const facts = runs[0].facts;
  if (!isOne || !facts) return;
  section("status").replaceChildren(pill(facts.status ?? "unknown"));
  const words = [facts.algorithm && `${facts.algorithm} on ${facts.env}`, facts.distribution_policy, facts.backend, facts.envs && `${facts.envs} environments`, `seed ${facts.seed}`];
  section("about").textContent = words.filter(Boolean).join(" · ");
  const part = facts.total ? facts.ticks / facts.total : 0;
  document.querySelector(".progress i").style.width = `${100 * Math.min(1, part)}%`;
  section("problem").hidden = !(facts.error || facts.note);
  section("problem").textContent = [facts.error, facts.note].filter(Boolean).join("\n");
  if (wasRunning !== facts.running) dirty.add("load"), schedule();
  wasRunning = facts.running;
  document.title = `${facts.running ? `${Math.floor(100 * part)} % · ` : ""}${runs[0].name}`;
}

function tile(parent, name, value, more = "") {
  const box = add(parent, "div", { class: "card tile" });
  add(box, "span", {}, name);
  add(box, "b", {}, value);
  add(box, "small", {}, more);
}

function renderNumbers() {
  const { facts } = runs[0], box = section("numbers");
  if (!isOne || !facts) return;
  box.replaceChildren();
  const left = remaining(runs[0]);
  if (facts.return_mean !== null) tile(box, "mean return", compact(facts.return_mean), "last 100 episodes");
  if (facts.evaluation) tile(box, "evaluation", compact(facts.evaluation.return_mean), `${facts.evaluation.episodes} episodes at tick ${compact(facts.evaluation.tick)}`);
  tile(box, "ticks", compact(facts.ticks), facts.total ? `of ${compact(facts.total)}` : "");
  if (facts.env_steps) tile(box, "environment steps", compact(facts.env_steps), facts.episodes ? `${compact(facts.episodes)} episodes` : "");
  if (rateOf(runs[0])) tile(box, "steps per second", compact(rateOf(runs[0])), facts.running ? "now" : "without compiling");
  tile(box, "time", clock(facts.seconds), left ? `${clock(left)} left` : facts.compile_seconds ? `${clock(facts.compile_seconds)} compiling` : "");
  if (facts.lag) tile(box, "lag", compact(facts.lag.mean), `ticks, at most ${facts.lag.max}`);
}

const RUN_COLUMNS = [
  ["environment", (run) => run.facts.env], ["distribution", (run) => run.facts.distribution_policy],
  ["ticks", (run) => compact(run.facts.ticks)], ["steps", (run) => compact(run.facts.env_steps)], ["steps/s", (run) => compact(rateOf(run))],
  ["return", (run) => compact(run.facts.return_mean)], ["evaluation", (run) => compact(run.facts.evaluation?.return_mean)],
  ["time", (run) => clock(run.facts.seconds)],
];

function renderRuns() {
  if (isOne) return;
  const table = document.createElement("table");
  table.className = "runs";
  const head = add(add(table, "thead"), "tr");
  ["run", "state", ...RUN_COLUMNS.map(([name]) => name), "what limits it"].forEach((name) => add(head, "th", { scope: "col" }, name));
  const body = add(table, "tbody");
  for (const run of runs) {
    if (!run.facts) continue;
    const row = add(body, "tr"), label = add(add(row, "td"), "label");
    const box = add(label, "input", { type: "checkbox", "aria-label": `Show ${run.name}` });
    box.checked = run.isShown;
    box.addEventListener("change", () => { run.isShown = box.checked; grid.update(true); });
    add(label, "i", { class: `dot ${run.colour}` });
    add(label, "b", {}, run.name);
    add(row, "td").append(pill(run.facts.status ?? "unknown"));
    RUN_COLUMNS.forEach(([, of]) => add(row, "td", {}, of(run) ?? "–"));
    add(row, "td", { class: "wide" }, loadOf(run)?.bottleneck.text ?? "–");
  }
  section("runs").replaceChildren(table);
}

// ---- the plan, filled with load ----------------------------------------------------------------

// The load of the chosen time; of a run that has ended, all of it.
function loadOf({ load, facts }) {
  const now = facts?.running ? load?.now : null;
  return (chosen.window === "now" ? now ?? load?.whole : load?.whole ?? now) ?? null;
}

function renderPlan() {
  for (const run of runs) {
    if (!run.plan || run.picture) continue;
    const box = add(section("pictures"), "div");
    if (!isOne) {
      const title = add(box, "h3");
      add(title, "i", { class: `dot ${run.colour}` });
      title.append(run.name);
    }
    run.picture = new Picture(add(box, "section", { class: "picture" }), run.plan, { meters: true });
  }
  section("plan").hidden = !runs.some((run) => run.picture);
  renderLoad();
}

function renderLoad() {
  const hasLoad = runs.some(loadOf);
  section("time").hidden = !hasLoad;
  section("windows").hidden = !runs.some(({ load, facts }) => facts?.running && load?.now && load.whole);
  section("finding").hidden = !isOne || !hasLoad;
  for (const run of runs) if (run.picture && loadOf(run)) run.picture.setLoad(loadOf(run));
  if (isOne && hasLoad) {
    const { kind, text } = loadOf(runs[0]).bottleneck, box = section("finding");
    box.className = `card finding ${kind}`;
    box.replaceChildren();
    add(box, "b", {}, { none: "Load", turns: "Taking turns" }[kind] ?? "Bottleneck");
    add(box, "span", {}, text);
  }
  renderTimes();
  renderRuns();
}

// What a wait is for, in words: what a channel carries, and who is at its other end.
function waitText(run, how, channel) {
  const arrow = run.plan?.arrows.find(({ name }) => name === channel);
  if (!arrow) return `${how} ${channel}`;
  return how === "take" ? `waits for ${arrow.lines[0]} from ${arrow.writer}` : `waits for room at ${arrow.reader}`;
}

function renderTimes() {
  const parent = section("times");
  parent.replaceChildren();
  for (const run of runs) {
    const load = loadOf(run);
    if (!load) continue;
    const box = add(parent, "div", { class: "card table" });
    if (!isOne) add(box, "h3", {}, run.name);
    const table = add(box, "table"), head = add(add(table, "thead"), "tr");
    for (const name of ["worker", "where its time goes", "busy", ""]) add(head, "th", { scope: "col" }, name);
    const body = add(table, "tbody"), tones = new Map(run.plan?.boxes.map((b) => [b.id, b.tone]));
    let fragment = "";
    for (const worker of load.workers) {
      const row = add(body, "tr", { class: `${tones.get(worker.fragment) ?? ""} ${worker.fragment === fragment ? "" : "first"}` });
      fragment = worker.fragment;
      addTimes(row, run, worker);
    }
  }
}

function addTimes(row, run, worker) {
  const name = add(row, "td", { class: "name" });
  add(name, "i", { class: "dot" });
  name.append(worker.name);
  const cell = add(row, "td", { class: "load" }), bar = add(cell, "div", { class: "stack" });
  const inPython = Object.entries(worker.python), python = inPython.reduce((sum, [, share]) => sum + share, 0);
  const parts = [
    ...inPython.map(([stage, share]) => ["python", share, `${stage}, in Python: ${percent(share)}`]),
    ["busy", Math.max(0, worker.busy - python), `computes: ${percent(Math.max(0, worker.busy - python))}`],
  ];
  for (const [kind, share, title] of parts) add(bar, "i", { class: kind, title }).style.width = `${100 * share}%`;
  const strip = run.load.timeline?.busy[worker.name];
  if (strip?.length > 2) paintStrip(add(cell, "canvas", { class: "strip", "aria-hidden": "true", title: "busy, over the run" }), strip, row);
  add(row, "td", { class: "share" }, percent(worker.busy));
  const waits = worker.waits.filter(([, , share]) => share >= 0.01).sort((a, b) => b[2] - a[2]);
  const why = waits.slice(0, 2).map(([how, channel, share]) => `${waitText(run, how, channel)} ${percent(share)}`);
  const most = inPython.sort((a, b) => b[1] - a[1])[0];
  add(row, "td", { class: "why" }, [most && most[1] >= 0.01 ? `in ${most[0]} ${percent(most[1])}` : "", ...why].filter(Boolean).join("; "));
}

function paintStrip(canvas, shares, row) {
  Object.assign(canvas, { width: shares.length, height: 1 });
  const pen = canvas.getContext("2d"), hue = getComputedStyle(row).getPropertyValue("--hue") || colour("accent");
  shares.forEach((share, i) => {
    if (share === null) return;
    pen.globalAlpha = 0.08 + 0.92 * share;
    pen.fillStyle = hue.startsWith("var") ? colour("accent") : hue;
    pen.fillRect(i, 0, 1, 1);
  });
}

// ---- lag, log, settings ------------------------------------------------------------------------

function renderLag() {
  const parent = section("lags"), late = runs.filter(({ facts }) => facts?.lag?.histogram);
  section("lag").hidden = !late.length;
  parent.replaceChildren();
  for (const run of late) {
    const { histogram, mean, max } = run.facts.lag, total = Object.values(histogram).reduce((a, b) => a + b, 0);
    const box = add(parent, "div", { class: `card lag ${run.colour}` });
    add(box, "h3", {}, `${isOne ? "" : `${run.name}: `}mean ${compact(mean)}, largest ${max}`);
    const list = add(box, "dl");
    for (const [lag, count] of Object.entries(histogram).map(([a, b]) => [Number(a), b]).sort((a, b) => a[0] - b[0])) {
      add(list, "dt", {}, lag === 1 ? "1 tick" : `${lag} ticks`);
      add(add(list, "dd"), "i").style.width = `${(100 * count) / Math.max(...Object.values(histogram))}%`;
      add(list, "dd", {}, `${((100 * count) / total).toFixed(1)} %`);
    }
  }
}

const logged = new Map(); // run: how many of its lines are on the page

function renderLog() {
  const box = section("lines"), { log } = runs[chosen.log], wanted = section("find").value.toLowerCase();
  const first = logged.get(chosen.log);
  if (first !== log[0] || wanted !== box.dataset.wanted || box.childElementCount > log.length) box.replaceChildren();
  logged.set(chosen.log, log[0]);
  box.dataset.wanted = wanted;
  const shown = log.filter((line) => line.toLowerCase().includes(wanted));
  shown.slice(box.childElementCount).forEach((line) => add(box, "div", {}, line || " "));
  box.classList.toggle("empty", !shown.length);
  if (chosen.isFollowed) box.scrollTop = box.scrollHeight;
}

function settingTable(title, rows) {
  const table = document.createElement("table");
  add(table, "caption", {}, title);
  const body = add(table, "tbody");
  for (const [name, value] of rows) {
    const row = add(body, "tr");
    add(row, "th", { scope: "row" }, name);
    add(row, "td", {}, value);
  }
  return table;
}

function renderSettings() {
  const parent = section("values"), known = runs.filter((run) => run.facts);
  const text = JSON.stringify(known.map((run) => run.facts.settings));
  if (parent.dataset.text === text) return;
  parent.dataset.text = text;
  parent.replaceChildren();
  if (isOne) {
    parent.className = "settings";
    for (const [title, rows] of known[0].facts.settings) add(parent, "div", { class: "table" }).append(settingTable(title, rows));
    return;
  }
  const all = new Map(); // setting: its value by run
  known.forEach((run, i) => run.facts.settings.forEach(([title, rows]) => rows.forEach(([name, value]) => {
    const key = `${title.split(":")[0]} · ${name}`;
    if (!all.has(key)) all.set(key, Array(known.length).fill("–"));
    all.get(key)[i] = value;
  })));
  const unlike = [...all].filter(([, values]) => new Set(values).size > 1);
  const table = add(add(parent, "div", { class: "table compare", tabindex: "0" }), "table");
  add(table, "caption", {}, unlike.length ? "Where the runs differ" : "All settings are the same");
  const head = add(add(table, "thead"), "tr");
  ["setting", ...known.map((run) => run.name)].forEach((name) => add(head, "th", { scope: "col" }, name));
  const body = add(table, "tbody");
  for (const [name, values] of unlike) {
    const row = add(body, "tr");
    add(row, "th", { scope: "row" }, name);
    values.forEach((value) => add(row, "td", { class: "unlike" }, value));
  }
}

// ---- controls ----------------------------------------------------------------------------------

const grid = new CurveGrid(section("charts"), () => runs.filter((run) => run.isShown));
grid.onzoom = (range) => { section("unzoom").hidden = !range; };

function connect() {
  addThemeButton(document.querySelector(".top"));
  section("axis").addEventListener("change", (event) => grid.change({ axis: event.target.value }));
  section("smooth").addEventListener("input", (event) => grid.change({ smoothing: Number(event.target.value) }));
  section("filter").addEventListener("input", (event) => grid.change({ filter: event.target.value }));
  section("unzoom").addEventListener("click", () => grid.zoom(null));
  section("find").addEventListener("input", renderLog);
  section("follow").addEventListener("change", (event) => { chosen.isFollowed = event.target.checked; renderLog(); });
  section("whose").addEventListener("change", (event) => { chosen.log = Number(event.target.value); renderLog(); });
  for (const button of section("windows").children) {
    button.addEventListener("click", () => {
      chosen.window = button.value;
      for (const other of section("windows").children) other.setAttribute("aria-pressed", other === button);
      renderLoad();
    });
  }
  document.addEventListener("themechange", renderTimes);
}

const PARTS = [
  ["facts", renderHead], ["facts", renderNumbers], ["plan", renderPlan], ["load", renderLoad],
  ["curves", () => grid.update()], ["curves", renderRuns], ["evaluations", () => grid.update()], ["facts", renderLag], ["log", renderLog],
  ["facts", renderSettings],
];

connect();
renderLog();
if (page.isLive) listen();
else receive(dataOf("runs"));
