// SPDX-License-Identifier: Apache-2.0
// A request: its body, sending it and reading events, and the link and command that repeat it.

const KEY = "mosaic-api-key";

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";
export const rememberKey = (key) => sessionStorage.setItem(KEY, key);

export function headers() {
  const found = { "Content-Type": "application/json" };
  if (apiKey()) found.Authorization = `Bearer ${apiKey()}`;
  return found;
}

// Like fetch, but the error of a network failure names the server.
export async function reach(path, options) {
  return fetch(path, options).catch(unreachable);
}

function unreachable(error) {
  if (error.name === "AbortError") throw error;
  throw new Error(`The server does not answer at ${new URL(".", location.href).href}`);
}

// The body of POST /generate. All settings are sent, so that the server's defaults have no effect.
export function bodyOf(messages, settings, isPlain) {
  const asked = isPlain ? { prompt: messages.at(-1).content } : { messages };
  return { ...asked, ...settings };
}

const CHAT_TOKENS = 64; // most tokens that a chat template adds to a message

// The fields that set the length of the answer. If the user chose no length, the server decides it.
// auto: the algorithm's `auto_length`. room: the model's longest sequence, in tokens.
export function lengthOf({ gen_length, canvas }, messages, auto, room) {
  if (gen_length || !auto) return {};
  const kind = canvas ?? auto.canvas;
  if (kind === "fixed") return { canvas: kind };
  // A token has at least one byte. Without a limit, the answer may fill the room that is left.
  const bytes = messages.reduce((sum, m) => sum + new Blob([m.content]).size + CHAT_TOKENS, 0);
  const fits = bytes + auto.max_tokens <= room;
  return { ...(kind && { canvas: kind }), ...(fits && { max_tokens: auto.max_tokens }) };
}

// Send a request and call `onEvent` with every event; returns when the answer is complete.
export async function ask(body, onEvent, signal) {
  const response = await reach("generate", {
    method: "POST",
    headers: headers(),
    body: JSON.stringify({ ...body, stream: true, stream_canvas: true }),
    signal,
  });
  if (!response.ok) throw new Error(await reasonOf(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(unreachable);
    if (done) return;
    rest = eachEvent(rest + value, (event) => {
      if (event.error) throw new Error(event.error.message);
      onEvent(event);
    });
  }
}

// Call `onEvent` with the data of every complete event in `text`; returns the remaining text.
export function eachEvent(text, onEvent) {
  const parts = text.split("\n\n");
  const rest = parts.pop();
  for (const part of parts) {
    const data = part.replace(/^data: /, "");
    if (data && data !== "[DONE]") onEvent(JSON.parse(data));
  }
  return rest;
}

export async function reasonOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

const NOT_REVISING = ["gen_length", "canvas", "steps", "structured_outputs"];

// The settings that a request keeps if it revises a text, which has a length of its own.
export const revising = (settings) =>
  Object.fromEntries(Object.entries(settings).filter(([name]) => !NOT_REVISING.includes(name)));

// A link to this page that contains a whole request after #, which is not sent to the server.
export function linkOf(address, state) {
  const bytes = new TextEncoder().encode(JSON.stringify(state));
  const coded = btoa(Array.from(bytes, (b) => String.fromCharCode(b)).join(""));
  const safe = coded.replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
  return `${address.split("#")[0]}#ask=${safe}`;
}

// Decode the state from a link of `linkOf`, or return null if the address has none.
export function stateIn(address) {
  const found = /#ask=([\w-]+)/.exec(address);
  if (!found) return null;
  try {
    const coded = atob(found[1].replaceAll("-", "+").replaceAll("_", "/"));
    return JSON.parse(new TextDecoder().decode(Uint8Array.from(coded, (c) => c.charCodeAt(0))));
  } catch {
    return null;
  }
}

// Without TLS, pages from other hosts have no clipboard, so selected text is copied instead.
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = Object.assign(document.createElement("textarea"), { value: text });
  document.body.append(box);
  box.select();
  document.execCommand("copy");
  box.remove();
}

export function curlOf(origin, body, needsKey) {
  const key = needsKey ? " -H \"Authorization: Bearer $KEY\"" : "";
  const data = JSON.stringify(body).replaceAll("'", "'\\''");
  return `curl -s ${origin}generate${key} -H 'Content-Type: application/json' -d '${data}'`;
}
