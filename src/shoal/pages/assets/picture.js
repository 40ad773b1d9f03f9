// Draws a plan or a graph: boxes with boxes inside, and arrows between them. It fits any width,
// zooms, pans, opens and closes boxes, explains them, shows their source, and fills them with load.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const NEAREST = 3, FARTHEST = 0.1; // bounds of the zoom
const MOST_BARS = 24;              // workers that have a bar of their own
let numbered = 0;                  // clip paths so far
const tip = add(document.body, "div", { id: "tip", role: "tooltip", hidden: "" });

function paint(parent, tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function percent(share) {
  return `${Math.round(100 * share)} %`;
}

// ---- source code -------------------------------------------------------------------------------

const sources = {};
const reader = add(document.body, "dialog", { class: "source", "aria-label": "Source code" });

function openSource(place) {
  const found = sources[place];
  if (!found) return;
  const line = Number(place.split(":").at(-1));
  reader.replaceChildren();
  const head = add(reader, "header");
  add(head, "b", {}, `${place}`);
  if (found.file.startsWith("/")) {
    add(head, "a", { href: `vscode://file${encodeURI(found.file)}:${line}`, title: found.file }, "Open in editor");
  }
  add(head, "button", { type: "button" }, "Close").addEventListener("click", () => reader.close());
  const code = add(reader, "pre", { tabindex: "0" });
  found.text.replace(/\n$/, "").split("\n").forEach((text, i) => {
    const number = found.first + i;
    add(code, "span", { "data-line": number, class: number === line ? "here" : "" }, text || " ");
  });
  if (!reader.open) reader.showModal();
  code.querySelector(".here")?.scrollIntoView({ block: "nearest" });
}

reader.addEventListener("click", (event) => event.target === reader && reader.close());
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a.source");
  if (!link) return;
  event.preventDefault();
  openSource(decodeURIComponent(link.getAttribute("href").replace("#source=", "")));
});

// ---- explaining --------------------------------------------------------------------------------

function fillTip(thing, facts, hint) {
  tip.replaceChildren();
  add(tip, "h3", {}, thing.title);
  const list = add(tip, "dl");
  for (const [name, value] of facts) {
    add(list, "dt", {}, name);
    add(list, "dd", {}, value);
  }
  if (thing.values?.length) {
    const table = add(tip, "table");
    for (const row of thing.values) {
      const line = add(table, "tr");
      row.forEach((cell) => add(line, "td", {}, cell));
    }
  }
  if (hint) add(tip, "p", {}, hint);
}

function moveTip(event) {
  event.stopPropagation();
  tip.hidden = false;
  const spot = event.target.getBoundingClientRect();
  const [x, y] = event.type === "focus" ? [spot.x, spot.bottom] : [event.clientX, event.clientY];
  const [width, height] = [tip.offsetWidth, tip.offsetHeight];
  const below = y + 18 + height < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(x + 16, innerWidth - width - 12))}px`;
  tip.style.top = `${Math.max(8, below ? y + 18 : y - height - 14)}px`;
}

function hideTip() {
  tip.hidden = true;
}

addEventListener("keydown", (event) => event.key === "Escape" && hideTip());

// ---- the picture -------------------------------------------------------------------------------

class Picture {
  constructor(section, drawing, { meters = false } = {}) {
    Object.assign(this, { section, drawing, meters, chosen: new Map(), load: null, isMoved: false });
    Object.assign(sources, drawing.sources);
    this.addTools();
    this.svg = paint(section, "svg", {
      class: "plan", tabindex: "0", role: "group",
      "aria-label": `${drawing.title ?? "picture"}. Arrow keys move it, + and - zoom, 0 fits it.`,
    });
    this.root = paint(this.svg, "g", {});
    this.listen();
    new ResizeObserver(() => this.width !== section.clientWidth && this.arrange()).observe(section);
    this.arrange();
  }

  addTools() {
    const tools = add(this.section, "div", { class: "tools", role: "toolbar", "aria-label": "Picture" });
    const tool = (text, label, act) => {
      const button = add(tools, "button", { type: "button", title: label, "aria-label": label }, text);
      button.addEventListener("click", act);
    };
    tool("−", "Zoom out", () => this.zoom(0.8));
    tool("+", "Zoom in", () => this.zoom(1.25));
    tool("Fit", "Fit the picture to the page", () => this.fit());
    tool("Open all", "Show what all boxes hold", () => this.chooseAll(true));
    tool("Close all", "Show the outer boxes only", () => this.chooseAll(false));
    if (document.fullscreenEnabled) {
      tool("Full", "Full screen", () => (document.fullscreenElement ? document.exitFullscreen() : this.section.requestFullscreen()));
    }
  }

  chooseAll(isOpen) {
    const walk = (drawing) => drawing.boxes.forEach((box) => {
      if (!box.inside) return;
      this.chosen.set(box.id, isOpen);
      walk(box.inside);
    });
    walk(this.drawing);
    this.arrange();
  }

  toggle(box) {
    this.chosen.set(box.id, !box.isOpen);
    this.arrange(box.id);
  }

  // Lays everything out for the present width, and paints it; the box with this id keeps the focus.
  arrange(focused) {
    this.width = this.section.clientWidth;
    const room = document.fullscreenElement ? innerHeight - 70 : Math.max(360, 0.74 * innerHeight);
    const margin = 2 * PAD;
    const { placed } = fitting(this.drawing, this.chosen, this.meters, this.width - margin, room - 56);
    Object.assign(this, { placed, room });
    this.root.replaceChildren();
    this.fragments = new Map();
    this.channels = new Map();
    this.stages = new Map();
    this.paintDrawing(this.root, placed, 0, 0, "");
    this.fit();
    if (this.load) this.setLoad(this.load);
    if (focused) this.svg.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
  }

  // ---- zooming and panning ---------------------------------------------------------------------

  // The whole picture at most as large as it is, in the middle.
  fit() {
    const { width, height } = this.placed, top = 56;
    const k = Math.min(1, (this.width - 24) / width, Math.max(this.room - 56, 1.2 * this.width) / height);
    const tall = Math.round(height * k + top + 20);
    if (!document.fullscreenElement) this.svg.style.height = `${tall}px`;
    this.view = { k, x: (this.width - width * k) / 2, y: top };
    this.look();
  }

  look() {
    const { k, x, y } = this.view;
    this.root.setAttribute("transform", `translate(${x} ${y}) scale(${k})`);
  }

  zoom(factor, x = this.width / 2, y = this.svg.clientHeight / 2) {
    const k = Math.min(NEAREST, Math.max(FARTHEST, this.view.k * factor)), by = k / this.view.k;
    this.view = { k, x: x - (x - this.view.x) * by, y: y - (y - this.view.y) * by };
    this.look();
  }

  pan(dx, dy) {
    this.view.x += dx;
    this.view.y += dy;
    this.look();
  }

  listen() {
    const held = new Map();
    this.svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
      event.preventDefault();
      const { left, top } = this.svg.getBoundingClientRect();
      this.zoom(Math.exp(-event.deltaY / 300), event.clientX - left, event.clientY - top);
    }, { passive: false });
    this.svg.addEventListener("pointerdown", (event) => {
      held.set(event.pointerId, { x: event.clientX, y: event.clientY });
      this.isMoved = false;
    });
    const move = (event) => this.drag(event, held);
    addEventListener("pointermove", move);
    for (const end of ["pointerup", "pointercancel"]) addEventListener(end, (event) => held.delete(event.pointerId));
    this.svg.addEventListener("keydown", (event) => this.press(event));
    document.addEventListener("fullscreenchange", () => this.arrange());
  }

  drag(event, held) {
    const before = held.get(event.pointerId);
    if (!before) return;
    const [dx, dy] = [event.clientX - before.x, event.clientY - before.y];
    if (!this.isMoved && Math.hypot(dx, dy) < 4) return;
    this.isMoved = true;
    hideTip();
    const others = [...held].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
    held.set(event.pointerId, { x: event.clientX, y: event.clientY });
    if (!others.length) return this.pan(dx, event.pointerType === "touch" ? 0 : dy);
    const apart = (at) => Math.hypot(at.x - others[0].x, at.y - others[0].y) || 1;
    const { left, top } = this.svg.getBoundingClientRect();
    this.zoom(apart({ x: event.clientX, y: event.clientY }) / apart(before), others[0].x - left, others[0].y - top);
  }

  press(event) {
    const moves = {
      ArrowLeft: () => this.pan(40, 0), ArrowRight: () => this.pan(-40, 0),
      ArrowUp: () => this.pan(0, 40), ArrowDown: () => this.pan(0, -40),
      "+": () => this.zoom(1.25), "=": () => this.zoom(1.25), "-": () => this.zoom(0.8), 0: () => this.fit(),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  }

  // ---- painting --------------------------------------------------------------------------------

  paintDrawing(parent, drawing, x, y, fragment) {
    const move = `translate(${x - drawing.origin.x} ${y - drawing.origin.y})`;
    const group = paint(parent, "g", { transform: move });
    drawing.boxes.forEach((box) => this.paintBox(group, box, fragment));
    drawing.arrows.forEach((arrow) => this.paintArrow(group, arrow));
    drawing.arrows.forEach((arrow) => this.paintLabel(group, arrow));
  }

  paintBox(parent, box, fragment) {
    const [x, y] = [box.x - box.width / 2, box.y - box.height / 2];
    const group = paint(parent, "g", { class: `box ${box.kind} ${box.tone ?? ""}`, "data-id": box.id });
    const round = box.kind === "fragment" ? 14 : 9;
    const card = (shift, name) => paint(group, "rect", {
      class: name, x: x + shift, y: y + shift, width: box.width, height: box.height, rx: round,
    });
    if (box.stack) { card(2 * STACK, "card behind"); card(STACK, "card behind"); }
    card(0, "card");
    if (box.meter) this.paintMeter(group, box, x, y, round);
    const line = box.isOpen || box.meter ? y + 23 : box.y + (box.note ? -5 : 5);
    paint(group, "text", { class: "name", x: x + PAD, y: line }, box.label);
    if (box.badge) paintBadge(group, box, x + PAD + widthOf(box.label, "name") + 8, line);
    if (box.note && box.isOpen) {
      const end = { class: "note", x: x + box.width - PAD - (box.inside ? 18 : 0), y: line, "text-anchor": "end" };
      paint(group, "text", end, box.note);
    } else if (box.note) {
      paint(group, "text", { class: "note", x: x + PAD, y: line + 19 }, box.note);
    }
    if (box.inside?.boxes.length) this.paintToggle(group, box, x + box.width - PAD, line - 5);
    this.explain(group, box);
    this.act(group, box);
    const own = box.kind === "fragment" ? box.id : fragment;
    if (box.kind === "fragment") this.fragments.set(box.id, { ...this.fragments.get(box.id), group, box, x, y });
    else if (own) this.stages.set(`${own}/${box.label}`, group);
    if (box.isOpen) {
      const free = (box.width - 2 * PAD - box.inner.width) / 2;
      this.paintDrawing(group, box.inner, x + PAD + free, y + HEAD + box.meter + 6, own);
    }
  }

  paintToggle(parent, box, x, y) {
    const group = paint(parent, "g", { class: "toggle", transform: `translate(${x} ${y})` });
    paint(group, "circle", { r: 8 });
    paint(group, "path", { d: box.isOpen ? "M-3.5 0h7" : "M-3.5 0h7M0 -3.5v7" });
    group.addEventListener("click", (event) => {
      event.stopPropagation();
      if (!this.isMoved) this.toggle(box);
    });
  }

  // A click opens the source of a box, or what it holds; Enter does the same, Space opens or closes.
  act(group, box) {
    const isFragment = box.kind === "fragment";
    if (box.inside?.boxes.length) group.setAttribute("aria-expanded", box.isOpen);
    group.addEventListener("click", (event) => {
      event.stopPropagation();
      if (this.isMoved) return;
      if (!isFragment && sources[box.source]) openSource(box.source);
      else if (isFragment && !box.isOpen) this.toggle(box);
    });
    group.addEventListener("dblclick", (event) => {
      event.stopPropagation();
      if (isFragment && box.isOpen) this.toggle(box);
    });
    group.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      event.stopPropagation();
      if (event.key === "Enter" && sources[box.source]) openSource(box.source);
      else if (box.inside?.boxes.length) this.toggle(box);
    });
  }

  paintArrow(parent, arrow) {
    const [along, across] = arrow.isDown ? ["y", "x"] : ["x", "y"];
    const onward = Math.sign(arrow.stop[along] - arrow.start[along]) || 1;
    const tail = { [along]: arrow.stop[along] - onward * (6 + 1.5 * arrow.weight), [across]: arrow.stop[across] };
    const d = curve([arrow.start, ...arrow.middle, tail], along);
    const group = paint(parent, "g", {
      class: `arrow ${arrow.kind} ${arrow.tone ?? ""}`, "data-writer": arrow.writer, "data-reader": arrow.reader,
    });
    paint(group, "path", { class: "hit", d });
    paint(group, "path", { class: "line", d, "stroke-width": arrow.weight });
    const [w, h] = [6 + 1.5 * arrow.weight, 3.5 + arrow.weight];
    const { x, y } = arrow.stop;
    const back = arrow.isDown ? `l${-h} ${-onward * w} h${2 * h}` : `l${-onward * w} ${-h} v${2 * h}`;
    paint(group, "path", { class: "head", d: `M${x} ${y} ${back} Z` });
    this.explain(group, arrow);
    arrow.group = group;
  }

  paintLabel(parent, arrow) {
    const { x, y, width, height } = arrow;
    const group = paint(parent, "g", { class: `label ${arrow.kind} ${arrow.tone ?? ""}` });
    paint(group, "rect", { x: x - width / 2, y: y - height / 2, width, height, rx: 7 });
    const top = y - (arrow.lines.length * LINE) / 2;
    arrow.lines.forEach((line, i) => {
      paint(group, "text", { class: i === arrow.bold ? "bold" : "fine", x, y: top + LINE * i + 11.5 }, line);
    });
    this.explain(group, arrow, false);
    group.addEventListener("pointerenter", () => arrow.group.classList.add("lit"));
    group.addEventListener("pointerleave", () => arrow.group.classList.remove("lit"));
    if (arrow.name) {
      const waits = paint(group, "text", { class: "waits", x, y: y + height / 2 + 14 });
      this.channels.set(arrow.name, { group, arrow, waits });
    }
  }

  explain(group, thing, isStop = true) {
    if (isStop) group.setAttribute("tabindex", "0");
    group.setAttribute("role", "img");
    group.setAttribute("aria-label", [thing.title, ...thing.facts.map((f) => f.join(": "))].join("; "));
    const show = (event) => {
      event.stopPropagation();
      const hint = sources[thing.source] ? "click for its source" : "";
      fillTip(thing, [...thing.facts, ...this.loadFacts(thing)], hint);
      moveTip(event);
    };
    group.addEventListener("pointerover", show);
    group.addEventListener("pointermove", moveTip);
    group.addEventListener("focus", show);
    group.addEventListener("pointerout", hideTip);
    group.addEventListener("blur", hideTip);
  }

  // ---- load ------------------------------------------------------------------------------------

  paintMeter(group, box, x, y, round) {
    const id = `level${(numbered += 1)}`, card = { x, y, width: box.width, height: box.height, rx: round };
    paint(paint(group, "clipPath", { id }), "rect", card);
    const level = paint(group, "rect", {
      class: "level", "clip-path": `url(#${id})`, x, y: y + box.height, width: box.width, height: 0,
    });
    const meter = paint(group, "g", { class: "meter" });
    const left = x + PAD, wide = box.width - 2 * PAD, top = y + (box.isOpen ? HEAD : HEAD + 14);
    const text = paint(meter, "text", { x: left, y: top + 11 });
    const bars = paint(meter, "g", {});
    const rest = { x: left, y: top + 18, height: 6, rx: 3 };
    paint(meter, "rect", { class: "track", width: wide, ...rest });
    const busy = paint(meter, "rect", { class: "busy", width: 0, ...rest });
    const python = paint(meter, "rect", { class: "python", width: 0, ...rest });
    this.fragments.set(box.id, { level, text, bars, busy, python, wide, right: left + wide, top });
  }

  // Fills the picture with a load: what fragments and workers compute, and who waits where.
  setLoad(load) {
    this.load = load;
    for (const [name, parts] of this.fragments) {
      const found = load.fragments[name];
      if (parts.level) this.fill(parts, found ?? { busy: 0, python: {}, workers: [] }, !found);
    }
    for (const [name, { arrow, waits }] of this.channels) {
      const { take = 0, put = 0 } = load.channels[name] ?? {};
      const [who, share, what] = take >= put ? [arrow.reader, take, ""] : [arrow.writer, put, " for room"];
      waits.textContent = share >= 0.05 ? `${who} waits ${percent(share)}${what}` : "";
    }
    this.flag(load.bottleneck);
  }

  fill({ box, x, y, level, text, bars, busy, python, wide, right, top }, found, isUnknown) {
    const inPython = Object.values(found.python).reduce((a, b) => a + b, 0);
    level.setAttribute("y", y + box.height * (1 - found.busy));
    level.setAttribute("height", box.height * found.busy);
    busy.setAttribute("width", wide * found.busy);
    python.setAttribute("width", wide * Math.min(inPython, found.busy));
    text.textContent = isUnknown ? "" : `${percent(found.busy)} busy`;
    bars.replaceChildren();
    if (found.workers.length < 2 || found.workers.length > MOST_BARS) return;
    const step = Math.min(9, (wide - widthOf("100 % busy", "badge") - 8) / found.workers.length);
    found.workers.forEach((share, i) => {
      const at = right - step * (found.workers.length - i), tall = Math.max(1, 13 * share);
      paint(bars, "rect", { class: "track", x: at + 1, y: top, width: step - 2, height: 13, rx: 1.5 });
      paint(bars, "rect", { class: "worker", x: at + 1, y: top + 13 - tall, width: step - 2, height: tall, rx: 1.5 });
    });
  }

  // Marks what limits the run.
  flag({ kind, target }) {
    this.svg.querySelectorAll(".limits").forEach((group) => group.classList.remove("limits"));
    this.svg.querySelectorAll(".flag").forEach((group) => group.remove());
    const fragment = this.fragments.get(target.split(/[[/]/)[0]);
    if (kind === "queue") {
      const found = this.channels.get(target);
      if (!found) return;
      found.group.classList.add("limits");
      paintFlag(found.group, found.arrow.x - found.arrow.width / 2, found.arrow.y - found.arrow.height / 2);
    } else if (["fragment", "stage", "worker"].includes(kind) && fragment) {
      fragment.group.classList.add("limits");
      this.stages.get(target)?.classList.add("limits");
      paintFlag(fragment.group, fragment.x + 12, fragment.y);
    }
  }

  loadFacts(thing) {
    const load = this.load, found = load?.fragments[thing.id];
    if (thing.kind === "fragment" && found) {
      return [
        ["busy", percent(found.busy)],
        ...Object.entries(found.python).map(([stage, share]) => [`in ${stage} (Python)`, percent(share)]),
      ];
    }
    const waits = load?.channels[thing.name];
    return waits ? [[`${thing.reader} waits`, percent(waits.take)], [`${thing.writer} waits for room`, percent(waits.put)]] : [];
  }
}

function paintBadge(parent, box, x, line) {
  const width = widthOf(box.badge, "badge") + 12;
  paint(parent, "rect", { class: "badge", x, y: line - 14, width, height: 18, rx: 9 });
  paint(parent, "text", { class: "badge", x: x + 6, y: line - 1 }, box.badge);
}

function paintFlag(parent, x, y) {
  const flag = paint(parent, "g", { class: "flag", transform: `translate(${x} ${y - 13})` });
  paint(flag, "rect", { width: 74, height: 18, rx: 9 });
  paint(flag, "text", { x: 37, y: 13, "text-anchor": "middle" }, "bottleneck");
}

// A smooth curve that leaves and enters boxes straight.
function curve(points, along) {
  return points.slice(1).reduce((path, point, i) => {
    const before = points[i], half = (point[along] - before[along]) / 2;
    const one = along === "x" ? [before.x + half, before.y] : [before.x, before.y + half];
    const two = along === "x" ? [point.x - half, point.y] : [point.x, point.y - half];
    return `${path} C${one.join(" ")} ${two.join(" ")} ${point.x} ${point.y}`;
  }, `M${points[0].x} ${points[0].y}`);
}
