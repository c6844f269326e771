// The engine, live: asks the server once a second and draws the last two minutes.

import { getJson } from "./api.js";
import { find, make } from "./dom.js";

const SECONDS = 120;
const WIDTH = 300;
const HEIGHT = 84;

const CHARTS = [
  { id: "requests", title: "Requests", least: 4, format: String, lines: { running: "running", waiting: "waiting" } },
  { id: "kv", title: "KV cache in use", least: 1, most: 1, format: percent, lines: { kv: "of all blocks" } },
  { id: "rate", title: "Tokens per second", least: 10, format: brief, lines: { answers: "of answers", prompts: "of prompts" } },
  { id: "ttft", title: "Time to first token", least: 0.1, format: seconds, lines: { ttft: "mean of the newest requests" } },
];

const samples = []; // {at, running, waiting, kv, answers, prompts, ttft}; at: seconds of the server's clock
let before = null;
let isStale = false; // nobody tells what is now

export function startEngine() {
  const charts = CHARTS.map(chartNode);
  find("engine").append(make("p", { id: "span" }, "The last two minutes"));
  find("engine").append(make("div", { class: "charts" }, ...charts), make("dl", { id: "facts" }));
  poll();
}

async function poll() {
  const began = performance.now();
  if (!document.hidden) {
    try {
      take(await getJson("stats", AbortSignal.timeout(5000)));
    } catch (error) {
      banner(error.status ? error.message : "The server cannot be reached.");
      mark(true);
    }
  }
  setTimeout(poll, Math.max(1000 - (performance.now() - began), 100));
}

function take(now) {
  banner(now.is_alive ? "" : "The engine has stopped: no more answers come from this server.");
  mark(!now.is_alive);
  if (!now.is_alive) return;
  // Counts that went back are another server's.
  if (before && now.uptime_seconds > before.uptime_seconds) {
    const seconds = now.uptime_seconds - before.uptime_seconds;
    const grown = (name) => now[name] - before[name];
    samples.push({
      at: now.uptime_seconds,
      running: now.num_requests_running,
      waiting: now.num_requests_waiting,
      kv: now.kv_cache_usage,
      answers: grown("generation_tokens") / seconds,
      prompts: grown("prompt_tokens") / seconds,
      ttft: grown("first_tokens") ? grown("first_token_seconds") / grown("first_tokens") : null,
    });
  } else samples.length = 0;
  before = now;
  while (samples.length && samples[0].at < now.uptime_seconds - SECONDS) samples.shift();
  if (!find("engine").hidden) draw();
}

/** What was last known is dimmed, and not shown as what is now. */
function mark(stale) {
  if (stale === isStale) return;
  isStale = stale;
  find("engine").classList.toggle("stale", stale);
  if (!find("engine").hidden) draw();
}

function banner(text) {
  const node = find("banner");
  if (node.textContent !== text) node.textContent = text;
  node.hidden = text === "";
}

/** Shows what is known by now. */
export function draw() {
  for (const chart of CHARTS) drawChart(chart);
  if (before) drawFacts(before);
}

function drawFacts(now) {
  const looked = now.prefix_cache_queries;
  const facts = {
    Model: now.model,
    Context: `${now.max_model_len.toLocaleString("en")} tokens`,
    "KV cache": `${now.num_kv_tokens.toLocaleString("en")} tokens`,
    "At a time": `${now.max_num_seqs} answers`,
    Generated: `${now.generation_tokens.toLocaleString("en")} tokens`,
    "Prompts from cache": looked ? percent(now.prefix_cache_hits / looked) : "nothing yet",
    Preempted: String(now.num_preemptions),
    Up: duration(now.uptime_seconds),
    Version: now.version,
  };
  find("facts").replaceChildren(
    ...Object.entries(facts).map(([name, value]) =>
      make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

function chartNode({ id, title, lines }) {
  const legend = Object.entries(lines).map(([name, words], index) =>
    make("p", { class: `line${index}` }, make("b", { id: `now-${name}` }, "–"), ` ${words}`));
  return make("figure", {}, make("figcaption", {}, title), ...legend,
    svg("svg", { id: `chart-${id}`, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" }));
}

function svg(tag, properties, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function drawChart({ id, title, least, most, format, lines }) {
  const names = Object.keys(lines);
  const values = samples.flatMap((sample) => names.map((name) => sample[name] ?? 0));
  const top = most ?? niceAbove(Math.max(least, ...values));
  const end = samples.at(-1)?.at ?? 0;
  const x = (at) => WIDTH * (1 - (end - at) / SECONDS);
  const y = (value) => HEIGHT - 2 - (HEIGHT - 16) * (value / top);
  const parts = [0, 0.5, 1].map((part) =>
    svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y(part * top), y2: y(part * top) }));
  parts.push(svg("text", { x: 0, y: 10 }, format(top)));
  const spoken = [];
  names.forEach((name, index) => {
    const known = samples.filter((sample) => sample[name] !== null);
    const points = known.map((sample) => `${x(sample.at).toFixed(1)},${y(sample[name]).toFixed(1)}`);
    if (points.length && index === 0) {
      const area = [`${x(known[0].at)},${y(0)}`, ...points, `${x(known.at(-1).at)},${y(0)}`];
      parts.push(svg("polygon", { points: area.join(" ") }));
    }
    parts.push(svg("polyline", { class: `line${index}`, points: points.join(" ") }));
    if (points.length) {
      const last = known.at(-1);
      parts.push(svg("circle", { class: `line${index}`, cx: x(last.at) - 2, cy: y(last[name]), r: 2.5 }));
    }
    const now = known.length && !isStale ? format(known.at(-1)[name]) : "–";
    find(`now-${name}`).textContent = now;
    spoken.push(`${lines[name]} ${now}`);
  });
  const node = find(`chart-${id}`);
  node.setAttribute("aria-label", `${title}, last two minutes, up to ${format(top)}; now ${spoken.join(", ")}`);
  node.replaceChildren(...parts);
}

/** The next of 1, 2, 5, 10, 20, ... that is not below `value`. */
function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((nice) => nice >= value * 0.999);
}

function percent(value) {
  return `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`;
}

function brief(value) {
  return value < 10 && value % 1 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

function seconds(value) {
  return value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(1)} s`;
}

function duration(value) {
  const minutes = Math.floor(value / 60);
  if (minutes < 1) return `${Math.floor(value)} s`;
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
