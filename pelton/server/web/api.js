// Calls to the server. Paths are relative, so that the page works under any prefix.

import { recall, remember } from "./dom.js";

/** status: of HTTP; 0: no answer came, or it broke off. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const apiKey = {
  get: () => recall("sessionStorage", "pelton-key", ""),
  set: (key) => remember("sessionStorage", "pelton-key", key || null),
};

async function call(path, { body, signal } = {}) {
  const headers = {};
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  if (body) headers["Content-Type"] = "application/json";
  const request = { method: body ? "POST" : "GET", headers, signal, cache: "no-store" };
  if (body) request.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, request);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // A proxy in between has errors of its own.
  }
  const wait = response.headers.get("Retry-After");
  if (wait) message += ` Try again in ${wait} s.`;
  return new ApiError(response.status, message);
}

export const getJson = async (path, signal) => (await call(path, { signal })).json();

/** The chunks of a streamed chat, as they come. Throws ApiError, or AbortError once aborted. */
export async function* chatChunks(body, signal) {
  const response = await call("v1/chat/completions", { body: { ...body, stream: true }, signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error.message);
    yield chunk;
  }
  throw new ApiError(0, "The answer broke off: the connection ended before it did.");
}

/** The data of server-sent events (WHATWG HTML, 9.2), wherever the network cuts the bytes. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    while (true) {
      let result;
      try {
        result = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError(0, "The answer broke off: the connection was lost.");
      }
      if (result.done) return;
      // A CR at the very end may be half of CR LF: it waits for what follows.
      const lines = (rest + result.value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
