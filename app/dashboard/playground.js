// A prompt in, and out: for every pod block by block what it holds, where a router would send it, and what is held elsewhere.

import * as api from "./api.js";
import { decision } from "./decision.js";
import { fuzzyHits } from "./fuzzy.js";
import { addCell, addState, frame, nameRow } from "./tables.js";

const CELLS_MAX = 512; // blocks drawn; a longer prompt says how many it leaves out
const ROWS_MAX = 64; // sources drawn
const SLIDING_TOKENS_MAX = 8192; // beyond, places off the block grid are not asked for: it would hold the indexer
const CHARS_A_TOKEN = 4; // of text, roughly
const TIERS = ["gpu", "cpu", "disk", "external"];

const form = document.getElementById("try");
const answer = document.getElementById("answer");
const fault = document.getElementById("try-error");
const models = document.getElementById("models");
let asked = 0;

export function offerModels(names) {
  const unique = [...new Set(names)].sort();
  if ([...models.children].map((option) => option.value).join() === unique.join()) return;
  models.replaceChildren(...unique.map((name) => Object.assign(document.createElement("option"), { value: name })));
  const field = form.elements.model;
  if (!field.value && unique.length === 1) field.value = unique[0];
}

export function listenToForm() {
  form.addEventListener("submit", async (submitted) => {
    submitted.preventDefault();
    const turn = ++asked;
    fault.hidden = true;
    answer.setAttribute("aria-busy", "true");
    const [match, route, fuzzy] = await ask();
    if (turn !== asked) return; // a later prompt was sent meanwhile
    answer.setAttribute("aria-busy", "false");
    if (match.status === "rejected") {
      answer.replaceChildren();
      fault.textContent = api.said(match.reason);
      fault.hidden = false;
      return;
    }
    answer.replaceChildren(
      part("Who holds its beginning", held(match.value)),
      part("Where a router would send it", decision(route)),
      part("What is held anywhere", fuzzyHits(fuzzy, match.value)),
    );
  });
}

// The outcomes of a match, a choice and a fuzzy match; of a prompt that cannot be read, of the first only.
async function ask() {
  let asking;
  try {
    asking = query();
  } catch (reason) {
    return [{ status: "rejected", reason }];
  }
  const { prompt, size } = asking;
  const { cache_salt: _salt, ...unsalted } = prompt; // a fuzzy match knows blocks by content, salted or not
  return Promise.allSettled([
    api.post("v1/match", prompt),
    api.post("v1/route", { ...prompt, policy: form.elements.policy.value, dry_run: true }),
    api.post("v1/fuzzy-match", { ...unsalted, mode: size <= SLIDING_TOKENS_MAX ? "sliding" : "grid" }),
  ]);
}

function query() {
  const fields = new FormData(form);
  const prompt = { model: fields.get("model") };
  for (const name of ["lora", "cache_salt"]) if (fields.get(name)) prompt[name] = fields.get(name);
  const written = fields.get("prompt");
  if (fields.get("kind") === "text") return { prompt: { ...prompt, text: written }, size: written.length / CHARS_A_TOKEN };
  const words = written.replace(/[[\],]/g, " ").trim().split(/\s+/);
  const tokens = words.map((word) => {
    if (!/^\d+$/.test(word)) throw new api.Problem(`“${word}” is not a token id: ids are whole numbers`);
    return Number(word);
  });
  return { prompt: { ...prompt, token_ids: tokens }, size: tokens.length };
}

function part(title, content) {
  const made = document.createElement("section");
  made.className = "part";
  made.appendChild(document.createElement("h3")).textContent = title;
  made.append(...content);
  return made;
}

function held(result) {
  const line = document.createElement("p");
  const left = result.matches.length - ROWS_MAX;
  line.textContent =
    `${result.tokens} tokens, ${result.blocks} full blocks of ${result.block_size}: ` +
    (result.matches.length ? `${result.matches.length} sources hold the beginning` : "nobody holds the first block") +
    (left > 0 ? `, the best ${ROWS_MAX} are drawn.` : ".");
  return result.matches.length ? [line, legend(), grid(result)] : [line];
}

function legend() {
  const made = document.createElement("p");
  made.className = "legend";
  for (const tier of [...TIERS, "expected"]) {
    const item = made.appendChild(document.createElement("span"));
    item.appendChild(document.createElement("i")).dataset.tier = tier;
    item.append(tier === "expected" ? "announced by a router" : tier);
  }
  return made;
}

function grid(result) {
  const scroll = frame("Blocks by source");
  scroll.classList.add("grid");
  const table = scroll.appendChild(document.createElement("table"));
  const drawn = Math.min(result.blocks, CELLS_MAX);
  for (const match of result.matches.slice(0, ROWS_MAX)) {
    const row = table.appendChild(document.createElement("tr"));
    nameRow(row, `${match.pod} / ${match.dp_rank}`);
    addState(row, match.state);
    const cells = addCell(row, "").appendChild(document.createElement("span"));
    cells.className = "cells";
    cells.setAttribute("role", "img");
    cells.setAttribute("aria-label", TIERS.map((tier) => `${tier} to block ${match.tiers[tier] ?? 0}`).join(", "));
    for (let block = 0; block < drawn; block++) {
      const cell = cells.appendChild(document.createElement("i"));
      const tier = TIERS.find((candidate) => block < (match.tiers[candidate] ?? 0));
      if (tier) cell.dataset.tier = tier;
      else if (block < match.speculative_blocks) cell.dataset.tier = "expected";
      cell.title = `block ${block}: ${tier ?? (cell.dataset.tier ? "announced" : "not held")}`;
    }
    if (result.blocks > drawn) cells.after(` and ${result.blocks - drawn} more`);
    addCell(row, `${match.matched_blocks} blocks, ${match.percent.toFixed(1)} %, ${match.reusable_tokens} tokens reusable`);
  }
  return scroll;
}
