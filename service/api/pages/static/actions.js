// What a person can do about a job: cancel it, retry it, read its logs. job.js says what state it is in.

import { change, read } from "./api.js";
import { make } from "./format.js";

const SURE_MS = 5000;
const PAUSE_MS = 2000;
const SHOWN_LINES = 1000;
const FINAL = new Set(["SUCCEEDED", "FAILED", "CANCELLED"]);

const $ = (id) => document.getElementById(id);
const api = `/api/v1/jobs/${encodeURIComponent($("job").dataset.job)}`;
const filter = $("log-filter");
let job = null;
let lines = [];
let reading = 0;

document.addEventListener("job", (event) => {
  job = event.detail;
  $("cancel").hidden = FINAL.has(job.state) || job.state === "CANCELLING";
  $("retry").hidden = !["FAILED", "CANCELLED"].includes(job.state);
  const numbers = (job.attempts ?? []).map((one) => String(one.number));
  const select = filter.elements.attempt;
  const offered = [...select.options].map((option) => option.value);
  select.append(...numbers.filter((one) => !offered.includes(one)).map((one) => make("option", {}, one)));
});

/** The first click asks, the second one within some seconds does. */
function twice(button, question, work) {
  const text = button.textContent;
  let timer = null;
  const back = () => { clearTimeout(timer); timer = null; button.textContent = text; button.classList.remove("sure"); };
  button.addEventListener("click", async () => {
    if (timer === null) {
      button.textContent = question;
      button.classList.add("sure");
      timer = setTimeout(back, SURE_MS);
      return;
    }
    back();
    await act(button, work);
  });
}

async function act(button, work) {
  button.disabled = true;
  $("action-note").textContent = "";
  try {
    await work();
  } catch (error) {
    $("action-note").textContent = error.message;
  } finally {
    button.disabled = false;
  }
}

async function cancel() {
  const answer = await change(`${api}/cancel`);
  $("cancel").hidden = true;
  $("action-note").textContent = answer.state === "CANCELLED" ? "Cancelled." : "Its driver is asked to end.";
}

async function retry() {
  await change(`${api}/retry`);
  document.dispatchEvent(new Event("again")); // the page of an ended job has stopped to look
}

async function showLogs() {
  const shown = $("logs").hidden;
  $("logs").hidden = !shown;
  $("show-logs").setAttribute("aria-expanded", String(shown));
  if (shown) follow();
  else reading += 1;
}

/** Read the last lines, and then what comes, until the logs are hidden, asked for otherwise, or at their end. */
async function follow() {
  const current = ++reading;
  lines = [];
  let first = true;
  while (current === reading) {
    const ended = job === null || FINAL.has(job.state);
    try {
      const query = new URLSearchParams({ limit: 500 });
      for (const name of ["attempt", "search"]) if (filter.elements[name].value) query.set(name, filter.elements[name].value);
      if (first) query.set("tail", 500);
      else if (lines.length) query.set("page_token", `${lines.at(-1).attempt}:${lines.at(-1).number}`);
      const page = await read(`${api}/logs?${query}`);
      if (current !== reading) return;
      first = false;
      add(page.items);
      $("log-note").textContent = lines.length ? "" : "No lines.";
      if (ended && !page.items.length) return;
    } catch (error) {
      $("log-note").textContent = error.message;
      if (ended) return;
    }
    await new Promise((done) => setTimeout(done, PAUSE_MS));
  }
}

function add(items) {
  const box = $("log-lines");
  const atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 4;
  lines.push(...items);
  lines = lines.slice(-SHOWN_LINES);
  const several = new Set(lines.map((line) => line.attempt)).size > 1;
  box.textContent = lines.map((line) => (several ? `[${line.attempt}] ${line.text}` : line.text)).join("\n");
  if (atEnd) box.scrollTop = box.scrollHeight;
}

twice($("cancel"), "Really cancel it?", cancel);
$("retry").addEventListener("click", () => act($("retry"), retry));
$("show-logs").addEventListener("click", showLogs);
filter.addEventListener("submit", (event) => { event.preventDefault(); follow(); });
filter.addEventListener("change", follow);
