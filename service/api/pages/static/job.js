// The page of one job: reads the JSON API every two seconds until the job has ended.

import { addStep, read, readOn, repeat } from "./api.js";
import { showCurves } from "./curves.js";
import { bytes, csv, make, number, percent, seconds, stateBadge, time } from "./format.js";
import { REASONS, TimelineView } from "./timeline.js";

const PAUSE_MS = 2000;
const SHOWN_EVENTS = 500;
const LEAST_PHASE_S = 0.05;
const FINAL = new Set(["SUCCEEDED", "FAILED", "CANCELLED"]);
const COMPUTE = new Set(["F", "B", "I", "W"]);
const SLOT_COLUMNS = ["panel", "mesh", "lane", "action", "stage", "peer_stage", "peer_mesh", "edge", "microbatch", "start_s", "end_s"];
const STEP_COLUMNS = ["step", "loss", "step_s", "makespan_s", "bubble_ratio", "exposed_transfer_s", "overlap_ratio", "grad_norm", "learning_rate", "started_at"];

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
  await readOn(`${api}/steps`, steps, (step) => `page_token=${step.attempt}:${step.step}`, (step) => addStep(step, steps));
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
    ...rates(job.state, progress, spec.training),
    ...(progress.model_flops_per_s ? { Computes: `${number(progress.model_flops_per_s / 1e12, 3)} TFLOP/s of the model` } : {}),
    ...(progress.mfu ? { MFU: percent(progress.mfu) } : {}),
    ...(job.effective_training_ratio ? { "Effective time": percent(job.effective_training_ratio) } : {}),
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
  $("spec").textContent = JSON.stringify(spec, null, 2);
  // what happens while it starts is what a reader waits for; once it trains, its curves are
  const place = !FINAL.has(job.state) && !progress.step ? "top" : "bottom";
  if ($("events-section").dataset.place !== place) {
    $("events-section").dataset.place = place;
    if (place === "top") $("curves").before($("events-section"));
    else $("job").append($("events-section"));
  }
  showLaunch(job.attempts?.at(-1)?.launch_s ?? {}, FINAL.has(job.state));
  showPlaced(job.attempts?.at(-1)?.placed ?? []);
  rows("attempts", (job.attempts ?? []).map((a) => make("tr", {},
    make("td", { class: "number" }, String(a.number)), make("td", {}, stateBadge(a.state)),
    make("td", {}, a.reason ?? "", ...(a.message ? [make("small", {}, a.message)] : []),
      ...(a.state === "FAILED" ? [" ", make("a", { href: `${api}/postmortem?attempt=${a.number}`, download: "" }, "post-mortem")] : [])),
    make("td", {}, time(a.started_at)), make("td", {}, time(a.finished_at)))));
}

/** How long the last attempt took from the wait for accelerators to the end of its first step, phase by phase. */
function showLaunch(phases, ended) {
  const list = Object.entries(phases);
  const total = seconds(list.reduce((sum, [, took]) => sum + took, 0));
  const box = $("launch");
  box.hidden = list.length === 0;
  box.querySelector(".bar").replaceChildren(...list.map(([name, took]) => {
    const part = make("span", { title: `${name} ${seconds(took)}` });
    part.style.flexGrow = took;
    return part;
  }));
  const told = list.filter(([, took]) => took >= LEAST_PHASE_S).map(([name, took]) => `${name} ${seconds(took)}`).join(", ");
  const what = "first step" in phases ? `First step after ${total}` : ended ? `Waited and started for ${total}` : `Starting, ${total} so far`;
  box.querySelector("p").textContent = told ? `${what}: ${told}` : what;
}

/** Nodes of the last attempt with their meshes; of a mesh that is spread over nodes with its workers there. */
function showPlaced(placed) {
  const nodes = Map.groupBy(placed, (part) => part.node_id);
  const spread = (part) => placed.filter((other) => other.mesh === part.mesh).length > 1;
  rows("placed", [...nodes.values()].map((parts) => make("tr", {},
    make("th", { scope: "row", title: parts[0].node_id }, parts[0].node),
    make("td", {}, parts.map((part) => (spread(part) ? `${part.mesh} (${part.workers} workers of it)` : part.mesh)).join(", ")),
    make("td", { class: "number" }, String(parts.reduce((sum, part) => sum + part.workers, 0))))));
}

/** Samples a second, and the time that a running job has left, by the last step. */
function rates(state, { step, steps: wanted, step_s: stepSeconds }, training) {
  if (!stepSeconds || !training?.global_batch) return {};
  const left = state === "RUNNING" && wanted > step ? { Left: seconds((wanted - step) * stepSeconds) } : {};
  return { Throughput: `${number(training.global_batch / stepSeconds, 3)} samples/s`, ...left };
}

/** A number of the job in words; where the job leaves it open, the one that was planned. */
function chosen(what, given) {
  if (given !== "auto") return `${given ?? "–"} ${what}`;
  return choice?.[what] ? `${choice[what]} ${what} (chosen)` : `${what} to be chosen`;
}

/** How many meshes, and how many workers each has where that is more than one. */
function meshesOf(spec) {
  const { meshes, workers, workers_per_mesh: uniform } = spec.resources ?? {};
  const each = workers ?? (uniform > 1 ? [uniform] : []);
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

function showCharts() {
  $("curves").hidden = document.querySelector(".charts").hidden = steps.length + evaluations.length === 0;
  const options = { logarithmic: $("logarithmic").checked, smoothed: $("smoothed").checked };
  const boxes = { loss: $("loss"), seconds: $("seconds"), norm: $("norm"), rate: $("rate"), metrics: $("metrics") };
  showCurves(boxes, steps, evaluations, planned, options);
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
  showMakespans(timeline);
  view.show(panels, { meshes: gaps.meshes, keep });
  showGaps(gaps, timeline);
  showUpdate(gaps.meshes, timeline.measured);
  $("chrome").href = `${api}/timeline?format=chrome${timeline.step === null ? "" : `&step=${timeline.step}`}`;
  $("chrome").download = `${id}-step-${timeline.step}.json`;
  $("perfetto").hidden = $("why-section").hidden = false;
  const slots = panels.flatMap((panel) => panel.slots.map((slot) => ({ panel: panel.name, ...slot })));
  offer($("csv"), csv(SLOT_COLUMNS, slots), `${id}-step-${timeline.step}.csv`);
  const names = [...new Set(steps.flatMap((s) => Object.keys(s.metrics)))];
  offer($("steps-csv"), csv([...STEP_COLUMNS, ...names], steps.map((s) => ({ ...s.metrics, ...s }))), `${id}-steps.csv`);
}

/** The makespan as it was planned before anything ran, with the costs of profiled steps, and as the shown step took. */
function showMakespans({ planned: first, measured }) {
  const calibrated = choice?.calibrated;
  $("makespans").hidden = !(first && measured && calibrated);
  if ($("makespans").hidden) return;
  $("makespans").textContent = `Makespan: first plan ${seconds(first.makespan_s)}, calibrated ${seconds(calibrated.makespan_s)}, `
    + `measured ${seconds(measured.makespan_s)} (costs of ${calibrated.steps} profiled ${calibrated.steps === 1 ? "step" : "steps"})`;
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

/** Read when a reader opens the list: the control plane looks at the storage itself. */
async function showFiles() {
  if (!$("files").open) return;
  const lines = [];
  try {
    for (const one of (await read(`${api}/checkpoints`)).items) {
      const why = [one.latest ? "latest" : "", one.best ? "lowest loss" : "", one.damage ?? ""].filter(Boolean).join(", ");
      lines.push(["checkpoint", `step ${one.step}`, one.state, why, one.size_bytes, one.saved_at, one.uri]);
    }
    for (const one of (await read(`${api}/artifacts`)).items) lines.push([one.kind, one.name, "", "", one.size_bytes, one.made_at, one.place]);
    $("files-note").textContent = lines.length ? "" : "Nothing yet.";
  } catch (error) {
    $("files-note").textContent = error.message;
  }
  rows("files-table", lines.map(([kind, name, state, why, size, at, place]) => make("tr", {},
    make("td", {}, kind), make("td", {}, name, ...(state || why ? [make("small", {}, [state, why].filter(Boolean).join(": "))] : [])),
    make("td", { class: "number" }, bytes(size)), make("td", {}, time(at)), make("td", {}, make("code", {}, place)))));
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
$("files").addEventListener("toggle", showFiles);
for (const box of ["logarithmic", "smoothed"]) $(box).addEventListener("change", showCharts);
addEventListener("resize", showCharts);
document.addEventListener("again", () => repeat(refresh, PAUSE_MS));
repeat(refresh, PAUSE_MS);
