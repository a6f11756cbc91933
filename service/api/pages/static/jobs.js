// The list of jobs: reads the first pages again every two seconds. What is asked for stands in the address too.

import { read, repeat } from "./api.js";
import { make, number, seconds, stateBadge, time } from "./format.js";

const PAUSE_MS = 2000;
const PAGE = 50;

const body = document.querySelector("#jobs tbody");
const more = document.getElementById("more");
const filter = document.getElementById("filter");
const FIELDS = ["state", "queue", "project", "owner", "label"];
let pages = 1;

/** What the form asks for, as a query. */
function wanted() {
  const query = new URLSearchParams();
  for (const name of FIELDS) {
    const value = filter.elements[name].value.trim();
    if (value) query.set(name, value);
  }
  return query;
}

async function refresh() {
  const chosen = wanted().toString();
  const jobs = [];
  let token = null;
  for (let page = 0; page < pages; page++) {
    const query = new URLSearchParams(chosen);
    query.set("limit", PAGE);
    if (token) query.set("page_token", token);
    const answer = await read(`/api/v1/jobs?${query}`);
    jobs.push(...answer.items);
    token = answer.next_page_token;
    if (!token) break;
  }
  if (chosen !== wanted().toString()) return true;
  body.replaceChildren(...jobs.map(row));
  more.hidden = !token;
  document.getElementById("empty").hidden = jobs.length > 0;
  return true;
}

function row(job) {
  const progress = job.progress ?? {};
  const done = progress.step ?? 0;
  const bar = make("progress", { max: progress.steps || 1, value: done, "aria-label": `Steps of ${job.name}` });
  const why = [job.reason, job.message].filter(Boolean).join(": ");
  return make(
    "tr",
    { "data-job": job.id },
    make("td", { class: "job" }, make("a", { href: `/jobs/${encodeURIComponent(job.id)}` }, job.name), make("small", {}, job.id)),
    make("td", {}, stateBadge(job.state), ...(why ? [make("small", { class: "why", title: why }, why)] : [])),
    make("td", { class: "progress" }, bar, `${done} / ${progress.steps ?? "–"}`),
    make("td", { class: "number" }, number(progress.loss)),
    make("td", { class: "number" }, seconds(progress.step_s)),
    make("td", {}, chooser("owner", job.owner)),
    make("td", {}, chooser("queue", job.queue), ...(job.project === "default" ? [] : [chooser("project", job.project)]), ...Object.entries(job.labels ?? {}).map(([name, value]) => chooser("label", value ? `${name}=${value}` : name))),
    make("td", {}, time(job.created_at)),
  );
}

/** A link that asks for what it names. */
function chooser(field, value) {
  if (!value) return "";
  const link = make("a", { href: `/?${new URLSearchParams({ [field]: value })}`, class: `chooser ${field}` }, value);
  link.addEventListener("click", (event) => {
    event.preventDefault();
    if (filter.elements[field].tagName === "SELECT" && ![...filter.elements[field].options].some((o) => o.value === value)) {
      filter.elements[field].append(make("option", {}, value)); // a queue that is not there any more
    }
    filter.elements[field].value = value;
    changed();
  });
  return link;
}

function changed() {
  pages = 1;
  const query = wanted().toString();
  history.replaceState(null, "", query ? `/?${query}` : "/");
  atOnce();
}

// a refused filter (an unfinished label) is told where the server's absence is
const atOnce = () => refresh().then(() => { note.textContent = ""; }).catch((error) => { note.textContent = error.message; });
const note = document.getElementById("connection");
for (const [name, value] of new URLSearchParams(location.search)) {
  if (FIELDS.includes(name)) filter.elements[name].value = value;
}
filter.addEventListener("change", changed);
filter.addEventListener("submit", (event) => { event.preventDefault(); changed(); });
filter.addEventListener("reset", () => setTimeout(changed));
more.addEventListener("click", () => { pages += 1; atOnce(); });
repeat(refresh, PAUSE_MS);
