// Polls the public API and draws what it says. When the API is away the page says so and keeps what it last knew.

import * as api from "./api.js";
import { Chart, buckets, quantile } from "./charts.js";
import { showPods } from "./pods.js";
import { followLive } from "./live.js";
import { listenToForm, offerModels } from "./playground.js";

const POLL_MS = 2000;
const count = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const bytes = (n) => (n < 1 << 20 ? `${(n / 1024).toFixed(0)} KiB` : `${(n / (1 << 20)).toFixed(1)} MiB`);
const milliseconds = (s) => (s < 0.001 ? `≤ ${(s * 1e6).toFixed(0)} µs` : `≤ ${(s * 1000).toFixed(1)} ms`);

const keyField = document.getElementById("api-key");
const connection = document.getElementById("connection");
const figures = document.getElementById("figures");
const charts = document.getElementById("charts");
const drawn = {
  prefixes: new Chart(charts, "Prefixes", (n) => short.format(n)),
  bytes: new Chart(charts, "Index memory", bytes),
  evicted: new Chart(charts, "Evicted and expired, a second", (n) => short.format(n)),
  matches: new Chart(charts, "Matches, a second", (n) => short.format(n)),
  hit: new Chart(charts, "Token hit rate of matches", (n) => `${(100 * n).toFixed(1)} %`),
  p99: new Chart(charts, "Latency of matches and choices, p99", milliseconds),
};
let last = null;

function show(stats, pods) {
  const rows = [
    ["Pods", count.format(pods.length)],
    ["Not live", count.format(Object.entries(stats.sources).reduce((n, [s, c]) => n + (s === "live" ? 0 : c), 0))],
    ["Prefixes", short.format(stats.index.prefixes)],
    ["Engine keys", short.format(stats.index.engine_keys)],
    ["Memory", bytes(stats.index.bytes)],
    ["Matches", short.format(stats.queries.matches)],
    ["Hit rate", stats.queries.matches ? `${((100 * stats.queries.matches_hit) / stats.queries.matches).toFixed(1)} %` : "–"],
    ["Orphans waiting", count.format(stats.index.orphan_blocks)],
  ];
  figures.replaceChildren(
    ...rows.map(([name, value]) => {
      const group = document.createElement("div");
      group.appendChild(document.createElement("dt")).textContent = name;
      group.appendChild(document.createElement("dd")).textContent = value;
      return group;
    }),
  );
}

function chart(stats, text, nowMs) {
  const histogram = buckets(text, "kvindexer_http_request_seconds", /route="\/v1\/(match|route)"/);
  drawn.prefixes.add(stats.index.prefixes);
  drawn.bytes.add(stats.index.bytes);
  if (last && stats.uptime_s >= last.stats.uptime_s) {
    const seconds = (nowMs - last.nowMs) / 1000;
    const gone = (s) => s.index.evicted + s.index.evicted_in_all + s.index.expired;
    const asked = stats.queries.tokens_asked - last.stats.queries.tokens_asked;
    drawn.evicted.add((gone(stats) - gone(last.stats)) / seconds);
    drawn.matches.add((stats.queries.matches - last.stats.queries.matches) / seconds);
    drawn.hit.add(asked ? (stats.queries.tokens_matched - last.stats.queries.tokens_matched) / asked : null);
    drawn.p99.add(quantile(last.histogram, histogram, 0.99));
  }
  last = { stats, histogram, nowMs };
}

async function poll() {
  try {
    const [stats, pods, text] = await Promise.all([api.stats(), api.pods(), api.metrics()]);
    show(stats, pods);
    showPods(pods);
    chart(stats, text, performance.now());
    offerModels(stats.contexts.map((context) => context.model).concat(pods.map((pod) => pod.model)));
    connection.dataset.state = "ok";
    connection.textContent = `up ${Math.floor(stats.uptime_s / 60)} min`;
    keyField.removeAttribute("aria-invalid");
  } catch (error) {
    keyField.toggleAttribute("aria-invalid", error instanceof api.Locked);
    connection.dataset.state = "away";
    connection.textContent = error instanceof api.Problem ? error.message : "the indexer does not answer; what you see is old";
  }
  setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
}

function chooseTheme() {
  const button = document.getElementById("theme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const use = (dark) => {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    button.setAttribute("aria-pressed", String(dark));
  };
  use((localStorage.getItem("kvindexer-theme") ?? (prefersDark ? "dark" : "light")) === "dark");
  button.addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme !== "dark";
    localStorage.setItem("kvindexer-theme", dark ? "dark" : "light");
    use(dark);
  });
}

keyField.value = api.apiKey();
keyField.addEventListener("change", () => api.useKey(keyField.value.trim()));
chooseTheme();
listenToForm();
followLive();
poll();
