// The live feed, newest first, bounded; reconnects by itself.

import * as api from "./api.js";

const LINES_MAX = 200;
const RETRY_MS = 3000;

const list = document.getElementById("live");
const state = document.getElementById("live-state");
const pause = document.getElementById("live-pause");

pause.addEventListener("click", () => {
  pause.setAttribute("aria-pressed", String(pause.getAttribute("aria-pressed") !== "true"));
});

export async function followLive() {
  try {
    state.textContent = "connected";
    await api.live(seen, new AbortController().signal);
    state.textContent = "the feed ended";
  } catch (error) {
    state.textContent = error instanceof api.Problem ? error.message : "the feed is away";
  }
  setTimeout(followLive, RETRY_MS);
}

function seen(kind, data) {
  if (pause.getAttribute("aria-pressed") === "true") return;
  const line = document.createElement("li");
  const { ts, ...facts } = data;
  const at = ts ? new Date(1000 * ts) : new Date();
  const told = Object.entries(facts).map(([name, value]) => `${name}=${typeof value === "object" ? JSON.stringify(value) : value}`);
  line.textContent = `${at.toLocaleTimeString("en-GB")} ${kind} ${told.join(" ")}`;
  list.prepend(line);
  while (list.children.length > LINES_MAX) list.lastElementChild.remove();
}
