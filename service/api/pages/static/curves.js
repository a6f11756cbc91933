// The curves of a job over its steps: loss, step time, and each metric that its loss returns.

import { lineChart } from "./chart.js";
import { make, seconds } from "./format.js";

/** Draw into `boxes` (loss, seconds, metrics): one chart for each metric, made when it is first seen. */
export function showCurves(boxes, steps, evaluations, planned) {
  lineChart(boxes.loss, { series: both("loss", steps, evaluations, (s) => s.loss), label: "Loss" });
  lineChart(boxes.seconds, {
    series: [
      { name: "step", points: steps.map((s) => [s.step, s.step_s]) },
      { name: "measured makespan", points: steps.map((s) => [s.step, s.makespan_s]) },
    ],
    level: planned ? { name: "planned makespan", value: planned.makespan_s } : null,
    show: seconds,
    label: "Step time",
  });
  for (const name of namesOf([...steps, ...evaluations])) {
    lineChart(chartOf(boxes.metrics, name), { series: both(name, steps, evaluations, (s) => s.metrics[name]), label: name });
  }
}

/** What training found and, where there is any, what evaluations did. */
function both(name, steps, evaluations, value) {
  const series = [{ name, points: steps.map((s) => [s.step, value(s)]) }];
  if (evaluations.length) series.push({ name: `${name}, evaluated`, points: evaluations.map((s) => [s.step, value(s)]) });
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
