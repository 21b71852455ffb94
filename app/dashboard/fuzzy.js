// What of a prompt is held although its beginning is not: by place along the prompt, and by pod.

import { said } from "./api.js";

const ROWS_MAX = 64;

export function fuzzyHits(outcome, match) {
  const line = document.createElement("p");
  if (outcome.status === "rejected") {
    line.textContent = said(outcome.reason);
    return [line];
  }
  const found = outcome.value;
  if (found.pods.length === 0) {
    line.textContent = "No block of it, not even nearly.";
    return [line];
  }
  const tokens = (kind) => found.runs.filter((run) => run.kind === kind).reduce((sum, run) => sum + run.tokens, 0);
  line.textContent =
    `${tokens("exact")} of ${found.tokens} tokens exactly, ${tokens("near")} nearly, at any place of other prompts too` +
    (match.matches.length ? "." : ": a match by prefix finds none of them.");
  return [line, legend(), places(found), pods(found)];
}

function legend() {
  const made = document.createElement("p");
  made.className = "legend";
  for (const kind of ["exact", "near"]) {
    const item = made.appendChild(document.createElement("span"));
    item.appendChild(document.createElement("i")).dataset.kind = kind;
    item.append(kind === "exact" ? "the same tokens" : "nearly the same");
  }
  return made;
}

function places(found) {
  const bar = document.createElement("div");
  bar.className = "places";
  bar.setAttribute("role", "img");
  bar.setAttribute(
    "aria-label",
    found.runs.map((run) => `${run.kind} from token ${run.token_offset} to ${run.token_offset + run.tokens}`).join(", "),
  );
  for (const run of found.runs) {
    const piece = bar.appendChild(document.createElement("i"));
    piece.dataset.kind = run.kind;
    piece.style.left = `${(100 * run.token_offset) / found.tokens}%`;
    piece.style.width = `${(100 * run.tokens) / found.tokens}%`;
    piece.title = `${run.kind}: tokens ${run.token_offset} to ${run.token_offset + run.tokens}`;
  }
  return bar;
}

function pods(found) {
  const scroll = document.createElement("div");
  scroll.className = "scroll";
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", "Reusable tokens by pod");
  const table = scroll.appendChild(document.createElement("table"));
  table.id = "fuzzy";
  const head = table.createTHead().insertRow();
  for (const title of ["Pod", "Reusable tokens", "Share of the prompt", "Mean confidence"]) {
    const cell = head.appendChild(document.createElement("th"));
    cell.scope = "col";
    cell.textContent = title;
    if (title !== "Pod") cell.className = "number";
  }
  const body = table.createTBody();
  for (const pod of found.pods.slice(0, ROWS_MAX)) {
    const row = body.insertRow();
    const name = row.appendChild(document.createElement("th"));
    name.scope = "row";
    name.textContent = pod.pod;
    for (const text of [pod.reusable_tokens, `${(100 * pod.coverage).toFixed(1)} %`, pod.mean_confidence.toFixed(3)]) {
      const cell = row.insertCell();
      cell.textContent = text;
      cell.className = "number";
    }
  }
  if (found.pods.length > ROWS_MAX) {
    table.createCaption().textContent = `The first ${ROWS_MAX} of ${found.pods.length} pods.`;
  }
  return scroll;
}
