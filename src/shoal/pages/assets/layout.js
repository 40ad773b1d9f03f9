// Gives every box and arrow of a drawing its place. dagre orders them; this file measures, docks
// the arrows at the boxes, and chooses how much detail fits a width.
"use strict";

const FONT = "Inter, ui-sans-serif, system-ui, 'Segoe UI', 'Liberation Sans', Roboto, sans-serif";
const TEXT = {
  name: `600 14px ${FONT}`, note: `12px ${FONT}`, badge: `600 12px ${FONT}`, line: `500 11.5px ${FONT}`,
};
const PAD = 16;        // from the border of a box to what is inside
const HEAD = 34;       // height of the head of a box that holds others
const METER = 30;      // height of the meter of a fragment's load
const STACK = 5;       // how far each card of a stack of replicas stands out
const LINE = 15;       // height of a line of a label
const PORT = 22;       // distance of two arrows on one side of a box
const READABLE = 0.72; // scale below which a drawing is shown with less detail
const ruler = document.createElement("canvas").getContext("2d");

function widthOf(text, style) {
  ruler.font = TEXT[style];
  return text ? ruler.measureText(text).width : 0;
}

// How a drawing is to be laid out: `ways` LR or TB, outside and inside of boxes; `opened(box, depth)`:
// whether what a box holds is shown; `meters`: whether fragments have one.
class Layout {
  constructor(ways, opened, meters) {
    Object.assign(this, { ways, opened, meters });
  }

  // A drawing with a place for every box, and a path and a place for the label of every arrow.
  place(drawing, depth = 0) {
    const graph = new dagre.graphlib.Graph({ multigraph: true });
    const way = this.ways[Math.min(depth, 1)], isDown = way === "TB";
    graph.setGraph({ rankdir: way, nodesep: isDown ? 36 : 30, ranksep: isDown ? 46 : 64, edgesep: 22 });
    const boxes = drawing.boxes.map((box) => this.size(box, depth));
    boxes.forEach((box) => graph.setNode(box.id, { width: box.width, height: box.height }));
    drawing.arrows.forEach((arrow, i) => {
      const width = Math.max(...arrow.lines.map((line) => widthOf(line, "line"))) + 20;
      const height = arrow.lines.length * LINE + 9, below = this.meters && arrow.name ? 2 * LINE : 0;
      graph.setEdge(arrow.writer, arrow.reader, { width, height: height + below, labelpos: "c" }, `arrow${i}`);
    });
    dagre.layout(graph);
    const at = new Map(boxes.map((box) => [box.id, { ...box, ...graph.node(box.id) }]));
    const arrows = drawing.arrows.map((arrow, i) => {
      const edge = graph.edge({ v: arrow.writer, w: arrow.reader, name: `arrow${i}` });
      const height = arrow.lines.length * LINE + 9; // what is below it says who waits
      return { ...arrow, ...edge, height, middle: edge.points.slice(1, -1), isDown };
    });
    dock(arrows, at, isDown);
    return framed([...at.values()], arrows);
  }

  // The box with its size and, where what it holds is shown, with that in its place.
  size(box, depth) {
    const meter = this.meters && box.kind === "fragment" ? METER : 0;
    const isOpen = box.inside?.boxes.length > 0 && this.opened(box, depth);
    const note = box.inside && !isOpen ? contentsOf(box) : box.note;
    if (!isOpen) {
      const width = Math.max(headOf(box), widthOf(note, "note")) + 2 * PAD + (box.inside ? 18 : 0);
      const height = (note ? 54 : 38) + meter;
      return { ...box, isOpen, note, meter, width: Math.max(width, meter ? 150 : 84), height };
    }
    const inner = this.place(box.inside, depth + 1);
    const head = headOf(box) + widthOf(box.note, "note") + (box.note ? 14 : 0) + 18;
    return {
      ...box, isOpen, inner, note, meter,
      width: Math.max(head, inner.width) + 2 * PAD, height: HEAD + meter + inner.height + PAD + 6,
    };
  }
}

// Gives each arrow its own point on the sides of the boxes it joins, so that none lie on another.
function dock(arrows, at, isDown) {
  const sides = new Map();
  const [along, across] = isDown ? ["y", "x"] : ["x", "y"];
  for (const arrow of arrows) {
    const [from, to] = [at.get(arrow.writer), at.get(arrow.reader)];
    const onward = from[along] <= to[along] ? 1 : -1;
    for (const [end, box, side, next] of [
      ["start", from, onward, arrow.middle[0]], ["stop", to, -onward, arrow.middle.at(-1)],
    ]) {
      const key = `${box.id} ${side}`;
      if (!sides.has(key)) sides.set(key, []);
      sides.get(key).push({ arrow, end, box, side, wish: next[across] });
    }
  }
  for (const docked of sides.values()) {
    docked.sort((a, b) => a.wish - b.wish);
    const { box, side } = docked[0];
    const [long, wide] = isDown ? [box.height, box.width] : [box.width, box.height];
    const edge = box[along] + (side * long) / 2 + (box.stack && side > 0 ? 2 * STACK : 0);
    const places = spread(docked.map((d) => d.wish), box[across] - wide / 2 + 12, box[across] + wide / 2 - 12);
    docked.forEach(({ arrow, end }, i) => { arrow[end] = { [along]: edge, [across]: places[i] }; });
  }
}

function headOf(box) {
  const badge = box.badge ? widthOf(box.badge, "badge") + 22 : 0;
  return widthOf(box.label, "name") + badge;
}

// The names of the stages that a closed box holds.
function contentsOf(box) {
  const found = [];
  const walk = (drawing) => drawing.boxes.forEach((inner) => {
    if (inner.kind !== "loop" && inner.kind !== "agree") found.push(inner.label);
    if (inner.kind === "loop" && inner.inside) walk(inner.inside);
  });
  walk(box.inside);
  const names = [...new Set(found)];
  return names.length > 3 ? `${names.slice(0, 3).join(", ")} + ${names.length - 3}` : names.join(", ");
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

// The layout that shows most at a readable size: `chosen` has what the reader opened or closed.
// What boxes hold may be laid out in another way than the boxes themselves.
const WAYS = [["LR", "LR"], ["TB", "LR"], ["LR", "TB"], ["TB", "TB"]];

function fitting(drawing, chosen, meters, width, height) {
  let best = null;
  [Infinity, 2, 1, 0].forEach((depth, less) => {
    const opened = (box, at) => chosen.get(box.id) ?? at < depth;
    for (const ways of WAYS) {
      const placed = new Layout(ways, opened, meters).place(drawing);
      const scale = Math.min(1, width / placed.width, Math.max(height, 1.2 * width) / placed.height);
      const room = Math.min(1, height / (scale * placed.height)); // less where the page must scroll
      const score = scale * Math.min(1, scale / READABLE) * (0.4 + 0.6 * room) * (1 - 0.09 * less);
      if (!best || score > best.score * 1.02) best = { placed, scale, score };
    }
  });
  return best;
}
