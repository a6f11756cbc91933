// The cluster: accelerators, queues, why jobs wait, meshes and nodes; read again every two seconds.

import { read, repeat } from "./api.js";
import { bytes, make, number, stateBadge, time } from "./format.js";

const PAUSE_MS = 2000;
const SHOWN_WAITING = 200;
const COLOURS = 6;
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
  const byId = new Map(jobs.items.map((job) => [job.id, job]));
  showMeshes(cluster.gangs, byId);
  showNodes(cluster, byId);
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

/** The server lists the first of each queue in the order of their turns, and counts all by reason. */
function showWaiting(queues) {
  const waiting = queues.flatMap((queue) => queue.waiting.map((job, turn) => ({ turn: turn + 1, ...job })));
  rows("waiting", waiting.slice(0, SHOWN_WAITING).map((job) => make("tr", { "data-job": job.id },
    make("td", { class: "number" }, String(job.turn)), jobCell(job.id, job.name), make("td", {}, job.queue), make("td", {}, job.owner),
    make("td", { class: "number" }, String(job.priority)), make("td", { class: "number" }, String(job.accelerators)),
    make("td", {}, time(job.created_at)),
    make("td", {}, ...(job.state === "QUEUED" ? [] : [stateBadge(job.state), " "]), job.message ?? job.reason ?? "not looked at yet",
      ...(job.reason && job.message ? [make("small", {}, job.reason)] : [])))));
  const more = queues.reduce((sum, queue) => sum + queue.depth, 0) - Math.min(waiting.length, SHOWN_WAITING);
  const byReason = new Map();
  for (const { reason, jobs } of queues.flatMap((queue) => queue.reasons)) byReason.set(reason, (byReason.get(reason) ?? 0) + jobs);
  const reasons = [...byReason].sort((one, other) => other[1] - one[1]).map(([reason, jobs]) => `${jobs} ${reason ?? "not looked at yet"}`);
  $("none-waits").hidden = waiting.length > 0;
  $("more-wait").hidden = more <= 0;
  $("more-wait").replaceChildren(make("a", { href: "/?state=QUEUED" }, `and ${more} more`), `; in all: ${reasons.join(", ")}`);
}

function showMeshes(gangs, jobs) {
  rows("meshes", gangs.map((gang) => make("tr", { "data-job": gang.job_id },
    jobCell(gang.job_id, jobs.get(gang.job_id)?.name ?? ""), make("td", { class: "number" }, String(gang.attempt)),
    make("td", {}, jobs.get(gang.job_id)?.queue ?? ""), ...onCluster(gang.cluster), make("td", {}, gang.device),
    make("td", { class: "number" }, String(gang.meshes)), make("td", {}, workers(gang)))));
  $("none-runs").hidden = gangs.length > 0;
}

/** A card for each node that has accelerators or is kept from work, with a cell for each accelerator; then all in a table. */
function showNodes({ nodes, gangs }, jobs) {
  const colours = new Map(gangs.map((gang, place) => [gang.job_id, place % COLOURS]));
  const shown = nodes.filter((node) => node.accelerators.length || node.state !== "READY");
  $("node-grid").replaceChildren(...shown.map((node) => card(node, jobs, colours)));
  const kept = nodes.filter((node) => node.state !== "READY").length;
  $("nodes-summary").replaceChildren(`${shown.length} with accelerators`,
    ...(kept ? [`, ${kept} kept from work: `, make("code", {}, "slotline node include NAME"), " puts one back"] : []));
  rows("nodes", nodes.map((node) => make("tr", { "data-node": node.id },
    make("th", { scope: "row" }, make("code", {}, node.name), ...(node.host && node.host !== node.name ? [make("small", {}, node.host)] : [])),
    ...onCluster(node.cluster), make("td", {}, node.address), make("td", {}, stateBadge(node.state), ...(why(node) ? [make("small", {}, why(node))] : [])),
    make("td", {}, Object.entries(node.labels).map(([key, value]) => `${key}=${value}`).join(", ")), make("td", {}, offers(node.resources)))));
}

function card(node, jobs, colours) {
  const used = node.accelerators.reduce((sum, kind) => sum + kind.used, 0);
  const total = node.accelerators.reduce((sum, kind) => sum + kind.total, 0);
  const ours = node.jobs.flatMap((job) => Object.entries(job.meshes).flatMap(([mesh, workers]) =>
    Array.from({ length: workers }, () => ({ "data-colour": String(colours.get(job.job_id) ?? 0), title: `${mesh} of ${jobs.get(job.job_id)?.name ?? job.job_id}` }))));
  const cells = Array.from({ length: total }, (_, place) => make("i", { class: "cell", ...(ours[place] ?? (place < used ? { "data-colour": "other", title: "held by others" } : { title: "free" })) }));
  return make("li", { "data-node": node.name, "data-state": node.state },
    make("b", { title: node.name }, make("bdi", {}, node.name)),
    ...(node.state === "READY" ? [] : [stateBadge(node.state), make("small", { class: "why", title: why(node) }, why(node))]),
    ...(several ? [make("small", {}, node.cluster)] : []),
    ...(total ? [make("span", { class: "cells", role: "img", "aria-label": `${used} of ${total} accelerators in use` }, ...cells)] : []),
    ...[...new Set(node.accelerators.map((kind) => kind.accelerator_type).filter(Boolean))].map((type) => make("small", { class: "type" }, type)),
    make("small", { class: "why" }, ...node.jobs.flatMap((job, place) => [...(place ? [", "] : []),
      make("a", { href: `/jobs/${encodeURIComponent(job.job_id)}` }, jobs.get(job.job_id)?.name ?? job.job_id), ` ${spans(job.meshes)}`])));
}

/** Meshes in few words: m0 to m7 as "m0–m7". */
function spans(meshes) {
  const numbers = Object.keys(meshes).map((mesh) => Number(mesh.slice(1))).sort((a, b) => a - b);
  const parts = [];
  for (const n of numbers) {
    if (parts.length && parts.at(-1)[1] === n - 1) parts.at(-1)[1] = n;
    else parts.push([n, n]);
  }
  return parts.map(([first, last]) => (first === last ? `m${first}` : `m${first}–m${last}`)).join(" ");
}

/** Who keeps a node from work until when, and why. */
function why(node) {
  if (node.state === "READY") return "";
  const until = node.until ? `until ${new Date(node.until).toLocaleString(undefined, { dateStyle: "short", timeStyle: "short" })}` : "";
  return [node.id ? "" : "gone", node.by && `by ${node.by}`, until, node.reason].filter(Boolean).join(", ");
}

/** A cell that only pages of several clusters have. */
function onCluster(name) {
  return several ? [make("td", {}, name)] : [];
}

function workers(gang) {
  const uniform = new Set(gang.workers).size < 2;
  return uniform ? `${gang.workers_per_mesh}` : gang.workers.join(", ");
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
