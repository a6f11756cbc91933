// The cluster: accelerators, queues, why jobs wait, meshes and nodes; read again every two seconds.

import { read, repeat } from "./api.js";
import { bytes, make, number, stateBadge, time } from "./format.js";

const PAUSE_MS = 2000;
const SHOWN_WAITING = 200;
const ACTIVE = ["STARTING", "RUNNING", "CANCELLING"];

let several = false;
const $ = (id) => document.getElementById(id);

async function refresh() {
  const running = ACTIVE.map((state) => `state=${state}`).join("&");
  const [cluster, queues, jobs] = await Promise.all([
    read("/api/v1/cluster"), read("/api/v1/queues"), read(`/api/v1/jobs?${running}&limit=500`),
  ]);
  several = cluster.clusters.length > 1;
  for (const title of document.querySelectorAll("th.of-clusters")) title.hidden = !several;
  showAccelerators(cluster);
  showQueues(queues.items, jobs.items);
  showWaiting(queues.items);
  showMeshes(cluster.gangs, new Map(jobs.items.map((job) => [job.id, job])));
  rows("nodes", cluster.nodes.map((node) => make("tr", { "data-node": node.id },
    make("th", { scope: "row" }, make("code", {}, node.id.slice(0, 12))), ...onCluster(node.cluster), make("td", {}, node.address), make("td", {}, offers(node.resources)))));
  return true;
}

function showAccelerators(cluster) {
  $("away").hidden = cluster.available;
  $("away").textContent = cluster.available ? "" : cluster.error || "The cluster has not been seen yet.";
  const some = cluster.accelerators.filter((one) => one.total);
  if (cluster.available && !some.length) {
    $("away").hidden = false;
    $("away").textContent = "The cluster has no accelerator.";
  }
  $("accelerators").replaceChildren(...some.map((one) => make("div", { "data-device": one.device, "data-cluster": one.cluster },
    make("dt", {}, cluster.clusters.length > 1 ? `${one.cluster}: ${one.resource}` : one.resource), make("dd", {}, `${one.free} of ${one.total} free, ${one.used} in use here`))));
}

function showQueues(queues, running) {
  rows("queues", queues.map((queue) => {
    const share = queue.quota === null ? `${queue.used}, no quota` : `${queue.used} of ${queue.quota}`;
    const bar = make("progress", { max: queue.quota || 1, value: queue.quota ? queue.used : 0, "aria-label": `Quota of ${queue.name}` });
    return make("tr", { "data-queue": queue.name },
      make("th", { scope: "row" }, make("a", { href: `/?${new URLSearchParams({ queue: queue.name })}` }, queue.name)),
      ...onCluster(queue.cluster ?? "?"),
      make("td", { class: "quota progress" }, ...(queue.quota === null ? [] : [bar]), share),
      make("td", { class: "number" }, String(running.filter((job) => job.queue === queue.name).length)),
      make("td", { class: "number" }, String(queue.depth)));
  }));
}

/** The server lists each queue's jobs in the order of their turns; queues take theirs beside each other. */
function showWaiting(queues) {
  const waiting = queues.flatMap((queue) => queue.waiting.map((job, turn) => ({ turn: turn + 1, ...job })));
  rows("waiting", waiting.slice(0, SHOWN_WAITING).map((job) => make("tr", { "data-job": job.id },
    make("td", { class: "number" }, String(job.turn)), jobCell(job.id, job.name), make("td", {}, job.queue), make("td", {}, job.owner),
    make("td", { class: "number" }, String(job.priority)), make("td", { class: "number" }, String(job.accelerators)),
    make("td", {}, time(job.created_at)),
    make("td", {}, ...(job.state === "QUEUED" ? [] : [stateBadge(job.state), " "]), job.message ?? job.reason ?? "not looked at yet",
      ...(job.reason && job.message ? [make("small", {}, job.reason)] : [])))));
  $("none-waits").hidden = waiting.length > 0;
  $("more-wait").hidden = waiting.length <= SHOWN_WAITING;
  $("more-wait").textContent = `and ${waiting.length - SHOWN_WAITING} more`;
}

function showMeshes(gangs, jobs) {
  rows("meshes", gangs.map((gang) => make("tr", { "data-job": gang.job_id },
    jobCell(gang.job_id, jobs.get(gang.job_id)?.name ?? ""), make("td", { class: "number" }, String(gang.attempt)),
    make("td", {}, jobs.get(gang.job_id)?.queue ?? ""), ...onCluster(gang.cluster), make("td", {}, gang.device),
    make("td", { class: "number" }, String(gang.meshes)), make("td", {}, workers(gang)))));
  $("none-runs").hidden = gangs.length > 0;
}

/** A cell that only pages of several clusters have. */
function onCluster(name) {
  return several ? [make("td", {}, name)] : [];
}

function workers(gang) {
  const alike = new Set(gang.workers).size < 2;
  return alike ? `${gang.workers_per_mesh}` : gang.workers.join(", ");
}

function jobCell(id, name) {
  return make("td", { class: "job" }, make("a", { href: `/jobs/${encodeURIComponent(id)}` }, name || id), ...(name ? [make("small", {}, id)] : []));
}

/** What people look for first; Ray's own marks (node:1.2.3.4) are left out. */
function offers(resources) {
  const shown = Object.entries(resources).filter(([name]) => !name.startsWith("node:") && !name.startsWith("object_store")).sort();
  return shown.map(([name, amount]) => (name === "memory" ? `${bytes(amount)} memory` : `${number(amount)} ${name}`)).join(", ") || "nothing";
}

function rows(table, list) {
  document.querySelector(`#${table} tbody`).replaceChildren(...list);
}

repeat(refresh, PAUSE_MS);
