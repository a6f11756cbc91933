// Opens the shown step in Perfetto, whose page takes a trace from the window that opened it: it is sent PING until it
// answers PONG, and then the trace. Nothing is uploaded. https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui

const ORIGIN = "https://ui.perfetto.dev";
const PING_MS = 100;
const WAIT_MS = 60_000;

const button = document.getElementById("perfetto");
const chrome = document.getElementById("chrome");
const note = document.getElementById("perfetto-note");

async function openTrace() {
  note.textContent = "";
  const perfetto = open(ORIGIN); // before anything is waited for: a browser lets only a click open a window
  if (!perfetto) {
    note.textContent = `The browser lets this page open no window. Allow it, or save the Chrome trace and open it at ${ORIGIN}.`;
    return;
  }
  button.disabled = true;
  try {
    const answer = await fetch(new URL(chrome.getAttribute("href"), location.origin));
    if (!answer.ok) throw new Error(`The trace cannot be read: HTTP ${answer.status}.`);
    const buffer = await answer.arrayBuffer();
    await listening(perfetto);
    perfetto.postMessage({ perfetto: { buffer, title: chrome.download, fileName: chrome.download } }, ORIGIN);
  } catch (error) {
    note.textContent = error.message;
  } finally {
    button.disabled = false;
  }
}

/** Resolves when the window's page has answered a PING: what is sent before that is lost. */
function listening(perfetto) {
  return new Promise((resolve, reject) => {
    const deadline = Date.now() + WAIT_MS;
    const end = (how, value) => { clearInterval(timer); removeEventListener("message", hear); how(value); };
    const hear = ({ source, origin, data }) => { if (source === perfetto && origin === ORIGIN && data === "PONG") end(resolve); };
    const ask = () => {
      if (!perfetto.closed && Date.now() < deadline) perfetto.postMessage("PING", ORIGIN);
      else end(reject, new Error(`${ORIGIN} did not take the trace. Save the Chrome trace and open it in a Perfetto that this browser reaches.`));
    };
    const timer = setInterval(ask, PING_MS);
    addEventListener("message", hear);
  });
}

button.addEventListener("click", openTrace);
