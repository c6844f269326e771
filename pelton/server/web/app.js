// The page around the conversation: views, theme, keys on the keyboard and keys of the API.

import { apiKey, getJson } from "./api.js";
import { cancelEdit, startChat, stop } from "./chat.js";
import { find } from "./dom.js";
import { draw, startEngine } from "./engine.js";
import { showSettings, startSettings } from "./settings.js";

const VIEWS = ["chat", "engine"];

function showView(name) {
  for (const view of VIEWS) {
    find(view).hidden = view !== name;
    const tab = find(`tab-${view}`);
    tab.setAttribute("aria-selected", String(view === name));
    tab.tabIndex = view === name ? 0 : -1;
  }
  history.replaceState(null, "", name === "chat" ? location.pathname + location.search : `#${name}`);
  if (name === "engine") draw();
}

function startViews() {
  for (const [index, view] of VIEWS.entries()) {
    const tab = find(`tab-${view}`);
    tab.addEventListener("click", () => showView(view));
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
      const other = VIEWS[(index + 1) % VIEWS.length];
      showView(other);
      find(`tab-${other}`).focus();
    });
  }
  const view = location.hash.slice(1);
  showView(VIEWS.includes(view) ? view : "chat");
}

function startTheme() {
  const root = document.documentElement;
  find("theme").addEventListener("click", () => {
    const isDark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
    try {
      localStorage.setItem("pelton-theme", root.dataset.theme);
    } catch {
      // Then the next visit follows the system again.
    }
  });
}

function startKeyboard() {
  document.addEventListener("keydown", (event) => {
    if (find("key-dialog").open || event.isComposing) return;
    if (event.key === "Escape") {
      if (stop() || cancelEdit() || showSettings(false)) event.preventDefault();
    } else if (event.key === "/" && !event.ctrlKey && !event.metaKey && !event.altKey) {
      if (event.target.closest("input, textarea")) return;
      event.preventDefault();
      showView("chat");
      find("prompt").focus();
    }
  });
}

let asking = null;

/** Opens the dialog; resolves to whether a key was given. Who asks meanwhile gets the same answer. */
function askKey() {
  asking ??= new Promise((resolve) => {
    const dialog = find("key-dialog");
    find("key").value = "";
    find("key-refused").hidden = !apiKey.get();
    dialog.returnValue = "cancel";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      asking = null;
      const isGiven = dialog.returnValue === "ok";
      if (isGiven) {
        apiKey.set(find("key").value.trim());
        showModel();
      }
      resolve(isGiven);
    }, { once: true });
  });
  return asking;
}

async function showModel() {
  try {
    const [model] = (await getJson("v1/models")).data;
    find("model").textContent = model.id;
    find("model").title = `${model.id}, context ${model.max_model_len} tokens`;
    document.title = `${model.id} – Pelton`;
  } catch (error) {
    find("model").textContent = "";
    if (error.status === 401) askKey();
  }
}

startSettings();
startChat({ askKey });
startEngine();
startViews();
startTheme();
startKeyboard();
find("key-cancel").addEventListener("click", () => find("key-dialog").close());
find("key-open").addEventListener("click", () => {
  apiKey.set(null);
  askKey();
});
showModel();
