// The reference of the API: openapi-explorer draws /openapi.json, in the colours of these pages.

const COLOURS = {
  "bg-color": "--paper", "text-color": "--ink", "primary-color": "--link", "secondary-color": "--link",
  "nav-bg-color": "--panel", "nav-text-color": "--ink", "nav-hover-text-color": "--link",
};

const reference = document.querySelector("openapi-explorer");

function paint() {
  const style = getComputedStyle(document.documentElement);
  for (const [name, variable] of Object.entries(COLOURS)) reference.setAttribute(name, style.getPropertyValue(variable).trim());
}

reference.addEventListener("spec-loaded", () => { document.body.dataset.ready = "true"; });
reference.setAttribute("server-url", location.origin);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
paint();
