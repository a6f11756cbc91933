// Numbers and times as people read them, and the two helpers that make elements.

const UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];

/** Seconds with a fitting unit and three digits: 0.0123 becomes "12.3 ms". */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (Math.abs(value) >= 120) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  const [size, unit] = UNITS.find(([size]) => Math.abs(value) >= size) ?? UNITS.at(-1);
  return `${Number((value / size).toPrecision(3))} ${unit}`;
}

/** Bytes with a fitting unit and three digits: 1536 becomes "1.5 KiB". */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(value, 1)) / 10)));
  return `${Number((value / 1024 ** power).toPrecision(3))} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  return Number.isFinite(value) ? String(Number(value.toPrecision(digits))) : String(value);
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`;
}

/** A <time> element in the reader's zone, or a dash. `at`: ISO text or Unix seconds. */
export function time(at) {
  if (at === null || at === undefined) return "–";
  const date = new Date(typeof at === "number" ? at * 1000 : at);
  const element = make("time", { datetime: date.toISOString(), title: date.toISOString() });
  element.textContent = date.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
  return element;
}

/** Round steps of 1, 2 or 5 times a power of ten, about `count` of them, between two numbers. */
export function ticks(low, high, count = 6) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
  const out = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) out.push(Number((n * step).toPrecision(12)));
  return out;
}

/** An HTML element with attributes and children (text is never read as markup). */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function stateBadge(state) {
  return make("span", { class: "state", "data-state": state }, state);
}

/** CSV text of `rows` (objects), with the columns named. */
export function csv(columns, rows) {
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [columns, ...rows.map((row) => columns.map((name) => row[name]))].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}
