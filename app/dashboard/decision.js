// Where a prompt would go and why: every candidate with its score. Asked as a dry run, so that looking changes nothing.

import { said } from "./api.js";
import { addCell, addState, frame, headedTable, nameRow } from "./tables.js";

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const HEADS = [["Pod / rank"], ["Score", "number"], ["Blocks", "number"], ["Load"], ["State"], ["Why"]];

export function decision(outcome) {
  const line = document.createElement("p");
  if (outcome.status === "rejected") {
    line.textContent = said(outcome.reason);
    return [line];
  }
  const choice = outcome.value;
  const chosen = line.appendChild(document.createElement("strong"));
  chosen.textContent = `${choice.pod} / ${choice.dp_rank}`;
  line.append(` by ${choice.policy}, score ${choice.score.toFixed(3)}: ${choice.candidates[0].reason}.`);
  return [line, table(choice)];
}

function table(choice) {
  const scroll = frame("Candidates");
  const made = scroll.appendChild(headedTable(HEADS));
  made.id = "candidates";
  for (const candidate of choice.candidates) {
    const row = made.tBodies[0].insertRow();
    if (candidate.pod === choice.pod && candidate.dp_rank === choice.dp_rank) row.className = "chosen";
    nameRow(row, `${candidate.pod} / ${candidate.dp_rank}`);
    addCell(row, candidate.score.toFixed(3), "number");
    addCell(row, blocks(candidate), "number");
    addCell(row, load(candidate));
    if (candidate.state) addState(row, candidate.state);
    else addCell(row, "not registered", "state");
    addCell(row, candidate.reason);
  }
  return scroll;
}

function blocks(candidate) {
  const announced = candidate.speculative_blocks - candidate.matched_blocks;
  return announced > 0 ? `${candidate.matched_blocks} + ${announced} announced` : String(candidate.matched_blocks);
}

function load(candidate) {
  const own = candidate.own_requests > 0.05 ? `${number.format(candidate.own_requests)} sent by us lately` : "";
  if (!candidate.load) return own || "not known";
  const { running, waiting, kv_usage: usage } = candidate.load;
  const told = `${number.format(running)} running, ${number.format(waiting)} waiting, ${Math.round(100 * usage)} % of KV`;
  return own ? `${told}, ${own}` : told;
}
