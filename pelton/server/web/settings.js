// Sampling settings: remembered in this browser. An empty field leaves the choice to the server.

import { find, recall, remember } from "./dom.js";

const panel = find("settings");
const form = panel.querySelector("form");
const toggle = find("settings-toggle");
const NAMES = ["system", "temperature", "top_p", "top_k", "max_tokens", "seed"];

export function startSettings() {
  const known = recall("localStorage", "pelton-settings", {});
  for (const name of NAMES) form.elements[name].value = known[name] ?? "";
  form.addEventListener("input", save);
  form.addEventListener("reset", () => setTimeout(save));
  form.addEventListener("submit", (event) => event.preventDefault());
  toggle.addEventListener("click", () => showSettings(panel.hidden));
  find("settings-close").addEventListener("click", () => showSettings(false));
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

/** Request fields for what is set. The server says so if a value is wrong. */
export function sampling() {
  const found = {};
  for (const name of NAMES) {
    const text = form.elements[name].value.trim();
    if (text !== "") found[name] = name === "system" ? text : Number(text);
  }
  return found;
}
