// Small line charts of what was polled since the page was opened.

const POINTS_MAX = 150; // five minutes at one poll every two seconds
const POINTS_MIN = 30; // a young chart is not stretched further than this
const NAMESPACE = "http://www.w3.org/2000/svg";

export class Chart {
  constructor(parent, title, format) {
    this.values = [];
    this.format = format;
    const figure = parent.appendChild(document.createElement("figure"));
    const caption = figure.appendChild(document.createElement("figcaption"));
    caption.append(title);
    this.latest = caption.appendChild(document.createElement("span"));
    const svg = figure.appendChild(document.createElementNS(NAMESPACE, "svg"));
    this.svg = svg;
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `${title} over the last five minutes`);
    this.path = svg.appendChild(document.createElementNS(NAMESPACE, "path"));
  }

  add(value) {
    this.values.push(value);
    if (this.values.length > POINTS_MAX) this.values.shift();
    const known = this.values.filter((item) => item !== null);
    this.latest.textContent = value === null ? "–" : this.format(value);
    if (known.length === 0) return;
    const top = Math.max(...known) || 1;
    const width = Math.max(POINTS_MIN, this.values.length);
    const offset = width - this.values.length;
    this.svg.setAttribute("viewBox", `0 0 ${width - 1} 100`);
    let line = "";
    this.values.forEach((item, i) => {
      if (item === null) return;
      line += `${line ? "L" : "M"}${offset + i} ${98 - (item / top) * 94}`;
    });
    this.path.setAttribute("d", line);
  }
}

// Quantile of a Prometheus histogram between two scrapes, in the unit of its buckets; null when nothing happened.
export function quantile(before, after, q) {
  const bounds = [...after.keys()].sort((a, b) => a - b);
  const counts = bounds.map((bound) => after.get(bound) - (before.get(bound) ?? 0));
  const total = counts.at(-1);
  if (!total) return null;
  const index = counts.findIndex((count) => count >= q * total);
  return Number.isFinite(bounds[index]) ? bounds[index] : bounds[index - 1];
}

// Buckets of `name` whose labels fit `labels`, summed over all other labels: upper bound -> count.
export function buckets(text, name, labels) {
  const found = new Map();
  for (const line of text.split("\n")) {
    if (!line.startsWith(`${name}_bucket{`) || !labels.test(line)) continue;
    const bound = /le="([^"]+)"/.exec(line)[1];
    const upper = bound === "+Inf" ? Infinity : Number(bound);
    found.set(upper, (found.get(upper) ?? 0) + Number(line.slice(line.lastIndexOf(" ") + 1)));
  }
  return found;
}
