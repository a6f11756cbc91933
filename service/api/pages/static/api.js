// Calls to the JSON API. Where the server asks for a token, the browser asks for it (HTTP Basic); where the user has
// logged in at the identity provider, a session that has expired is renewed, or the user led there and back.

const PAGE = 1000;

/** A refused call: the problem's detail, ready to be read by a person. */
export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** An answer that is ok once the session is good again. Tabs ask one after the other: a refresh token may be good once. */
async function renewed() {
  const ask = async () => {
    const known = await fetch(`${location.origin}/api/v1/whoami`, { cache: "no-store" }); // another tab was quicker
    return known.ok ? known : fetch(`${location.origin}/login/renew`, { method: "POST" });
  };
  return navigator.locks ? navigator.locks.request("slotline-session", ask) : ask();
}

/**
 * The response at `path`. A user whose session cannot be renewed is led to the provider, and back to this page; one who
 * has logged out in another tab is not logged in again.
 */
async function call(path, options) {
  const ask = () => fetch(`${location.origin}${path}`, options);
  const response = await ask();
  if (response.status !== 401 || !document.body.dataset.user) return response;
  const renewal = await renewed();
  if (renewal.ok) return ask();
  if (renewal.status !== 401 && renewal.status !== 404) return renewal; // its problem says why
  const here = new URLSearchParams({ next: location.pathname + location.search + location.hash });
  location.assign(renewal.status === 404 ? "/logout" : `/login?${here}`);
  return new Promise(() => {}); // this page is left
}

/** JSON at `path`; throws Problem for an error answer, TypeError when the server is away. */
export async function read(path) {
  // an address with a name and password in it (http://me:token@host) is no base that fetch takes
  const response = await call(path, { headers: { Accept: "application/json" }, cache: "no-store" });
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
  const response = await call(path, { method: "POST", headers: { Accept: "application/json" } });
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
