// Calls to the JSON API. Where the server asks for a token, the browser asks for it (HTTP Basic).

const PAGE = 1000;

/** A refused call: the problem's detail, ready to be read by a person. */
export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** JSON at `path`; throws Problem for an error answer, TypeError when the server is away. */
export async function read(path) {
  // an address with a name and password in it (http://me:token@host) is no base that fetch takes
  const response = await fetch(`${location.origin}${path}`, { headers: { Accept: "application/json" }, cache: "no-store" });
  if (response.ok) return response.json();
  const body = await response.json().catch(() => ({}));
  throw new Problem(response.status, body.detail || body.title || `HTTP ${response.status}`);
}

/** `add` what came at `path` since the last of `list`, a few pages a round; `place` says from where, as a query. */
export async function readOn(path, list, place, add) {
  for (let page = 0; page < 20; page++) {
    const after = list.length ? `&${place(list.at(-1))}` : "";
    const answer = await read(`${path}?limit=${PAGE}${after}`);
    answer.items.forEach(add);
    if (!answer.next_page_token || answer.items.length === 0) return;
  }
}

/** Steps come by attempt: one that goes on from a checkpoint replaces what was done behind it. */
export function addStep(step, list) {
  while (list.length && list.at(-1).step >= step.step) list.pop();
  list.push(step);
}

/** POST without a body to `path`; the answer's JSON. Throws as `read` does. */
export async function change(path) {
  const response = await fetch(`${location.origin}${path}`, { method: "POST", headers: { Accept: "application/json" } });
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Problem(response.status, body.detail || body.title || `HTTP ${response.status}`);
  return body;
}

/**
 * Run `work` now and again `pause` ms after it ended, as long as it returns true and the tab is seen.
 * Says so at the top of the page while the server is away.
 */
export function repeat(work, pause) {
  const note = document.getElementById("connection");
  const round = async () => {
    let again = true;
    try {
      again = await work();
      note.textContent = "";
    } catch (error) {
      note.textContent = error instanceof Problem ? error.message : "The server does not answer; trying again.";
      if (!(error instanceof Problem) && !(error instanceof TypeError)) throw error;
    } finally {
      document.body.dataset.ready = "true";
      if (again) setTimeout(whenSeen, pause);
    }
  };
  const whenSeen = () => {
    if (!document.hidden) return round();
    document.addEventListener("visibilitychange", whenSeen, { once: true });
  };
  return round();
}
