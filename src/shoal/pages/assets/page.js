// Draws the picture of a page: boxes with boxes inside, and arrows between them.
// dagre decides where everything goes; this file measures, paints and explains on hover.
"use strict";

const svg = document.querySelector("#picture svg");
const tip = document.querySelector("#tip");
const picture = JSON.parse(document.querySelector("#drawing").textContent);

const FONT = "Inter, ui-sans-serif, system-ui, 'Segoe UI', 'Liberation Sans', Roboto, sans-serif";
const TEXT = {
  name: `600 14px ${FONT}`, note: `12px ${FONT}`, badge: `600 12px ${FONT}`, line: `500 11.5px ${FONT}`,
};
const PAD = 16;       // from the border of a box to what is inside
const HEAD = 34;      // height of the head of a box that holds others
const STACK = 5;      // how far each card of a stack of replicas stands out
const LINE = 15;      // height of a line of a label
const SMALLEST = 0.7; // scale below which the picture is scrolled rather than made smaller
const PORT = 22;      // distance of two arrows on one side of a box

// ---- measuring ---------------------------------------------------------------------------------

const ruler = document.createElement("canvas").getContext("2d");

function widthOf(text, style) {
  ruler.font = TEXT[style];
  return text ? ruler.measureText(text).width : 0;
}

function headOf(box) {
  const badge = box.badge ? widthOf(box.badge, "badge") + 22 : 0;
  return widthOf(box.label, "name") + badge;
}

// The box with its size and, where it holds others, with their places.
function sized(box) {
  if (!box.inside) {
    const width = Math.max(headOf(box), widthOf(box.note, "note")) + 2 * PAD;
    return { ...box, width: Math.max(width, 84), height: box.note ? 54 : 38 };
  }
  const inner = placed(box.inside);
  const head = headOf(box) + widthOf(box.note, "note") + (box.note ? 14 : 0);
  return {
    ...box, inner,
    width: Math.max(head, inner.width) + 2 * PAD, height: HEAD + inner.height + PAD + 6,
  };
}

// ---- placing -----------------------------------------------------------------------------------

// A drawing with a place for every box, and a path and a place for the label of every arrow.
function placed(drawing) {
  const graph = new dagre.graphlib.Graph({ multigraph: true });
  graph.setGraph({ rankdir: "LR", nodesep: 30, ranksep: 64, edgesep: 22 });
  const boxes = drawing.boxes.map(sized);
  boxes.forEach((box) => graph.setNode(box.id, { width: box.width, height: box.height }));
  drawing.arrows.forEach((arrow, i) => {
    const width = Math.max(...arrow.lines.map((line) => widthOf(line, "line"))) + 20;
    const height = arrow.lines.length * LINE + 9;
    graph.setEdge(arrow.writer, arrow.reader, { width, height, labelpos: "c" }, `arrow${i}`);
  });
  dagre.layout(graph);
  const at = new Map(boxes.map((box) => [box.id, { ...box, ...graph.node(box.id) }]));
  const arrows = drawing.arrows.map((arrow, i) => {
    const edge = graph.edge({ v: arrow.writer, w: arrow.reader, name: `arrow${i}` });
    return { ...arrow, ...edge, middle: edge.points.slice(1, -1) };
  });
  dock(arrows, at);
  return framed([...at.values()], arrows);
}

// Gives each arrow its own point on the sides of the boxes it joins, so that none lie on another.
function dock(arrows, at) {
  const sides = new Map();
  for (const arrow of arrows) {
    const [from, to] = [at.get(arrow.writer), at.get(arrow.reader)];
    const onward = from.x <= to.x ? 1 : -1;
    for (const [end, box, side, next] of [
      ["start", from, onward, arrow.middle[0]], ["stop", to, -onward, arrow.middle.at(-1)],
    ]) {
      const key = `${box.id} ${side}`;
      if (!sides.has(key)) sides.set(key, []);
      sides.get(key).push({ arrow, end, box, side, y: next.y });
    }
  }
  for (const docked of sides.values()) {
    docked.sort((a, b) => a.y - b.y);
    const { box, side } = docked[0];
    const x = box.x + (side * box.width) / 2 + (box.stack && side > 0 ? 2 * STACK : 0);
    const heights = spread(docked.map((d) => d.y), box.y - box.height / 2 + 12, box.y + box.height / 2 - 12);
    docked.forEach(({ arrow, end }, i) => { arrow[end] = { x, y: heights[i] }; });
  }
}

// The rising `wishes` moved between `low` and `high`, and apart where they are too close.
function spread(wishes, low, high) {
  const gap = Math.min(PORT, (high - low) / Math.max(1, wishes.length - 1));
  const found = [];
  for (const wish of wishes) found.push(Math.max(wish, low, (found.at(-1) ?? -Infinity) + gap));
  let most = high;
  for (let i = found.length - 1; i >= 0; i -= 1, most -= gap) {
    found[i] = most = Math.min(found[i], most);
  }
  return found;
}

// The drawing moved to the origin, with its size.
function framed(boxes, arrows) {
  const left = [], right = [], top = [], bottom = [];
  const cover = (x, y, w, h) => {
    left.push(x - w / 2); right.push(x + w / 2); top.push(y - h / 2); bottom.push(y + h / 2);
  };
  boxes.forEach((box) => {
    cover(box.x, box.y, box.width, box.height);
    if (box.stack) cover(box.x + 2 * STACK, box.y + 2 * STACK, box.width, box.height);
  });
  arrows.forEach((arrow) => {
    cover(arrow.x, arrow.y, arrow.width, arrow.height);
    arrow.middle.forEach((point) => cover(point.x, point.y, 2, 2));
  });
  const origin = { x: Math.min(...left), y: Math.min(...top) };
  return {
    boxes, arrows, origin,
    width: Math.max(...right) - origin.x, height: Math.max(...bottom) - origin.y,
  };
}

// ---- painting ----------------------------------------------------------------------------------

function paint(parent, tag, attributes, text) {
  const element = document.createElementNS(svg.namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function paintDrawing(parent, drawing, x, y) {
  const move = `translate(${x - drawing.origin.x} ${y - drawing.origin.y})`;
  const group = paint(parent, "g", { transform: move });
  drawing.boxes.forEach((box) => paintBox(group, box));
  drawing.arrows.forEach((arrow) => paintArrow(group, arrow));
  drawing.arrows.forEach((arrow) => paintLabel(group, arrow));
}

function paintBox(parent, box) {
  const [x, y] = [box.x - box.width / 2, box.y - box.height / 2];
  const group = paint(parent, "g", { class: `box ${box.kind} ${box.tone ?? ""}`, "data-id": box.id });
  const card = (shift, name) => paint(group, "rect", {
    class: name, x: x + shift, y: y + shift, width: box.width, height: box.height,
    rx: box.kind === "fragment" ? 14 : 9,
  });
  if (box.stack) { card(2 * STACK, "card behind"); card(STACK, "card behind"); }
  card(0, "card");
  const line = box.inside ? y + 23 : box.y + (box.note ? -5 : 5);
  paint(group, "text", { class: "name", x: x + PAD, y: line }, box.label);
  if (box.badge) paintBadge(group, box, x + PAD + widthOf(box.label, "name") + 8, line);
  if (box.note && box.inside) {
    const end = { class: "note", x: x + box.width - PAD, y: line, "text-anchor": "end" };
    paint(group, "text", end, box.note);
  } else if (box.note) {
    paint(group, "text", { class: "note", x: x + PAD, y: box.y + 14 }, box.note);
  }
  explain(group, box);
  if (box.inner) {
    const free = (box.width - 2 * PAD - box.inner.width) / 2;
    paintDrawing(group, box.inner, x + PAD + free, y + HEAD + 6);
  }
}

function paintBadge(parent, box, x, line) {
  const width = widthOf(box.badge, "badge") + 12;
  paint(parent, "rect", { class: "badge", x, y: line - 14, width, height: 18, rx: 9 });
  paint(parent, "text", { class: "badge", x: x + 6, y: line - 1 }, box.badge);
}

// A smooth curve that leaves and enters boxes level.
function curve(points) {
  return points.slice(1).reduce((path, point, i) => {
    const half = (point.x - points[i].x) / 2;
    const [x0, y0, x1, y1] = [points[i].x, points[i].y, point.x, point.y];
    return `${path} C${x0 + half} ${y0} ${x1 - half} ${y1} ${x1} ${y1}`;
  }, `M${points[0].x} ${points[0].y}`);
}

function paintArrow(parent, arrow) {
  const onward = Math.sign(arrow.stop.x - arrow.start.x) || 1;
  const tail = { x: arrow.stop.x - onward * (6 + 1.5 * arrow.weight), y: arrow.stop.y };
  const d = curve([arrow.start, ...arrow.middle, tail]);
  const group = paint(parent, "g", {
    class: `arrow ${arrow.kind} ${arrow.tone ?? ""}`, "data-writer": arrow.writer, "data-reader": arrow.reader,
  });
  paint(group, "path", { class: "hit", d });
  paint(group, "path", { class: "line", d, "stroke-width": arrow.weight });
  const [w, h] = [6 + 1.5 * arrow.weight, 3.5 + arrow.weight];
  const { x, y } = arrow.stop;
  paint(group, "path", { class: "head", d: `M${x} ${y} l${-onward * w} ${-h} v${2 * h} Z` });
  explain(group, arrow);
  arrow.group = group;
}

function paintLabel(parent, arrow) {
  const { x, y, width, height } = arrow;
  const group = paint(parent, "g", { class: `label ${arrow.kind} ${arrow.tone ?? ""}` });
  paint(group, "rect", { x: x - width / 2, y: y - height / 2, width, height, rx: 7 });
  const top = y - (arrow.lines.length * LINE) / 2;
  arrow.lines.forEach((line, i) => {
    paint(group, "text", { class: i === arrow.bold ? "bold" : "fine", x, y: top + LINE * i + 11.5 }, line);
  });
  explain(group, arrow);
  group.addEventListener("pointerenter", () => arrow.group.classList.add("lit"));
  group.addEventListener("pointerleave", () => arrow.group.classList.remove("lit"));
}

// ---- explaining --------------------------------------------------------------------------------

function add(parent, tag, text) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function explain(group, thing) {
  group.setAttribute("tabindex", "0");
  group.setAttribute("aria-label", [thing.title, ...thing.facts.map((f) => f.join(": "))].join("; "));
  const show = (event) => {
    event.stopPropagation();
    fillTip(thing);
    moveTip(event);
  };
  group.addEventListener("pointerover", show);
  group.addEventListener("pointermove", moveTip);
  group.addEventListener("focus", show);
  group.addEventListener("pointerout", hideTip);
  group.addEventListener("blur", hideTip);
}

function fillTip(thing) {
  tip.replaceChildren();
  add(tip, "h3", thing.title);
  const facts = add(tip, "dl");
  for (const [name, value] of thing.facts) {
    add(facts, "dt", name);
    add(facts, "dd", value);
  }
  if (thing.values?.length) {
    const table = add(tip, "table");
    for (const row of thing.values) {
      const line = add(table, "tr");
      row.forEach((cell) => add(line, "td", cell));
    }
  }
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

// ---- the picture -------------------------------------------------------------------------------

const whole = placed(picture);
const [width, height] = [whole.width + 24, whole.height + 24];
svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
svg.style.width = `${width}px`;
svg.style.minWidth = `${SMALLEST * width}px`;
paintDrawing(svg, whole, 12, 12);
addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
