// Planned above measured timeline on one time scale: slots, transfers, and gaps with their reasons.
// Zooming and moving change one window that both panels share; only what it shows is drawn.

import { draw, make, seconds, ticks } from "./format.js";

const LEFT = 118;
const RIGHT = 14;
const COMPUTE = 22;
const TRANSFER = 11;
const SPACE = 7;
const AXIS = 20;
const SMALLEST_PX = 0.4;

const ACTIONS = [
  ["F", "F forward"], ["B", "B backward"], ["I", "I gradient of inputs"], ["W", "W gradient of weights"],
  ["SEND_F", "SEND_F / RECV_F"], ["SEND_B", "SEND_B / RECV_B"], ["STEP", "REDUCE / STEP"],
];
export const REASONS = [
  ["waits upstream", "upstream"], ["waits downstream", "downstream"], ["exposed transfer", "transfer"],
  ["memory limit", "memory"], ["held", "held"], ["done", "done"],
];
const SLUG = new Map(REASONS);

/** The drawing of one step. `box` holds the panels, `tip` the hover text, `legend` what colours mean. */
export class TimelineView {
  constructor(box, tip, legend) {
    this.box = box;
    this.tip = tip;
    this.legend = legend;
    this.panels = [];
    this.length = 1;
    this.window = [0, 1];
    this.transfers = true;
    this.listen();
    new ResizeObserver(() => { if (box.clientWidth !== this.drawnFor) this.draw(); }).observe(box);
  }

  /** Show a step: `panels` = [{title, note, makespan_s, slots, gaps}]. Keeps the zoom if `keep`. */
  show(panels, { meshes, keep = false }) {
    this.panels = panels;
    this.meshes = meshes;
    const ends = panels.flatMap((p) => [endOf(p), ...p.slots.map((s) => s.end_s)]);
    this.length = ends.reduce((a, b) => Math.max(a, b), 0) || 1;
    if (!keep || this.window[1] > this.length * 1.5) this.window = [0, this.length];
    this.describeColours();
    this.draw();
  }

  /** One of "in", "out", "left", "right", "all". */
  zoom(how, around = null) {
    const [from, to] = this.window;
    const span = to - from;
    const at = around ?? (from + to) / 2;
    const moves = {
      in: () => this.look(at - (at - from) / 1.6, at + (to - at) / 1.6),
      out: () => this.look(at - (at - from) * 1.6, at + (to - at) * 1.6),
      left: () => this.look(from - span / 4, to - span / 4),
      right: () => this.look(from + span / 4, to + span / 4),
      all: () => this.look(0, this.length),
    };
    moves[how]();
  }

  look(from, to) {
    const span = Math.min(Math.max(to - from, this.length * 1e-5), this.length);
    const start = Math.min(Math.max(from, 0), this.length - span);
    this.window = [start, start + span];
    this.draw();
  }

  draw() {
    this.hideTip();
    this.drawnFor = this.box.clientWidth;
    this.width = Math.max(this.drawnFor, 420);
    this.box.dataset.window = this.window.join(" ");
    this.box.replaceChildren(...this.panels.flatMap((panel, index) => this.panel(panel, index)));
  }

  x(at) {
    return LEFT + ((at - this.window[0]) / (this.window[1] - this.window[0])) * (this.width - LEFT - RIGHT);
  }

  timeAt(event, svg) {
    const frame = svg.getBoundingClientRect();
    const px = ((event.clientX - frame.left) / frame.width) * this.width;
    const share = (px - LEFT) / (this.width - LEFT - RIGHT);
    return this.window[0] + share * (this.window[1] - this.window[0]);
  }

  panel(panel, index) {
    const rows = lanesOf(panel.slots, this.meshes, this.transfers);
    const height = rows.height + AXIS;
    const slots = panel.slots.filter((slot) => rows.at.has(`${slot.mesh} ${slot.lane}`));
    const svg = draw("svg", {
      viewBox: `0 0 ${this.width} ${height}`, height, role: "img", "data-panel": panel.name,
      "aria-label": `${panel.title}: ${slots.length} slots on ${this.meshes.length} meshes, makespan ${seconds(panel.makespan_s)}`,
    });
    svg.append(patterns(index));
    const clip = `plot-${index}`;
    svg.append(draw("clipPath", { id: clip }, draw("rect", { x: LEFT, y: 0, width: this.width - LEFT - RIGHT, height })));
    for (const row of rows.list) {
      if (row.compute) svg.append(draw("rect", { class: "band", x: LEFT, y: row.y, width: this.width - LEFT - RIGHT, height: COMPUTE }));
      svg.append(draw("text", { class: row.compute ? "mesh" : "lane-name", x: LEFT - 8, y: row.y + row.height / 2 + 4, "text-anchor": "end" }, row.label));
    }
    for (const tick of ticks(...this.window, 8)) {
      svg.append(draw("path", { class: "axis", d: `M${this.x(tick)} 0V${rows.height}` }));
      svg.append(draw("text", { x: this.x(tick), y: height - 5, "text-anchor": "middle" }, seconds(tick)));
    }
    const plot = draw("g", { "clip-path": `url(#${clip})` });
    for (const gap of panel.gaps) this.gap(plot, gap, rows, index);
    for (const slot of slots) this.slot(plot, slot, rows);
    plot.append(draw("path", { class: "end", d: `M${this.x(endOf(panel))} 0V${rows.height}` }));
    svg.append(plot);
    const title = make("h3", {}, panel.title, " ", make("small", {}, panel.note));
    return [title, svg];
  }

  slot(plot, slot, rows) {
    const row = rows.at.get(`${slot.mesh} ${slot.lane}`);
    const [left, right] = [this.x(slot.start_s), this.x(slot.end_s)];
    if (slot.end_s < this.window[0] || slot.start_s > this.window[1]) return;
    const width = Math.max(right - left - 0.5, SMALLEST_PX);
    const rect = draw("rect", { class: `slot slot-${slot.action}`, x: left.toFixed(2), y: row.y, width: width.toFixed(2), height: row.height, rx: width > 4 ? 1.5 : 0 });
    rect.entry = slotText(slot);
    if (slot.peer_mesh) rect.dataset.transfer = `${slot.action.at(-1)} ${slot.edge} ${slot.microbatch}`;
    plot.append(rect);
    if (row.compute && width > 13 && slot.microbatch !== null && slot.microbatch !== undefined) {
      const text = width > 30 ? `${slot.action}${slot.microbatch}` : String(slot.microbatch);
      if (width > 6 * text.length + 3) plot.append(draw("text", { class: "in", x: left + width / 2, y: row.y + row.height / 2 + 3.5 }, text));
    }
  }

  gap(plot, gap, rows, index) {
    const row = rows.at.get(`${gap.mesh} compute`);
    if (!row || gap.end_s < this.window[0] || gap.start_s > this.window[1]) return;
    const left = this.x(gap.start_s);
    const width = Math.max(this.x(gap.end_s) - left, SMALLEST_PX);
    const fill = `url(#gap-${SLUG.get(gap.reason)}-${index})`;
    const rect = draw("rect", { class: "gap", "data-reason": gap.reason, x: left.toFixed(2), y: row.y, width: width.toFixed(2), height: row.height, fill });
    rect.entry = gapText(gap);
    plot.append(rect);
  }

  describeColours() {
    const used = new Set(this.panels.flatMap((p) => p.slots.map((s) => s.action.replace("RECV", "SEND").replace("REDUCE", "STEP"))));
    const reasons = new Set(this.panels.flatMap((p) => p.gaps.map((g) => g.reason)));
    const swatch = (shape) => draw("svg", { width: 22, height: 12, "aria-hidden": "true" }, ...shape);
    const colour = (action) => swatch([draw("rect", { class: `slot-${action}`, width: 22, height: 12, rx: 2 })]);
    const hatch = (slug) => swatch([patterns("key-" + slug), draw("rect", { width: 22, height: 12, fill: `url(#gap-${slug}-key-${slug})` })]);
    this.legend.replaceChildren(
      ...ACTIONS.filter(([action]) => used.has(action)).map(([action, words]) => make("span", {}, colour(action), words)),
      ...REASONS.filter(([reason]) => reasons.has(reason)).map(([reason, slug]) => make("span", {}, hatch(slug), `idle: ${reason}`)),
    );
  }

  listen() {
    const { box } = this;
    box.addEventListener("keydown", (event) => {
      const how = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all" }[event.key];
      if (!how || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      this.zoom(how);
    });
    box.addEventListener("wheel", (event) => {
      const svg = event.target.closest("svg");
      if (!svg || !(event.ctrlKey || event.metaKey || event.shiftKey)) return;
      event.preventDefault();
      this.zoom((event.deltaY || event.deltaX) < 0 ? "in" : "out", this.timeAt(event, svg));
    }, { passive: false });
    box.addEventListener("dblclick", (event) => {
      const svg = event.target.closest("svg");
      if (svg) this.zoom("in", this.timeAt(event, svg));
    });
    this.listenToPointer();
  }

  listenToPointer() {
    const { box } = this;
    let held = null;
    box.addEventListener("pointerdown", (event) => {
      const svg = event.target.closest("svg");
      if (svg && event.button === 0) held = { at: this.timeAt(event, svg), panel: svg.dataset.panel };
    });
    window.addEventListener("pointerup", () => { held = null; });
    box.addEventListener("pointermove", (event) => {
      if (held) {
        const svg = box.querySelector(`svg[data-panel="${held.panel}"]`);
        const shift = held.at - this.timeAt(event, svg);
        if (Math.abs(shift) > (this.window[1] - this.window[0]) / 500) this.look(this.window[0] + shift, this.window[1] + shift);
        return;
      }
      const thing = event.target.closest("rect.slot, rect.gap");
      if (thing) this.showTip(thing, event);
      else this.hideTip();
    });
    box.addEventListener("pointerleave", () => this.hideTip());
  }

  showTip(rect, event) {
    this.hideTip();
    this.marked = [rect];
    const { transfer } = rect.dataset; // both ends of a transfer light up together
    if (transfer) this.marked = [...rect.closest("svg").querySelectorAll(`[data-transfer="${transfer}"]`)];
    for (const one of this.marked) one.classList.add("marked");
    this.tip.textContent = rect.entry;
    this.tip.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const beside = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
    this.tip.style.left = `${Math.max(beside, 4)}px`;
    this.tip.style.top = `${Math.min(event.clientY + 16, innerHeight - height - 4)}px`;
  }

  hideTip() {
    for (const one of this.marked ?? []) one.classList.remove("marked");
    this.marked = null;
    this.tip.hidden = true;
  }
}

/** Where the makespan of a panel ends: it begins with the first slot. */
function endOf(panel) {
  const first = panel.slots.reduce((a, slot) => Math.min(a, slot.start_s), Infinity);
  return panel.makespan_s + (Number.isFinite(first) ? first : 0);
}

/** Rows of the drawing: each mesh has its compute lane, then its send and receive lanes. */
function lanesOf(slots, meshes, transfers) {
  const lanes = new Map(meshes.map((mesh) => [mesh, new Set()]));
  for (const slot of slots) lanes.get(slot.mesh)?.add(slot.lane);
  const list = [];
  const at = new Map();
  let y = 2;
  for (const [mesh, names] of lanes) {
    const others = transfers ? [...names].filter((lane) => lane !== "compute").sort() : [];
    for (const lane of ["compute", ...others]) {
      const compute = lane === "compute";
      const row = { y, height: compute ? COMPUTE : TRANSFER, compute, label: compute ? mesh : lane };
      list.push(row);
      at.set(`${mesh} ${lane}`, row);
      y += row.height + 2;
    }
    y += SPACE;
  }
  return { list, at, height: y };
}

function slotText(slot) {
  const lines = [`${slot.stage ?? ""} ${slot.action}${slot.microbatch ?? ""}`.trim()];
  if (slot.peer_mesh) lines.push(`${slot.action.startsWith("SEND") ? "to" : "from"} ${slot.peer_stage ?? ""} on ${slot.peer_mesh}`);
  lines.push(`${slot.mesh}, lane ${slot.lane}`);
  lines.push(`${seconds(slot.start_s)} to ${seconds(slot.end_s)}: ${seconds(slot.end_s - slot.start_s)}`);
  return lines.join("\n");
}

function gapText(gap) {
  return `${gap.reason}: ${seconds(gap.end_s - gap.start_s)}\n${gap.mesh} idle from ${seconds(gap.start_s)} to ${seconds(gap.end_s)}\n${gap.detail}`;
}

/** Hatches that tell the reasons apart without colour; ids carry `key`, since ids are global to the page. */
function patterns(key) {
  const pattern = (slug, size, ...shapes) =>
    draw("pattern", { id: `gap-${slug}-${key}`, width: size, height: size, patternUnits: "userSpaceOnUse" }, ...shapes);
  const line = (d, colour = "gap") => draw("path", { d, class: `stroke-${colour}`, "stroke-width": 1.1, fill: "none" });
  return draw("defs", {},
    pattern("upstream", 8, line("M-2 2L2 -2M0 8L8 0M6 10L10 6")),
    pattern("downstream", 8, line("M-2 6L2 10M0 0L8 8M6 -2L10 2")),
    pattern("transfer", 5, draw("circle", { cx: 2.5, cy: 2.5, r: 1.3, class: "fill-gap-transfer" })),
    pattern("memory", 8, line("M0 8L8 0M0 0L8 8", "gap-memory")),
    pattern("held", 6, draw("circle", { cx: 3, cy: 3, r: 0.9, class: "fill-gap" })),
    pattern("done", 6, line("M0 3H6", "gap-done")),
  );
}
