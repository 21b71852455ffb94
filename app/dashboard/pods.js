// The table of pods: one row a source, those in trouble first.

import { addCell, addState, nameRow } from "./tables.js";

const TIERS = ["gpu", "cpu", "disk", "external"];
const TROUBLES = ["gaps", "restarts", "orphans", "rejected"];
const ORDER = { down: 0, degraded: 1, catching_up: 2, live: 3 };
const number = new Intl.NumberFormat("en");

const body = document.querySelector("#pods tbody");
const filter = document.getElementById("pod-filter");
const countLine = document.getElementById("pod-count");
let known = [];

filter.addEventListener("input", draw);

export function showPods(pods) {
  known = pods.flatMap((pod) => pod.ranks.map((rank) => ({ pod: pod.pod, ...rank })));
  known.sort((a, b) => ORDER[a.state] - ORDER[b.state] || a.pod.localeCompare(b.pod) || a.dp_rank - b.dp_rank);
  draw();
}

function draw() {
  const wanted = filter.value.trim().toLowerCase();
  const rows = known.filter((row) => !wanted || row.pod.toLowerCase().includes(wanted) || row.state.includes(wanted));
  const most = Math.max(1, ...known.map((row) => total(row)));
  body.replaceChildren(...rows.map((row) => drawRow(row, most)));
  const troubled = known.filter((row) => row.state !== "live").length;
  countLine.textContent = `${rows.length} of ${known.length} sources${troubled ? `, ${troubled} not live` : ""}`;
}

function drawRow(row, most) {
  const line = document.createElement("tr");
  nameRow(line, row.pod);
  addCell(line, row.dp_rank);
  addState(line, row.state);
  addCell(line, age(row.last_event_age_s), "number");
  addCell(line, row.last_seq ?? "–", "number");
  const blocks = addCell(line, "");
  const bar = blocks.appendChild(document.createElement("span"));
  bar.className = "bar";
  for (const tier of TIERS) {
    if (!row.blocks[tier]) continue;
    const part = bar.appendChild(document.createElement("i"));
    part.dataset.tier = tier;
    part.style.width = `${(100 * row.blocks[tier]) / most}%`;
  }
  blocks.append(TIERS.filter((t) => row.blocks[t]).map((t) => `${number.format(row.blocks[t])} ${t}`).join(", ") || "none");
  const counts = TROUBLES.filter((t) => row[t]).map((t) => `${number.format(row[t])} ${t}`).join(", ");
  const cause = row.state === "live" ? "" : row.cause;
  addCell(line, [cause, counts].filter(Boolean).join("; "), "trouble");
  return line;
}

function total(row) {
  return TIERS.reduce((sum, tier) => sum + (row.blocks[tier] ?? 0), 0);
}

function age(seconds) {
  if (seconds === null || seconds === undefined) return "never";
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  return seconds < 3600 ? `${Math.floor(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h`;
}
