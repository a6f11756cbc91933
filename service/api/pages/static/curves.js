// The curves of a job over its steps: loss, step time, gradient norm, learning rate, and each metric that its loss returns.

import { lineChart } from "./chart.js";
import { make, seconds } from "./format.js";

/** Draw into `boxes` (loss, seconds, norm, rate, metrics): one chart for each metric, made when it is first seen. */
export function showCurves(boxes, steps, evaluations, planned, options) {
  lineChart(boxes.loss, { series: both("loss", steps, evaluations, (s) => s.loss), label: "loss", options });
  lineChart(boxes.seconds, {
    series: [
      { name: "step", points: steps.map((s) => [s.step, s.step_s]) },
      { name: "measured makespan", points: steps.map((s) => [s.step, s.makespan_s]) },
    ],
    level: planned ? { name: "planned makespan", value: planned.makespan_s } : null,
    show: seconds,
    label: "time",
    options,
  });
  lineChart(boxes.norm, { series: [{ name: "gradient norm", points: steps.map((s) => [s.step, s.grad_norm]) }], label: "norm", options });
  lineChart(boxes.rate, { series: [{ name: "learning rate", points: steps.map((s) => [s.step, s.learning_rate]) }], label: "rate", options });
  for (const name of namesOf([...steps, ...evaluations])) {
    lineChart(chartOf(boxes.metrics, name), { series: both(name, steps, evaluations, (s) => s.metrics[name]), label: name, options });
  }
}

/** What training found and, where there is any, what evaluations did, with a mark at each. */
function both(name, steps, evaluations, value) {
  const series = [{ name, points: steps.map((s) => [s.step, value(s)]) }];
  const points = evaluations.map((s) => [s.step, value(s)]);
  if (points.some(([, found]) => Number.isFinite(found))) series.push({ name: `${name}, evaluated`, points, marked: true });
  return series;
}

function namesOf(steps) {
  return [...new Set(steps.flatMap((s) => Object.keys(s.metrics)))].sort();
}

function chartOf(box, name) {
  const found = [...box.querySelectorAll(".chart")].find((chart) => chart.dataset.metric === name);
  if (found) return found;
  const chart = make("div", { class: "chart", "data-metric": name });
  box.append(make("section", { "aria-label": name }, make("h2", {}, name), chart));
  return chart;
}
