// Where a prompt would go and why: every candidate with its score. Asked as a dry run, so that looking changes nothing.

import { said } from "./api.js";

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
  const scroll = document.createElement("div");
  scroll.className = "scroll";
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", "Candidates");
  const made = scroll.appendChild(document.createElement("table"));
  made.id = "candidates";
  const head = made.createTHead().insertRow();
  for (const [title, kind] of HEADS) {
    const cell = head.appendChild(document.createElement("th"));
    cell.scope = "col";
    cell.textContent = title;
    if (kind) cell.className = kind;
  }
  const body = made.createTBody();
  for (const candidate of choice.candidates) {
    const row = body.insertRow();
    if (candidate.pod === choice.pod && candidate.dp_rank === choice.dp_rank) row.className = "chosen";
    const name = row.appendChild(document.createElement("th"));
    name.scope = "row";
    name.textContent = `${candidate.pod} / ${candidate.dp_rank}`;
    add(row, candidate.score.toFixed(3), "number");
    add(row, blocks(candidate), "number");
    add(row, load(candidate));
    const state = add(row, (candidate.state ?? "not registered").replace("_", " "), "state");
    if (candidate.state) state.dataset.state = candidate.state;
    add(row, candidate.reason);
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

function add(row, text, kind = "") {
  const cell = row.insertCell();
  cell.textContent = text;
  cell.className = kind;
  return cell;
}
