// The page of one job: reads the JSON API every two seconds until the job has ended.

import { read, repeat } from "./api.js";
import { showCurves } from "./curves.js";
import { bytes, csv, make, number, percent, seconds, stateBadge, time } from "./format.js";
import { REASONS, TimelineView } from "./timeline.js";

const PAUSE_MS = 2000;
const PAGE = 1000;
const SHOWN_EVENTS = 500;
const FINAL = new Set(["SUCCEEDED", "FAILED", "CANCELLED"]);
const COMPUTE = new Set(["F", "B", "I", "W"]);
const SLOT_COLUMNS = ["panel", "mesh", "lane", "action", "stage", "peer_stage", "peer_mesh", "edge", "microbatch", "start_s", "end_s"];
const STEP_COLUMNS = ["step", "loss", "step_s", "makespan_s", "bubble_ratio", "exposed_transfer_s", "overlap_ratio", "grad_norm", "started_at"];

const $ = (id) => document.getElementById(id);
const id = $("job").dataset.job;
const api = `/api/v1/jobs/${encodeURIComponent(id)}`;
const page = `/jobs/${encodeURIComponent(id)}`;
const view = new TimelineView($("timeline"), $("tip"), $("legend"));
const steps = [];
const events = [];
const evaluations = [];
let planned = null;
let choice = null;
let shown = null;
let attempt = null;

async function refresh() {
  const job = await read(api);
  showJob(job);
  document.dispatchEvent(new CustomEvent("job", { detail: job })); // for actions.js
  const now = job.attempts?.at(-1)?.number ?? null;
  if (now !== attempt) begin(now);
  await readOn(`${api}/steps`, steps, (step) => `page_token=${step.attempt}:${step.step}`, (step) => addStep(step));
  await readOn(`${api}/evaluations`, evaluations, (one) => `page_token=${one.attempt}:${one.step}`, (one) => addStep(one, evaluations));
  showCharts();
  await refreshTimeline();
  showJob(job); // of a job that has ended there is no next round, and what its plan chose is known only now
  await readOn(`${api}/events`, events, (event) => `after=${event.number}`, (event) => events.push(event));
  showEvents();
  return !FINAL.has(job.state);
}

function showJob(job) {
  document.title = `${job.name} · Slotline`;
  $("name").textContent = job.name;
  const state = $("state");
  if (state.textContent !== job.state) state.textContent = job.state;
  state.dataset.state = job.state;
  const why = [job.reason, job.message].filter(Boolean).join(": ");
  if (FINAL.has(job.state)) $("timeline-note").textContent = "No timeline: no step was profiled, or its slots were removed since.";
  $("reason").hidden = !why;
  $("reason").textContent = why;
  const progress = job.progress ?? {};
  $("progress").max = progress.steps || 1;
  $("progress").value = progress.step ?? 0;
  const spec = job.spec ?? {};
  facts({
    Step: `${progress.step ?? 0} of ${progress.steps ?? spec.training?.steps ?? "–"}`,
    Loss: number(progress.loss),
    "Step time": seconds(progress.step_s),
    ...(progress.model_flops_per_s ? { Computes: `${number(progress.model_flops_per_s / 1e12, 3)} TFLOP/s of the model` } : {}),
    ...(progress.mfu ? { MFU: percent(progress.mfu) } : {}),
    ...(spec.plan ? { Plan: `the saved plan ${spec.plan}` } : {}),
    Pipeline: `${chosen("stages", spec.pipeline?.stages)}, ${meshesOf(spec)}, ${chosen("microbatches", spec.training?.microbatches)}`,
    ...(choice?.step_s ? { "Planned step": seconds(choice.step_s) } : {}),
    ...(job.best_checkpoint ? { "Best checkpoint": `${job.best_checkpoint.metric} ${number(job.best_checkpoint.value)} after step ${job.best_checkpoint.step}` } : {}),
    Schedule: spec.pipeline?.schedule ?? "–",
    Queue: `${job.queue}, priority ${job.priority}`,
    ...(job.owner ? { Owner: job.owner } : {}),
    ...(job.max_duration_s ? { "At most": seconds(job.max_duration_s) } : {}),
    ...(Object.keys(job.labels ?? {}).length ? { Labels: Object.entries(job.labels).map(([name, value]) => `${name}=${value}`).join(", ") } : {}),
    Submitted: time(job.created_at),
    Started: time(job.started_at),
    ...(job.finished_at ? { Ended: time(job.finished_at) } : {}),
  });
  rows("attempts", (job.attempts ?? []).map((a) => make("tr", {},
    make("td", { class: "number" }, String(a.number)), make("td", {}, stateBadge(a.state)),
    make("td", {}, a.reason ?? "", ...(a.message ? [make("small", {}, a.message)] : []),
      ...(a.state === "FAILED" ? [" ", make("a", { href: `${api}/postmortem?attempt=${a.number}`, download: "" }, "post-mortem")] : [])),
    make("td", {}, time(a.started_at)), make("td", {}, time(a.finished_at)))));
}

/** A number of the job in words; where the job leaves it open, the one that was planned. */
function chosen(what, given) {
  if (given !== "auto") return `${given ?? "–"} ${what}`;
  return choice?.[what] ? `${choice[what]} ${what} (chosen)` : `${what} to be chosen`;
}

/** How many meshes, and how many workers each has where that is more than one. */
function meshesOf(spec) {
  const { meshes, workers, workers_per_mesh: alike } = spec.resources ?? {};
  const each = workers ?? (alike > 1 ? [alike] : []);
  return `${meshes ?? "–"} meshes${each.length ? ` of ${each.join(", ")} workers` : ""}`;
}

function facts(values) {
  const pairs = Object.entries(values).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  $("facts").replaceChildren(...pairs);
}

function rows(table, list) {
  document.querySelector(`#${table} tbody`).replaceChildren(...list);
}

/** Another attempt has started: what is shown of the one before it is read again, as far as it still holds. */
function begin(number) {
  attempt = number;
  steps.length = evaluations.length = 0;
  shown = null;
}

/** Steps come by attempt: one that goes on from a checkpoint replaces what was done behind it. */
function addStep(step, list = steps) {
  while (list.length && list.at(-1).step >= step.step) list.pop();
  list.push(step);
}

/** `add` what came since the last of `list`, a few pages a round. */
async function readOn(path, list, place, add) {
  for (let page = 0; page < 20; page++) {
    const after = list.length ? `&${place(list.at(-1))}` : "";
    const answer = await read(`${path}?limit=${PAGE}${after}`);
    answer.items.forEach(add);
    if (!answer.next_page_token || answer.items.length === 0) return;
  }
}

function showCharts() {
  showCurves({ loss: $("loss"), seconds: $("seconds"), metrics: $("metrics") }, steps, evaluations, planned);
}

/** Read the timeline only when another step, or another attempt's, is to be shown: its slots never change. */
async function refreshTimeline() {
  const known = await read(`${page}/profiled-steps`);
  offerSteps(known.steps);
  if (known.planned === null) return;
  const chosen = $("step").value;
  const wanted = chosen ? Number(chosen) : (known.steps.at(-1) ?? null);
  const what = `${known.planned} ${known.attempts[known.steps.indexOf(wanted)]} ${wanted}`;
  if (what === shown && planned) return;
  const query = wanted === null ? "" : `step=${wanted}`;
  const timeline = await read(`${api}/timeline?format=json&${query}`);
  const gaps = await read(`${page}/gaps?${query}`);
  showMemory((await read(`${page}/memory`)).meshes);
  choice = await read(`${page}/choice`);
  if (chosen !== $("step").value) return;
  const keep = planned !== null;
  planned = timeline.planned;
  shown = what;
  showTimeline(timeline, gaps, keep);
  showCharts();
}

function showTimeline(timeline, gaps, keep) {
  const panels = [];
  const add = (name, title, line, list, note) => {
    if (line) panels.push({ name, title, note, makespan_s: line.makespan_s, slots: line.slots, gaps: list });
  };
  add("planned", "Planned", timeline.planned, gaps.planned, lengths(timeline.planned, gaps.meshes));
  const exact = timeline.uncertainty_s ? `, clocks agree to ${seconds(timeline.uncertainty_s)}` : "";
  add("measured", "Measured", timeline.measured, gaps.measured,
    `step ${timeline.step}, ${lengths(timeline.measured, gaps.meshes)}${exact}`);
  $("timeline-note").hidden = panels.length > 0;
  view.show(panels, { meshes: gaps.meshes, keep });
  showGaps(gaps, timeline);
  showUpdate(gaps.meshes, timeline.measured);
  $("chrome").href = `${api}/timeline?format=chrome${timeline.step === null ? "" : `&step=${timeline.step}`}`;
  $("chrome").download = `${id}-step-${timeline.step}.json`;
  const slots = panels.flatMap((panel) => panel.slots.map((slot) => ({ panel: panel.name, ...slot })));
  offer($("csv"), csv(SLOT_COLUMNS, slots), `${id}-step-${timeline.step}.csv`);
  const names = [...new Set(steps.flatMap((s) => Object.keys(s.metrics)))];
  offer($("steps-csv"), csv([...STEP_COLUMNS, ...names], steps.map((s) => ({ ...s.metrics, ...s }))), `${id}-steps.csv`);
}

/** Makespan and bubble in words; the bubble is what the compute lanes of all meshes leave of the makespan. */
function lengths(line, meshes) {
  if (!line) return "";
  const busy = line.slots.filter((s) => COMPUTE.has(s.action)).reduce((sum, s) => sum + s.end_s - s.start_s, 0);
  return `makespan ${seconds(line.makespan_s)}, bubble ${percent(1 - busy / (meshes.length * line.makespan_s))}`;
}

function showMemory(meshes) {
  rows("memory", meshes.map((one) => make("tr", {}, make("th", { scope: "row" }, one.mesh),
    ...[one.planned_bytes, one.measured_bytes, one.limit_bytes].map((size) => make("td", { class: "number" }, bytes(size))),
    make("td", {}, one.recomputed.join(", ") || "–"))));
}

/** What comes behind the makespan on each mesh, planned and in the shown step. */
function showUpdate(meshes, measured) {
  const took = (mesh, action) => {
    const slots = (measured?.slots ?? []).filter((s) => s.mesh === mesh && s.action === action);
    return slots.length ? slots.reduce((sum, s) => sum + s.end_s - s.start_s, 0) : null;
  };
  rows("update", meshes.map((mesh) => {
    const plan = choice?.update.find((one) => one.mesh === mesh);
    const cells = [plan?.reduce_s, took(mesh, "REDUCE"), plan?.step_s, took(mesh, "STEP")];
    return make("tr", {}, make("th", { scope: "row" }, mesh), ...cells.map((s) => make("td", { class: "number" }, seconds(s))));
  }));
}

function showGaps(gaps, timeline) {
  const share = (list, line, mesh, reason) => {
    if (!line) return null;
    const sum = list.filter((g) => g.mesh === mesh && g.reason === reason).reduce((total, g) => total + g.end_s - g.start_s, 0);
    return sum / line.makespan_s;
  };
  const reasons = REASONS.map(([reason]) => reason).filter((r) => [...gaps.planned, ...gaps.measured].some((g) => g.reason === r));
  document.querySelector("#gaps thead").replaceChildren(make("tr", {}, make("th", { scope: "col" }, "Mesh"),
    ...reasons.map((r) => make("th", { scope: "col", class: "number" }, r))));
  rows("gaps", gaps.meshes.map((mesh) => make("tr", {}, make("th", { scope: "row" }, mesh),
    ...reasons.map((r) => make("td", { class: "number" },
      `${percent(share(gaps.measured, timeline.measured, mesh, r))} (${percent(share(gaps.planned, timeline.planned, mesh, r))})`)))));
}

function showEvents() {
  rows("events", events.slice(-SHOWN_EVENTS).reverse().map((event) =>
    make("tr", {}, make("td", {}, time(event.at)), make("td", {}, event.kind), make("td", {}, event.message ?? ""))));
}

function offerSteps(numbers) {
  const select = $("step");
  const offered = [...select.options].slice(1).map((option) => Number(option.value)).reverse();
  if (String(offered) === String(numbers)) return;
  const chosen = select.value;
  select.replaceChildren(make("option", { value: "" }, "latest"), ...[...numbers].reverse().map((n) => make("option", { value: n }, String(n))));
  select.value = numbers.includes(Number(chosen)) ? chosen : "";
}

function offer(anchor, text, name) {
  if (anchor.href.startsWith("blob:")) URL.revokeObjectURL(anchor.href);
  anchor.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  anchor.download = name;
}

for (const button of document.querySelectorAll("[data-zoom]")) button.addEventListener("click", () => view.zoom(button.dataset.zoom));
$("transfers").addEventListener("change", (event) => { view.transfers = event.target.checked; view.draw(); });
$("step").addEventListener("change", refreshTimeline);
addEventListener("resize", showCharts);
document.addEventListener("again", () => repeat(refresh, PAUSE_MS));
repeat(refresh, PAUSE_MS);
