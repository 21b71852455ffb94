// What of a prompt is held although its beginning is not: by place along the prompt, and by pod.

import { said } from "./api.js";
import { addCell, frame, headedTable, nameRow } from "./tables.js";

const ROWS_MAX = 64;
const HEADS = [["Pod"], ["Reusable tokens", "number"], ["Share of the prompt", "number"], ["Mean confidence", "number"]];

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
  const scroll = frame("Reusable tokens by pod");
  const table = scroll.appendChild(headedTable(HEADS));
  table.id = "fuzzy";
  for (const pod of found.pods.slice(0, ROWS_MAX)) {
    const row = table.tBodies[0].insertRow();
    nameRow(row, pod.pod);
    addCell(row, pod.reusable_tokens, "number");
    addCell(row, `${(100 * pod.coverage).toFixed(1)} %`, "number");
    addCell(row, pod.mean_confidence.toFixed(3), "number");
  }
  if (found.pods.length > ROWS_MAX) {
    table.createCaption().textContent = `The first ${ROWS_MAX} of ${found.pods.length} pods.`;
  }
  return scroll;
}
