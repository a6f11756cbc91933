// The list of jobs: reads the first pages again every two seconds.

import { read, repeat } from "./api.js";
import { make, number, seconds, stateBadge, time } from "./format.js";

const PAUSE_MS = 2000;
const PAGE = 50;

const body = document.querySelector("#jobs tbody");
const more = document.getElementById("more");
const state = document.querySelector("#filter select");
let pages = 1;

async function refresh() {
  const chosen = state.value;
  const jobs = [];
  let token = null;
  for (let page = 0; page < pages; page++) {
    const query = new URLSearchParams({ limit: PAGE });
    if (chosen) query.set("state", chosen);
    if (token) query.set("page_token", token);
    const answer = await read(`/api/v1/jobs?${query}`);
    jobs.push(...answer.items);
    token = answer.next_page_token;
    if (!token) break;
  }
  if (chosen !== state.value) return true;
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
    make("td", {}, stateBadge(job.state), ...(why ? [make("small", {}, why)] : [])),
    make("td", { class: "progress" }, bar, `${done} / ${progress.steps ?? "–"}`),
    make("td", { class: "number" }, number(progress.loss)),
    make("td", { class: "number" }, seconds(progress.step_s)),
    make("td", {}, job.queue ?? job.spec?.queue ?? ""),
    make("td", {}, time(job.created_at)),
  );
}

const atOnce = () => refresh().catch(() => {}); // the next round says why
state.addEventListener("change", () => { pages = 1; atOnce(); });
more.addEventListener("click", () => { pages += 1; atOnce(); });
repeat(refresh, PAUSE_MS);
