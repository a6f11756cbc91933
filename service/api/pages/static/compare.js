// Two jobs beside each other: their curves, over steps or over the time that training took, and what their specifications differ in.

import { addStep, read, readOn, repeat } from "./api.js";
import { lineChart } from "./chart.js";
import { make, seconds } from "./format.js";

const PAUSE_MS = 5000;
const RECENT = 100;

const form = document.getElementById("pair");
const places = new URLSearchParams(location.search);
const known = new Map(); // id: {job, steps, evaluations}

async function refresh() {
  await offerJobs();
  const ids = ["first", "second"].map((name) => form.elements[name].value);
  history.replaceState(null, "", `?${new URLSearchParams({ first: ids[0], second: ids[1] })}`);
  const two = ids.every(Boolean) && ids[0] !== ids[1];
  document.getElementById("note").hidden = two;
  document.getElementById("both").hidden = !two;
  if (!two) {
    const offered = form.elements.first.options.length - 1;
    document.getElementById("note").textContent = offered < 2 ? "There are no two jobs to compare." : "Choose two different jobs.";
    return true;
  }
  const pair = [];
  for (const id of ids) pair.push(await readJob(id));
  show(pair);
  return true;
}

/** The newest jobs, and those that the address names. */
async function offerJobs() {
  const first = form.elements.first;
  if (first.options.length > 2) return; // fewer: another job may have come since
  const { items } = await read(`/api/v1/jobs?limit=${RECENT}`);
  const ids = new Map(items.map((job) => [job.id, `${job.name} (${job.id})`]));
  for (const id of places.values()) if (id && !ids.has(id)) ids.set(id, id);
  const options = () => [["", "–"], ...ids].map(([id, text]) => make("option", { value: id }, text));
  const all = [...ids.keys()];
  const second = places.get("second") || (all.length > 1 && all.find((id) => id !== places.get("first")));
  const chosen = { first: places.get("first") || all.find((id) => id !== second), second };
  for (const name of ["first", "second"]) {
    form.elements[name].replaceChildren(...options());
    form.elements[name].value = chosen[name] || "";
  }
}

/** The job, with its steps and evaluations that came since it was read last. */
async function readJob(id) {
  const api = `/api/v1/jobs/${encodeURIComponent(id)}`;
  const one = known.get(id) ?? { steps: [], evaluations: [] };
  known.set(id, one);
  one.job = await read(api);
  for (const name of ["steps", "evaluations"]) {
    await readOn(`${api}/${name}`, one[name], (item) => `page_token=${item.attempt}:${item.step}`, (item) => addStep(item, one[name]));
  }
  return one;
}

function show(pair) {
  const options = { logarithmic: form.elements.logarithmic.checked };
  const overTime = form.elements.seconds.checked;
  const names = pair.map(({ job }) => (pair[0].job.name === pair[1].job.name ? job.id : job.name));
  const curves = (list, value) => pair.map((one, index) => {
    const clock = overTime ? clockOf(one.steps) : (step) => step;
    return { name: names[index], points: one[list].map((item) => [clock(item.step), value(item)]) };
  });
  const common = { options, across: overTime ? "training, s" : "step" };
  lineChart(document.getElementById("loss"), { ...common, series: curves("steps", (s) => s.loss), label: "loss" });
  lineChart(document.getElementById("seconds"), { ...common, series: curves("steps", (s) => s.step_s), show: seconds, label: "time" });
  lineChart(document.getElementById("norm"), { ...common, series: curves("steps", (s) => s.grad_norm), label: "norm" });
  lineChart(document.getElementById("rate"), { ...common, series: curves("steps", (s) => s.learning_rate), label: "rate" });
  lineChart(document.getElementById("evaluated"), { ...common, series: curves("evaluations", (s) => s.loss), label: "loss" });
  const leaves = pair.map(({ job }) => new Map(leavesOf("", job.spec)));
  const paths = [...new Set(leaves.flatMap((of) => [...of.keys()]))].filter((path) => leaves[0].get(path) !== leaves[1].get(path));
  const rows = paths.map((path) => make("tr", {}, make("th", { scope: "row" }, path),
    ...leaves.map((of) => make("td", {}, of.has(path) ? make("code", {}, of.get(path)) : "–"))));
  document.querySelector("#differences tbody").replaceChildren(...(rows.length ? rows : [make("tr", {}, make("td", { colspan: 3 }, "No field differs."))]));
}

/** From a step to the seconds of all steps up to it. */
function clockOf(steps) {
  let sum = 0;
  const ends = new Map(steps.map((step) => [step.step, (sum += step.step_s ?? 0)]));
  return (step) => ends.get(step) ?? 0;
}

/** [path, JSON] of every value of a specification that is no object. */
function leavesOf(path, value) {
  if (value === null || typeof value !== "object" || Array.isArray(value) || Object.keys(value).length === 0) return [[path, JSON.stringify(value)]];
  return Object.entries(value).flatMap(([name, part]) => leavesOf(path ? `${path}.${name}` : name, part));
}

form.addEventListener("change", refresh);
addEventListener("resize", refresh);
repeat(refresh, PAUSE_MS);
