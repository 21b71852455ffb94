// The public API, and nothing else. Every call has a deadline, so that a hung indexer shows as one.

const DEADLINE_MS = 5000;

export class Problem extends Error {}
export class Locked extends Problem {}

// A failure in a sentence: what the indexer says, or that it says nothing.
export function said(error) {
  return error instanceof Problem ? error.message : "The indexer does not answer.";
}

let key = sessionStorage.getItem("kvindexer-key") ?? "";

export function apiKey() {
  return key;
}

export function useKey(value) {
  key = value;
  sessionStorage.setItem("kvindexer-key", value);
}

function locked() {
  return new Locked(key ? "this API key is not known" : "an API key is needed: type it in here");
}

async function send(path, options = {}) {
  const headers = { Accept: "application/json", ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, signal: AbortSignal.timeout(DEADLINE_MS) });
  if (response.ok) return response;
  if (response.status === 401) throw locked();
  const problem = await response.json().catch(() => ({}));
  const places = (problem.errors ?? []).map((fault) => `${fault.field}: ${fault.detail}`);
  throw new Problem([problem.detail ?? problem.title ?? `HTTP ${response.status}`, ...places].join("; "));
}

export const pods = async () => (await (await send("v1/pods")).json()).pods;
export const stats = async () => (await send("v1/stats")).json();
export const metrics = async () => (await send("metrics", { headers: { Accept: "text/plain" } })).text();
export const post = async (path, body) =>
  (await send(path, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } })).json();

// Server-sent events over fetch, because EventSource cannot send an API key. Calls `seen` for each; returns at the end.
export async function live(seen, signal) {
  const headers = { Accept: "text/event-stream" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch("v1/live", { headers, signal });
  if (response.status === 401) throw locked();
  if (!response.ok) throw new Problem(`the live feed answers ${response.status}`);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const event = { kind: "message", data: "" };
      for (const line of frame.split("\n")) {
        if (line.startsWith("event:")) event.kind = line.slice(6).trim();
        if (line.startsWith("data:")) event.data += line.slice(5).trim();
      }
      if (event.data) seen(event.kind, JSON.parse(event.data));
    }
  }
}
