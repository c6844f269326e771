// A subset of Markdown, as models write it, to DOM nodes: headings, paragraphs, lists, quotes, fenced
// code, tables, rules; emphasis, code, links. HTML stays text, images become links, and a link goes to
// http or https or nowhere. Every scan is linear in the text, whatever the model writes.

import { copyButton, make } from "./dom.js";

const MAX_DEPTH = 8; // of blocks in blocks, and of emphasis in emphasis
const MAX_COLUMNS = 64;
const TAB = "    ";

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])(?:[ \t]{1,4}|$)/;
const DELIMITERS = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

const isBlank = (line) => line === undefined || line.trim() === "";
const indentOf = (line) => /^[ \t]*/.exec(line)[0].replaceAll("\t", TAB).length;

/** Takes up to `width` columns of indentation away. */
function dedent(line, width) {
  let at = 0;
  for (let left = width; left > 0 && (line[at] === " " || line[at] === "\t"); at++) {
    left -= line[at] === "\t" ? TAB.length : 1;
  }
  return line.slice(at);
}

/** Shows a text that grows. Blocks that have ended are left alone; only the last one is redone. */
export class MarkdownView {
  #final = 0; // where in the source the first block begins that may still change
  #open = []; // blocks from there on: {raw, kind, node}

  constructor(element) {
    this.element = element;
  }

  /** source: what was given before, and perhaps more. */
  update(source) {
    const lines = source.slice(this.#final).split("\n");
    const blocks = parse(lines, 0);
    const before = this.#open;
    this.#open = blocks.map((block, index) => {
      const raw = lines.slice(block.start, block.end).join("\n");
      const known = before[index];
      if (known?.raw === raw && known.kind === block.kind) return known;
      if (known?.kind === "code" && block.kind === "code" && known.language === block.language) {
        growText(known.node.querySelector("code").firstChild, block.text);
        return { raw, kind: "code", language: block.language, node: known.node };
      }
      const node = build(block, 0);
      if (known) known.node.replaceWith(node);
      else this.element.append(node);
      return { raw, kind: block.kind, language: block.language, node };
    });
    for (const gone of before.slice(blocks.length)) gone.node.remove();
    // A block has ended when a whole line after it begins another one.
    let numFinal = 0;
    const hasBegun = (block) => block.start + (block.kind === "table" ? 1 : 0) < lines.length - 1;
    while (numFinal + 1 < blocks.length && hasBegun(blocks[numFinal + 1])) numFinal++;
    if (numFinal > 0) {
      for (let i = 0; i < blocks[numFinal].start; i++) this.#final += lines[i].length + 1;
      this.#open.splice(0, numFinal);
    }
  }
}

/** Changes as little as possible: scroll position and selection in long code stay. */
function growText(node, text) {
  if (text.startsWith(node.data)) node.appendData(text.slice(node.data.length));
  else node.data = text;
}

// Blocks: {kind, start, end, ...}, lines start <= i < end.

function parse(lines, depth) {
  const blocks = [];
  let start = 0;
  while (start < lines.length) {
    if (isBlank(lines[start])) start++;
    else {
      const block = (depth < MAX_DEPTH && structure(lines, start)) || paragraph(lines, start);
      blocks.push({ ...block, start });
      start = block.end;
    }
  }
  return blocks;
}

const structure = (lines, start) =>
  fence(lines, start) || heading(lines, start) || rule(lines, start) || quote(lines, start) ||
  list(lines, start) || table(lines, start);

function fence(lines, start) {
  const [, indent, marks, info] = FENCE.exec(lines[start]) ?? [];
  if (!marks) return null;
  let end = start + 1;
  const text = [];
  while (end < lines.length && !closesFence(lines[end], marks)) {
    text.push(dedent(lines[end++], indent.length));
  }
  // A text that still comes ends with a line that has not begun.
  if (end === lines.length && text.at(-1) === "") text.pop();
  const language = info.trim().split(/\s/, 1)[0].slice(0, 40);
  return { kind: "code", end: end + 1, text: text.join("\n"), language };
}

function closesFence(line, marks) {
  const text = line.trim();
  return text.length >= marks.length && text === marks[0].repeat(text.length);
}

function heading(lines, start) {
  const match = HEADING.exec(lines[start]);
  if (!match) return null;
  const text = lines[start].slice(match[0].length).trim();
  return { kind: "heading", end: start + 1, level: match[1].length, text };
}

const rule = (lines, start) => (RULE.test(lines[start]) ? { kind: "rule", end: start + 1 } : null);

function quote(lines, start) {
  let end = start;
  const inner = [];
  while (end < lines.length && QUOTE.test(lines[end])) inner.push(lines[end++].replace(QUOTE, ""));
  return inner.length ? { kind: "quote", end, inner } : null;
}

function list(lines, start) {
  const first = item(lines[start]);
  if (!first) return null;
  const items = [];
  let end = start;
  let next = first;
  while (next && next.ordered === first.ordered && next.indent < first.indent + 2) {
    const inner = [lines[end++].slice(next.length)];
    let isAfterBlank = false;
    for (; end < lines.length; end++) {
      const line = lines[end];
      const indent = indentOf(line);
      if (isBlank(line)) inner.push("");
      else if (indent >= first.indent + 2) inner.push(dedent(line, next.width));
      else if (!isAfterBlank && !begins(lines, end) && !item(line)) inner.push(line);
      else break;
      isAfterBlank = isBlank(line);
    }
    items.push(inner);
    next = end < lines.length ? item(lines[end]) : null;
  }
  return { kind: "list", end, items, ordered: first.ordered, first: first.number };
}

function item(line) {
  const match = ITEM.exec(line);
  if (!match || RULE.test(line)) return null;
  const ordered = match[2].length > 1;
  const number = ordered ? parseInt(match[2], 10) : 0;
  const indent = indentOf(match[1]);
  const width = indent + match[0].length - match[1].length;
  return { indent, width, length: match[0].length, ordered, number };
}

function table(lines, start) {
  if (!lines[start].includes("|") || !DELIMITERS.test(lines[start + 1] ?? "")) return null;
  const header = cells(lines[start]);
  const delimiters = cells(lines[start + 1]);
  if (header.length !== delimiters.length) return null;
  const aligns = delimiters.map((cell) => {
    if (cell.endsWith(":")) return cell.startsWith(":") ? "center" : "right";
    return "left";
  });
  let end = start + 2;
  const rows = [];
  while (end < lines.length && lines[end].includes("|")) rows.push(cells(lines[end++]));
  return { kind: "table", end, header, aligns, rows };
}

function cells(line) {
  const found = line.trim().split(/(?<!\\)\|/, MAX_COLUMNS);
  if (found[0] === "") found.shift();
  if (found.at(-1) === "") found.pop();
  return found.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function paragraph(lines, start) {
  let end = start + 1;
  while (end < lines.length && !isBlank(lines[end]) && !begins(lines, end)) end++;
  return { kind: "paragraph", end, text: lines.slice(start, end).join("\n") };
}

/** Whether something begins here that ends a paragraph: "2." does not, it may be a wrapped line. */
function begins(lines, at) {
  const found = item(lines[at]);
  if (found) return !found.ordered || found.number === 1;
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) ||
    table(lines, at) !== null;
}

function build(block, depth) {
  switch (block.kind) {
    case "code":
      return codeBlock(block);
    case "heading":
      // The page has a heading above the conversation's.
      return make(`h${Math.min(block.level + 2, 6)}`, {}, ...inline(block.text));
    case "rule":
      return make("hr");
    case "quote":
      return make("blockquote", {}, ...children(block.inner, depth));
    case "list": {
      const items = block.items.map((lines) => make("li", {}, ...children(lines, depth)));
      return block.ordered ? make("ol", { start: block.first }, ...items) : make("ul", {}, ...items);
    }
    case "table":
      return tableNode(block);
    default:
      return make("p", {}, ...inline(block.text));
  }
}

const children = (lines, depth) => parse(lines, depth + 1).map((one) => build(one, depth + 1));

function codeBlock({ text, language }) {
  const code = make("code", {}, document.createTextNode(text));
  const bar = make("div", { class: "bar" }, make("span", {}, language || "text"));
  bar.append(copyButton(() => code.textContent, "Copy code"));
  return make("div", { class: "code" }, bar, make("pre", { tabindex: 0 }, code));
}

function tableNode({ header, aligns, rows }) {
  const row = (tag, texts) =>
    make("tr", {}, ...header.map((_, i) =>
      make(tag, { class: aligns[i] }, ...inline(texts[i] ?? ""))));
  const head = make("thead", {}, row("th", header));
  const body = make("tbody", {}, ...rows.map((texts) => row("td", texts)));
  return make("div", { class: "wide", tabindex: 0 }, make("table", {}, head, body));
}

// What stands in a line.

const LINK = /!?\[([^[\]\n]{0,500})\]\([ \t]*<?([^\s()<>]{0,2000}(?:\([^\s()<>]{0,500}\)[^\s()<>]{0,500}){0,3})>?(?:[ \t]+"[^"\n]{0,500}")?[ \t]*\)/y;
const BARE_URL = /https?:\/\/[^\s<>"'`|[\]*]{1,2000}/y;
const PLAIN = /(?:[^\\`*_~!\[h]|h(?!ttps?:\/\/)){1,1000}/y;
const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };

function inline(text) {
  const out = []; // nodes and strings
  const open = []; // marks that may still be closed: {mark, at: index in out}
  const unclosed = new Set(); // lengths of backtick runs that nothing later closes
  let at = 0;
  const match = (pattern) => {
    pattern.lastIndex = at;
    return pattern.exec(text);
  };
  while (at < text.length) {
    const char = text[at];
    let found;
    if ((found = match(PLAIN))) {
      out.push(found[0]);
      at += found[0].length;
    } else if (char === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      out.push(text[at + 1]);
      at += 2;
    } else if (char === "`") {
      at = codeSpan(text, at, out, unclosed);
    } else if ((char === "[" || char === "!") && (found = match(LINK))) {
      out.push(link(found[2], found[1] || found[2]));
      at += found[0].length;
    } else if (char === "h" && !/\w/.test(text[at - 1] ?? "") && (found = match(BARE_URL))) {
      const url = trimUrl(found[0]);
      out.push(link(url, url));
      at += url.length;
    } else if ("*_~".includes(char)) {
      at = emphasis(text, at, out, open);
    } else {
      out.push(char);
      at++;
    }
  }
  return out;
}

function codeSpan(text, start, out, unclosed) {
  let end = start;
  while (text[end] === "`") end++;
  const length = end - start;
  for (let at = end; !unclosed.has(length); ) {
    const from = text.indexOf("`", at);
    if (from < 0) break;
    at = from;
    while (text[at] === "`") at++;
    if (at - from === length) {
      let code = text.slice(end, from);
      if (/^ .*\S.* $/s.test(code)) code = code.slice(1, -1);
      out.push(make("code", {}, code));
      return at;
    }
  }
  unclosed.add(length);
  out.push(text.slice(start, end));
  return end;
}

/** A run of marks: closes what it can, opens with the rest, and is text otherwise. */
function emphasis(text, start, out, open) {
  const char = text[start];
  let end = start;
  while (text[end] === char) end++;
  const before = text[start - 1] ?? " ";
  const after = text[end] ?? " ";
  // snake_case is a name, and so is 2*3*4 a product only where spaces stand.
  const isInWord = char === "_" && /[\p{L}\p{N}]/u.test(before) && /[\p{L}\p{N}]/u.test(after);
  const canClose = !/\s/.test(before) && !isInWord;
  const canOpen = !/\s/.test(after) && !isInWord;
  let rest = end - start;
  while (rest > 0) {
    const least = char === "~" ? 2 : 1;
    const closed = canClose ? closable(open, char, rest) : -1;
    if (closed >= 0) {
      const { mark, at } = open[closed];
      open.length = closed;
      const inner = out.splice(at);
      inner.shift(); // the mark itself
      out.push(make(TAGS[mark], {}, ...inner));
      rest -= mark.length;
    } else if (canOpen && rest >= least && rest <= 3) {
      if (open.length === MAX_DEPTH) open.shift();
      const mark = char.repeat(Math.max(Math.min(rest, 2), least));
      open.push({ mark, at: out.length });
      out.push(mark);
      rest -= mark.length;
    } else {
      out.push(char.repeat(rest));
      rest = 0;
    }
  }
  return end;
}

function closable(open, char, rest) {
  for (let i = open.length - 1; i >= 0; i--) {
    if (open[i].mark[0] === char && open[i].mark.length <= rest) return i;
  }
  return -1;
}

function trimUrl(url) {
  let end = url.length;
  while (end > 8 && ".,;:!?_~".includes(url[end - 1])) end--;
  while (url[end - 1] === ")" && !url.slice(0, end).includes("(")) end--;
  return url.slice(0, end);
}

/** A link to http or https; anything else is shown as the text it is. */
function link(url, words) {
  let target;
  try {
    target = new URL(url); // no base: what is relative would lead into this server
  } catch {
    target = null;
  }
  if (target === null || !["http:", "https:"].includes(target.protocol)) return words;
  const properties = { href: target.href, title: target.href, target: "_blank" };
  return make("a", { ...properties, rel: "noopener noreferrer nofollow" }, words);
}
