// Sampling settings: remembered in this browser. An empty field leaves the choice to the server.

import { find, make, recall, remember } from "./dom.js";

const panel = find("settings");
const form = panel.querySelector("form");
const toggle = find("settings-toggle");
const NAMES = ["system", "temperature", "top_p", "top_k", "max_tokens", "seed"];
// What a value must be, beside what index.html tells the browser; in words for people.
const RULES = {
  temperature: "a number from 0 to 100",
  top_p: "a number above 0 and up to 1",
  top_k: "a whole number, or -1 for all tokens",
  max_tokens: "a whole number from 1",
  seed: "a whole number of up to 15 digits",
};

export function startSettings() {
  for (const name of Object.keys(RULES)) {
    const id = `wrong-${name}`;
    form.elements[name].closest("label").after(make("p", { id, class: "wrong", role: "alert" }));
    form.elements[name].setAttribute("aria-describedby", id);
  }
  const known = recall("localStorage", "pelton-settings", {});
  for (const name of NAMES) form.elements[name].value = known[name] ?? "";
  form.addEventListener("input", take);
  form.addEventListener("reset", () => setTimeout(take));
  form.addEventListener("submit", (event) => event.preventDefault());
  toggle.addEventListener("click", () => showSettings(panel.hidden));
  find("settings-close").addEventListener("click", () => showSettings(false));
}

function take() {
  showWrong();
  save();
}

/** Says beside each field what is wrong with it. Returns the first wrong one. */
function showWrong() {
  let first = null;
  for (const [name, rule] of Object.entries(RULES)) {
    const field = form.elements[name];
    const isRight = field.validity.valid;
    find(`wrong-${name}`).textContent = isRight ? "" : `Must be ${rule}.`;
    field.setAttribute("aria-invalid", String(!isRight));
    if (!isRight) first ??= field;
  }
  return first;
}

/** False if a request must not be sent; then the first wrong field is shown, and has the focus. */
export function settingsAreRight() {
  const wrong = showWrong();
  if (wrong) {
    showSettings(true);
    wrong.focus();
  }
  return wrong === null;
}

/** Whether something changed. */
export function showSettings(shown) {
  if (panel.hidden === !shown) return false;
  panel.hidden = !shown;
  toggle.setAttribute("aria-expanded", String(shown));
  (shown ? form.elements.system : toggle).focus();
  return true;
}

function save() {
  remember("localStorage", "pelton-settings",
    Object.fromEntries(NAMES.map((name) => [name, form.elements[name].value])));
}

/** Request fields for what is set. */
export function sampling() {
  const found = {};
  for (const name of NAMES) {
    const text = form.elements[name].value.trim();
    if (text !== "") found[name] = name === "system" ? text : Number(text);
  }
  return found;
}
