// Curves over steps, drawn by uPlot: dragging zooms, a double click shows all steps, the legend reads the nearest step.

import { number } from "./format.js";

const HEIGHT = 230;
const COLOURS = ["--F", "--B"];
const MANY_POINTS = 30; // a curve of as many is a line without a mark at each
const MARK_SIZE = 6;
const MEAN_WEIGHT = 0.9; // of what was before, in an exponential mean

/**
 * Draw into `box`. `series`: [{name, points: [[step, value], ...], marked}], at most two curves; `marked`: a mark at each point.
 * `level`: {name, value} adds a dashed horizontal line. `show` turns a value into text. `options`: {logarithmic, smoothed}.
 * `across` is what the curves run over.
 */
export function lineChart(box, { series, level = null, show = number, label, across = "step", options = {} }) {
  const usable = ([, y]) => Number.isFinite(y) && (!options.logarithmic || y > 0);
  const curves = series.map((s) => ({ ...s, points: s.points.filter(usable) }));
  if (curves.every((curve) => curve.points.length === 0)) {
    remove(box);
    box.textContent = options.logarithmic ? "No value above 0." : "No value reported.";
    return;
  }
  const lines = linesOf(curves, level, options);
  const form = JSON.stringify([across, lines.map((line) => line.name), options, matchMedia("(prefers-color-scheme: dark)").matches]);
  const data = columns(lines);
  if (box.plot && box.form === form) {
    update(box.plot, data);
  } else {
    remove(box);
    box.form = form;
    box.plot = new uPlot(appearance(box, lines, show, label, across, options), data, box);
    box.setAttribute("role", "group");
  }
  box.plot.setSize({ width: Math.max(box.clientWidth, 260), height: HEIGHT });
  box.setAttribute("aria-label", describe(label, curves, show));
  curves.forEach((curve, index) => {
    const row = box.querySelectorAll(".u-legend .u-series")[lines.findIndex((line) => line.name === curve.name) + 1];
    row.classList.add("curve", ...(index ? ["second"] : []));
    row.dataset.points = curve.points.length;
  });
}

function remove(box) {
  box.plot?.destroy();
  box.plot = null;
  box.replaceChildren();
}

/** What is drawn: the curves, the mean of the first where that is asked for, and the level. */
function linesOf(curves, level, { smoothed }) {
  const lines = curves.map((curve, index) => ({ ...curve, colour: COLOURS[index], faint: smoothed && index === 0 }));
  if (smoothed && curves[0].points.length > 1) lines.push({ name: `${curves[0].name}, smoothed`, points: mean(curves[0].points), colour: COLOURS[0] });
  if (level) {
    const steps = curves.flatMap((curve) => curve.points.map(([step]) => step));
    const ends = [Math.min(...extent(steps)), Math.max(...extent(steps))];
    lines.push({ name: level.name, points: ends.map((step) => [step, level.value]), colour: "--soft", dashed: true });
  }
  return lines;
}

/** An exponential mean that begins at the first value, as TensorBoard's (debiased). */
function mean(points) {
  let sum = 0;
  let weight = 0;
  return points.map(([step, value]) => {
    sum = MEAN_WEIGHT * sum + (1 - MEAN_WEIGHT) * value;
    weight = MEAN_WEIGHT * weight + (1 - MEAN_WEIGHT);
    return [step, sum / weight];
  });
}

/** uPlot's form: all steps, and of each line its value at each, null where it has none. */
function columns(lines) {
  const steps = [...new Set(lines.flatMap((line) => line.points.map(([step]) => step)))].sort((a, b) => a - b);
  return [steps, ...lines.map((line) => {
    const known = new Map(line.points);
    return steps.map((step) => known.get(step) ?? null);
  })];
}

function appearance(box, lines, show, label, across, { logarithmic }) {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") }, font: "11px system-ui", labelFont: "12px system-ui", labelSize: 18 };
  return {
    width: Math.max(box.clientWidth, 260),
    height: HEIGHT,
    scales: { x: { time: false }, y: { distr: logarithmic ? 3 : 1 } },
    cursor: { drag: { x: true, y: false } },
    axes: [
      { ...axis, label: across, size: 34, values: (_, values) => values.map((at) => (across !== "step" || Number.isInteger(at) ? number(at) : "")) },
      { ...axis, label, size: 62, values: (_, values) => values.map((value) => (value === null ? "" : show(value))) },
    ],
    series: [{ label: across, value: (_, at) => (at === null || at === undefined ? "–" : number(at)) }, ...lines.map((line) => ({
      label: line.name,
      stroke: colour(line.colour),
      alpha: line.faint ? 0.35 : 1,
      width: 1.6,
      dash: line.dashed ? [5, 4] : undefined,
      spanGaps: true,
      points: line.marked ? { show: true, size: MARK_SIZE, fill: colour(line.colour) } : { show: !line.dashed && line.points.length < MANY_POINTS },
      value: (_, value) => (value === null || value === undefined ? "–" : show(value)),
    }))],
  };
}

/** New values; a reader who has zoomed keeps the steps that are shown. */
function update(plot, data) {
  const [first, last] = extent(plot.data[0]);
  const { min, max } = plot.scales.x;
  const zoomed = min > first || max < last;
  plot.setData(data, !zoomed);
  if (zoomed) plot.redraw();
}

function describe(label, curves, show) {
  const words = curves.filter((c) => c.points.length).map((curve) => {
    const [[from, start], [to, end]] = [curve.points[0], curve.points.at(-1)];
    return `${curve.name} from ${show(start)} at step ${from} to ${show(end)} at step ${to}`;
  });
  return `${label}: ${words.join("; ")}`;
}

function extent(values) {
  return values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
}
