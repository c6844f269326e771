// The conversation: what was said, how it is shown, and the answer that is coming.

import { ApiError, chatChunks } from "./api.js";
import { copyButton, find, make, recall, remember } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { sampling, settingsAreRight } from "./settings.js";

const log = find("log");
const scroller = find("scroller");
const prompt = find("prompt");
const status = find("status");

// {role, content, numbers?, failure?, element}; numbers: what stands below an answer; failure: why a
// question has none. Such a question is no part of what the model is told later.
let messages = [];
let editing = null; // the message that the next one replaces
let running = null; // AbortController of the answer that is coming
let askKey; // opens the dialog for the API key; resolves to whether there is a new one

export function startChat(options) {
  askKey = options.askKey;
  for (const { role, content, numbers, failure } of recall("sessionStorage", "pelton-chat", [])) {
    showFailure(show({ role, content, numbers, failure }));
  }
  welcome();
  refreshActions();

  find("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  prompt.addEventListener("input", fitPrompt);
  find("stop").addEventListener("click", stop);
  find("cancel-edit").addEventListener("click", cancelEdit);
  find("new").addEventListener("click", newConversation);
  find("jump").addEventListener("click", () => scrollDown());
  scroller.addEventListener("scroll", () => (find("jump").hidden = isAtEnd()));
  addEventListener("pagehide", save);
  scrollDown();
}

/** Whether there was something to stop. */
export function stop() {
  running?.abort();
  return running !== null;
}

export function cancelEdit() {
  if (editing === null) return false;
  setEditing(null);
  setPrompt("");
  return true;
}

export function newConversation() {
  stop();
  setEditing(null);
  cut(0);
  welcome();
  setPrompt("");
  prompt.focus();
}

function send() {
  const content = prompt.value.trim();
  if (content === "" || !mayAsk()) return;
  if (editing !== null) cut(messages.indexOf(editing));
  setEditing(null);
  setPrompt("");
  show({ role: "user", content });
  answer();
}

const mayAsk = () => running === null && settingsAreRight();

/** Asks for an answer to the last message, and shows it as it comes. */
async function answer() {
  const question = messages.at(-1);
  question.failure = undefined;
  showFailure(question);
  const { system, ...settings } = sampling();
  const body = {
    messages: messages.filter(({ failure }) => !failure).map(({ role, content }) => ({ role, content })),
    ...settings,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  if (system) body.messages.unshift({ role: "system", content: system });

  const message = show({ role: "assistant", content: "" });
  const clock = new AnswerClock();
  const control = (running = new AbortController());
  const painter = new Painter(message, clock);
  setRunning(true);
  message.element.setAttribute("aria-busy", "true");
  status.textContent = "The answer is coming.";
  scrollDown();
  let error = null;
  let isStopped = false;
  try {
    for await (const chunk of chatChunks(body, control.signal)) {
      clock.take(chunk);
      const [choice] = chunk.choices;
      if (choice?.delta.content) message.content += choice.delta.content;
      painter.paintSoon();
    }
  } catch (caught) {
    isStopped = caught.name === "AbortError";
    if (isStopped) clock.reason = "stopped by you";
    else error = caught instanceof ApiError ? caught : new ApiError(0, String(caught));
  }
  painter.finish();
  message.element.removeAttribute("aria-busy");
  status.textContent = error ? "The answer failed." : "The answer is complete.";
  if (running === control) {
    running = null;
    setRunning(false);
  }
  if (!messages.includes(message)) return; // a new conversation has begun
  if (message.content === "" && (error || isStopped)) {
    cut(messages.indexOf(message));
    question.failure = error ? error.message : "You stopped it before the first word.";
    showFailure(question);
  } else if (error) {
    message.element.querySelector(".text").after(errorBox(error.message, again));
  }
  refreshActions();
  save();
  if (error?.status === 401 && (await askKey())) again();
}

/** The last answer once more. */
function again() {
  if (!mayAsk()) return;
  if (messages.at(-1)?.role === "assistant") cut(messages.length - 1);
  answer();
}

/** A question that had no answer, anew: as the newest one, whatever was said since. */
function retry(question) {
  if (!mayAsk()) return;
  messages.splice(messages.indexOf(question), 1);
  messages.push(question);
  log.append(question.element);
  answer();
}

/** When tokens came, and how many. */
class AnswerClock {
  reason = null;
  #sent = performance.now();
  #first = null;
  #last = null;
  #usage = null;
  #numFirst = 0;

  take(chunk) {
    const now = performance.now();
    if (chunk.choices[0]?.finish_reason === "length") this.reason = "cut at the limit of tokens";
    const count = chunk.usage?.completion_tokens ?? 0;
    if (count > 0 && this.#first === null) {
      this.#first = now;
      this.#numFirst = count;
    }
    if (count > (this.#usage?.completion_tokens ?? 0)) this.#last = now;
    this.#usage = chunk.usage ?? this.#usage;
  }

  /** For people. Tokens/s are those after the first, over the time that they took. */
  get line() {
    const parts = [];
    if (this.#first !== null) {
      const usage = this.#usage;
      const seconds = (this.#last - this.#first) / 1000;
      parts.push(counted(usage.completion_tokens, "token"));
      if (seconds > 0) {
        const rate = (usage.completion_tokens - this.#numFirst) / seconds;
        parts.push(`${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`);
      }
      parts.push(`first after ${((this.#first - this.#sent) / 1000).toFixed(2)} s`);
      const cached = usage.prompt_tokens_details?.cached_tokens;
      parts.push(`prompt ${usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}`);
    }
    if (this.reason) parts.push(this.reason);
    return parts.join(" · ");
  }
}

const counted = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

/** Draws an answer at most once a frame, and rests between frames three times as long as drawing
    took, so that the page stays quick however long the answer is. */
class Painter {
  #isDue = false;
  #rest = 0;
  #view;

  constructor(message, clock) {
    this.message = message;
    this.clock = clock;
    this.#view = new MarkdownView(message.element.querySelector(".text"));
  }

  paintSoon() {
    if (this.#isDue) return;
    this.#isDue = true;
    const run = () => {
      if (!this.#isDue) return;
      const began = performance.now();
      this.#isDue = false;
      this.#paint();
      this.#rest = 3 * (performance.now() - began);
    };
    // Hidden tabs get no frames.
    setTimeout(() => (document.hidden ? run() : requestAnimationFrame(run)), this.#rest);
  }

  finish() {
    this.#isDue = false;
    this.message.numbers = this.clock.line;
    this.#paint();
  }

  #paint() {
    const stays = isAtEnd();
    this.#view.update(this.message.content);
    this.message.element.querySelector(".numbers").textContent = this.clock.line;
    if (stays) scrollDown();
  }
}

function show(message) {
  find("welcome")?.remove();
  const isUser = message.role === "user";
  const text = make("div", { class: "text" });
  const actions = make("div", { class: "actions" }, copyButton(() => message.content, "Copy message"));
  if (isUser) {
    text.textContent = message.content;
    actions.append(make("button", { type: "button", class: "quiet", onclick: () => edit(message) }, "Edit"));
  } else {
    new MarkdownView(text).update(message.content);
    actions.append(make("button", { type: "button", class: "quiet again", onclick: again }, "Regenerate"));
    actions.append(make("span", { class: "numbers" }, message.numbers ?? ""));
  }
  const who = make("h2", { class: "unseen" }, isUser ? "You" : "Answer");
  message.element = make("article", { class: message.role }, who, text, actions);
  messages.push(message);
  log.append(message.element);
  refreshActions();
  save();
  return message;
}

/** Marks a question that has no answer, or takes the mark away. */
function showFailure(question) {
  const { failure, element } = question;
  element.classList.toggle("failed", !!failure);
  element.querySelector(".error")?.remove();
  if (!failure) return;
  const words = `No answer: ${failure} The model is not told of this question unless you try again.`;
  element.append(errorBox(words, () => retry(question)));
}

function errorBox(words, onclick) {
  const button = make("button", { type: "button", onclick }, "Try again");
  return make("div", { class: "error" }, make("p", {}, words), button);
}

/** Only the last answer can be had again: what follows an earlier one answers to it. */
function refreshActions() {
  messages.forEach((message, index) => {
    const button = message.element.querySelector(".again");
    const error = message.element.querySelector(".assistant .error");
    const isOld = index !== messages.length - 1 || running !== null;
    if (button) button.hidden = isOld || error !== null;
    if (error) error.querySelector("button").hidden = isOld;
  });
}

function cut(length) {
  for (const { element } of messages.splice(length)) element.remove();
  save();
}

function edit(message) {
  stop();
  setEditing(message);
  setPrompt(message.content);
  prompt.focus();
}

function setEditing(message) {
  editing?.element.classList.remove("edited");
  editing = message;
  message?.element.classList.add("edited");
  find("editing").hidden = message === null;
}

function welcome() {
  if (messages.length) return;
  const words = "Ask something. The model runs on this server; the conversation stays in this tab.";
  log.append(make("p", { id: "welcome" }, words));
}

function save() {
  remember("sessionStorage", "pelton-chat",
    messages.filter(({ content }) => content)
      .map(({ role, content, numbers, failure }) => ({ role, content, numbers, failure })));
}

function setRunning(is) {
  const [gone, come] = is ? [find("send"), find("stop")] : [find("stop"), find("send")];
  const isFocused = document.activeElement === gone;
  gone.hidden = true;
  come.hidden = false;
  if (isFocused) (is ? come : prompt).focus();
  refreshActions();
}

function setPrompt(text) {
  prompt.value = text;
  fitPrompt();
}

function fitPrompt() {
  find("send").disabled = prompt.value.trim() === "";
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

const isAtEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;

function scrollDown() {
  scroller.scrollTop = scroller.scrollHeight;
}
