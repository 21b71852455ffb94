// What tables of answers are made of. One too wide for the page scrolls in a frame, which has a name and takes the focus.

export function frame(label) {
  const made = document.createElement("div");
  made.className = "scroll";
  made.tabIndex = 0;
  made.setAttribute("role", "region");
  made.setAttribute("aria-label", label);
  return made;
}

// `heads`: [title, class of the cells below it].
export function headedTable(heads) {
  const made = document.createElement("table");
  const row = made.createTHead().insertRow();
  for (const [title, kind] of heads) {
    const cell = row.appendChild(document.createElement("th"));
    cell.scope = "col";
    cell.textContent = title;
    if (kind) cell.className = kind;
  }
  made.createTBody();
  return made;
}

export function nameRow(row, name) {
  const cell = row.appendChild(document.createElement("th"));
  cell.scope = "row";
  cell.textContent = name;
}

export function addCell(row, text, kind = "") {
  const cell = row.insertCell();
  cell.textContent = text;
  if (kind) cell.className = kind;
  return cell;
}

export function addState(row, state) {
  addCell(row, state.replace("_", " "), "state").dataset.state = state;
}
