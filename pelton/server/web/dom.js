// Building nodes. No text ever becomes HTML here: strings become text nodes.

/** An element. Properties that are functions listen to the event of that name ("onclick"). */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

export const find = (id) => document.getElementById(id);

/** A button that copies what `text()` returns, and says so for a moment. */
export function copyButton(text, label = "Copy") {
  const button = make("button", { type: "button", class: "quiet", "aria-label": label }, "Copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Not allowed";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Plain HTTP from another machine has no clipboard API; the old command still works there.
    const area = make("textarea", { class: "unseen", readonly: true });
    area.value = text;
    const focused = document.activeElement;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return done;
  }
}

/** What is kept in the browser, or `otherwise`. Storage may be full, forbidden, or hold nonsense. */
export function recall(storage, name, otherwise) {
  try {
    return JSON.parse(window[storage].getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function remember(storage, name, value) {
  try {
    if (value === null) window[storage].removeItem(name);
    else window[storage].setItem(name, JSON.stringify(value));
  } catch {
    // Then it is forgotten with the page.
  }
}
