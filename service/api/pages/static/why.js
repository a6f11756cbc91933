// The part of a job's page that says why the chosen step takes as long as it does. Asked for with a button: each
// answer is planned anew on the server.

import { read } from "./api.js";
import { make, percent, seconds } from "./format.js";

const $ = (id) => document.getElementById(id);
const api = `/api/v1/jobs/${encodeURIComponent($("job").dataset.job)}`;

$("why-ask").addEventListener("click", async () => {
  const button = $("why-ask");
  const step = $("step").value;
  button.disabled = true;
  $("why-verdict").textContent = "Planning with what was measured…";
  try {
    show(await read(`${api}/why${step ? `?step=${encodeURIComponent(step)}` : ""}`));
  } catch (error) {
    $("why-verdict").textContent = error.message;
    fill("why-causes", []);
    fill("why-changes", []);
  } finally {
    button.disabled = false;
  }
});

function show(found) {
  const where = found.step === null ? "The plan" : `Step ${found.step}`;
  const left = found.left_out.length ? [`No time was left to try: ${found.left_out.join(", ")}.`] : [];
  $("why-verdict").textContent = [`${where} of attempt ${found.attempt}: ${found.verdict}`, ...found.notes.map((note) => `Note: ${note}.`), ...left].join(" ");
  const share = (value) => `${seconds(value)}${found.step_s ? ` (${percent(value / found.step_s)})` : ""}`;
  fill("why-causes", found.causes.map((cause) => [cause.kind, cause.subject, share(cause.cost_s), cause.message]));
  fill("why-changes", found.changes.map((change) => [
    change.kind, change.subject, share(change.gain_s), `${change.message}: ${seconds(change.step_s)} a step`]));
}

function fill(table, list) {
  $(table).hidden = list.length === 0;
  document.querySelector(`#${table} tbody`).replaceChildren(...list.map((cells) => make("tr", {},
    ...cells.map((text, place) => make("td", place === 2 ? { class: "number" } : {}, text)))));
}
