// A prompt in, and for every pod block by block what it holds.

import * as api from "./api.js";

const CELLS_MAX = 512; // blocks drawn; a longer prompt says how many it leaves out
const TIERS = ["gpu", "cpu", "disk", "external"];

const form = document.getElementById("try");
const answer = document.getElementById("answer");
const fault = document.getElementById("try-error");
const models = document.getElementById("models");

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
    fault.hidden = true;
    try {
      show(await api.post("v1/match", query()));
    } catch (error) {
      answer.replaceChildren();
      fault.textContent = error.name === "TimeoutError" || error instanceof TypeError ? "The indexer does not answer." : error.message;
      fault.hidden = false;
    }
  });
}

function query() {
  const fields = new FormData(form);
  const body = { model: fields.get("model") };
  for (const name of ["lora", "cache_salt"]) if (fields.get(name)) body[name] = fields.get(name);
  if (fields.get("kind") === "text") return { ...body, text: fields.get("prompt") };
  const words = fields.get("prompt").replace(/[[\],]/g, " ").trim().split(/\s+/);
  const tokens = words.map((word) => {
    if (!/^\d+$/.test(word)) throw new api.Problem(`“${word}” is not a token id: ids are whole numbers`);
    return Number(word);
  });
  return { ...body, token_ids: tokens };
}

function show(result) {
  const parts = [];
  const line = document.createElement("p");
  line.textContent =
    `${result.tokens} tokens, ${result.blocks} full blocks of ${result.block_size}: ` +
    (result.matches.length ? `${result.matches.length} sources hold the beginning.` : "nobody holds the first block.");
  parts.push(line);
  if (result.matches.length) parts.push(legend(), grid(result));
  answer.replaceChildren(...parts);
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
  const scroll = document.createElement("div");
  scroll.className = "grid";
  const table = scroll.appendChild(document.createElement("table"));
  const drawn = Math.min(result.blocks, CELLS_MAX);
  for (const match of result.matches) {
    const row = table.appendChild(document.createElement("tr"));
    row.appendChild(document.createElement("th")).textContent = `${match.pod} / ${match.dp_rank}`;
    const state = row.appendChild(document.createElement("td"));
    state.textContent = match.state.replace("_", " ");
    state.className = "state";
    state.dataset.state = match.state;
    row.appendChild(document.createElement("td")).textContent =
      `${match.matched_blocks} blocks, ${match.percent.toFixed(1)} %, ${match.reusable_tokens} tokens reusable`;
    const cells = row.appendChild(document.createElement("td")).appendChild(document.createElement("span"));
    cells.className = "cells";
    cells.setAttribute("role", "img");
    cells.setAttribute("aria-label", TIERS.map((tier) => `${tier} to block ${match.tiers[tier] ?? 0}`).join(", "));
    for (let block = 0; block < drawn; block++) {
      const cell = cells.appendChild(document.createElement("i"));
      const tier = TIERS.find((name) => block < (match.tiers[name] ?? 0));
      if (tier) cell.dataset.tier = tier;
      else if (block < match.speculative_blocks) cell.dataset.tier = "expected";
      cell.title = `block ${block}: ${tier ?? (cell.dataset.tier ? "announced" : "not held")}`;
    }
    if (result.blocks > drawn) cells.after(` and ${result.blocks - drawn} more`);
  }
  return scroll;
}
