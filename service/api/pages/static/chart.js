// A line chart over steps, drawn as SVG; the pointer reads the nearest step.

import { draw, make, number, ticks } from "./format.js";

const HEIGHT = 200;
const LEFT = 62;
const RIGHT = 8;
const TOP = 14;
const BOTTOM = 24;

/**
 * Draw into `box`. `series`: [{name, points: [[step, value], ...]}], at most two curves.
 * `level`: {name, value} adds a dashed horizontal line. `show` turns a value into text.
 */
export function lineChart(box, { series, level = null, show = number, label }) {
  const curves = series.map((s) => ({ ...s, points: s.points.filter(([, y]) => Number.isFinite(y)) }));
  const all = curves.flatMap((s) => s.points);
  if (all.length === 0) {
    box.replaceChildren(make("p", { class: "notice" }, "No step reported."));
    return;
  }
  const width = Math.max(box.clientWidth, 260);
  const heights = all.map(([, y]) => y).concat(level ? [level.value] : []);
  const [first, last] = extent(all.map(([x]) => x));
  const [low, high] = padded(extent(heights));
  const x = (step) => LEFT + ((step - first) / (last - first || 1)) * (width - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);

  const svg = draw("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": describe(label, curves, show) });
  for (const value of ticks(low, high, 4)) {
    svg.append(draw("path", { class: "axis", d: `M${LEFT} ${y(value)}H${width - RIGHT}` }));
    svg.append(draw("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, show(value)));
  }
  for (const step of ticks(first, last, Math.max(2, Math.floor(width / 110))).filter(Number.isInteger)) {
    svg.append(draw("text", { x: x(step), y: HEIGHT - 6, "text-anchor": "middle" }, String(step)));
  }
  if (level) svg.append(draw("path", { class: "planned", d: `M${LEFT} ${y(level.value)}H${width - RIGHT}` }));
  curves.forEach((curve, index) => {
    const points = thinned(curve.points, width - LEFT - RIGHT);
    const d = points.map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    const dot = points.length === 1 ? "h0.01" : "";
    svg.append(draw("path", { class: `curve${index ? " second" : ""}`, d: d + dot, "stroke-linecap": "round", "data-points": curve.points.length }));
  });
  box.replaceChildren(svg, ...key(curves, level, show));
  readPointer(box, svg, curves, x, width, show);
}

function key(curves, level, show) {
  if (curves.length < 2 && !level) return [];
  const names = curves.map((curve, index) => `${index ? "orange" : "blue"}: ${curve.name}`);
  if (level) names.push(`dashed: ${level.name} ${show(level.value)}`);
  return [make("p", { class: "small" }, names.join(" · "))];
}

function readPointer(box, svg, curves, x, width, show) {
  const reading = make("span", { class: "reading" });
  const cursor = draw("path", { class: "cursor" });
  box.append(reading);
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    const at = ((event.clientX - frame.left) / frame.width) * width;
    const step = nearest(curves[0].points.length ? curves[0].points : curves.at(-1).points, (p) => Math.abs(x(p[0]) - at))[0];
    const values = curves.map((curve) => {
      const point = curve.points.find(([s]) => s === step);
      return point ? `${curve.name} ${show(point[1])}` : null;
    });
    reading.textContent = `step ${step}: ${values.filter(Boolean).join(", ")}`;
    cursor.setAttribute("d", `M${x(step)} ${TOP}V${HEIGHT - BOTTOM}`);
    svg.append(cursor);
  });
  svg.addEventListener("pointerleave", () => { reading.textContent = ""; cursor.remove(); });
}

function describe(label, curves, show) {
  const words = curves.filter((c) => c.points.length).map((curve) => {
    const [[from, start], [to, end]] = [curve.points[0], curve.points.at(-1)];
    return `${curve.name} from ${show(start)} at step ${from} to ${show(end)} at step ${to}`;
  });
  return `${label}: ${words.join("; ")}`;
}

/** At most four points a pixel column: first, lowest, highest, last, in order. */
function thinned(points, pixels) {
  if (points.length <= pixels * 2) return points;
  const size = Math.ceil(points.length / pixels);
  const out = [];
  for (let i = 0; i < points.length; i += size) {
    const part = points.slice(i, i + size);
    const low = part.reduce((a, b) => (b[1] < a[1] ? b : a));
    const high = part.reduce((a, b) => (b[1] > a[1] ? b : a));
    out.push(...[...new Set([part[0], low, high, part.at(-1)])].sort((a, b) => a[0] - b[0]));
  }
  return out;
}

function extent(values) {
  return values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
}

function padded([low, high]) {
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

function nearest(items, distance) {
  return items.reduce((a, b) => (distance(b) < distance(a) ? b : a));
}
