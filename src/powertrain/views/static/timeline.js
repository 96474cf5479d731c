// The steps of every rank over time: a row for each rank, in each pixel column the phases in colour.

import { duration, h, percent, redraw, replace, whole } from "./dom.js";

const LEFT = 64;
const NOTHING = 255;
// In the order in which they are explained: waiting stands apart from work.
export const WORDS = {
  outside: "Between steps", report: "Report and saving", input: "Waiting for data", h2d: "Copy to device", forward: "Forward",
  inside: "Rest of the step", backward: "Backward", collective: "Waiting for other ranks", optimizer: "Optimizer",
};

const colourOf = (name) => {
  const text = getComputedStyle(document.documentElement).getPropertyValue(`--phase-${name}`).trim();
  return [1, 3, 5].map((place) => parseInt(text.slice(place, place + 2), 16));
};

export class Timeline {
  constructor(onZoom) {
    this.onZoom = onZoom;
    this.canvas = h("canvas", { tabindex: 0, role: "application", "aria-roledescription": "step timeline" });
    this.labels = h("div", { class: "rank-labels", "aria-hidden": "true" });
    this.axis = h("div", { class: "time-axis", "aria-hidden": "true" });
    this.marks = h("div", { class: "time-marks" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.legend = h("ul", { class: "legend phases" });
    this.details = h("details", { class: "as-table" }, h("summary", null, "Table"));
    this.live = h("p", { class: "hidden", "aria-live": "polite" });
    this.note = h("p", { class: "faint" });
    this.box = h("div", { class: "timeline-box" }, this.labels, h("div", { class: "timeline-plot" }, this.canvas, this.marks, this.tip), h("span"), this.axis);
    this.element = h("figure", { class: "chart wide", "aria-label": "Steps of ranks" }, this.legend, this.box, this.note, this.live, this.details);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
    this.ended = new AbortController();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw(), { signal: this.ended.signal });
    this.listen();
  }

  leave() {
    this.ended.abort();
    this.observer.disconnect();
  }

  update(content, began, marks) {
    const before = this.content;
    this.content = content;
    this.began = began;
    this.allMarks = marks;
    if (content) {
      const binary = atob(content.cells);
      this.cells = Uint8Array.from(binary, (character) => character.charCodeAt(0));
    }
    this.draw();
    this.drawTable();
    if (this.isZooming && content && (before?.begin !== content.begin || before?.end !== content.end)) {
      this.live.textContent = `From ${duration(content.begin - began)} to ${duration(content.end - began)}.`;
      this.isZooming = false;
    }
  }

  rowHeight() {
    const rows = this.content.rows.length;
    return rows <= 4 ? 34 : rows <= 12 ? 24 : rows <= 24 ? 16 : rows <= 64 ? 8 : 4;
  }

  draw() {
    if (!this.content || !this.content.rows.length) return;
    const { columns, rows, phases, kind } = this.content;
    const height = this.rowHeight(), gap = height >= 8 ? 2 : height > 4 ? 1 : 0, count = phases.length;
    this.canvas.width = columns;
    this.canvas.height = rows.length * height;
    const context = this.canvas.getContext("2d");
    const image = context.createImageData(columns, rows.length * height);
    const colours = phases.map(colourOf);
    const paint = (x, y, colour) => { const at = (y * columns + x) * 4; image.data[at] = colour[0]; image.data[at + 1] = colour[1]; image.data[at + 2] = colour[2]; image.data[at + 3] = 255; };
    rows.forEach((_, row) => {
      const top = row * height, inner = height - gap;
      for (let x = 0; x < columns; x += 1) {
        if (kind === "longest") {
          const phase = this.cells[row * columns + x];
          if (phase !== NOTHING) for (let y = 0; y < inner; y += 1) paint(x, top + y, colours[phase]);
          continue;
        }
        let reached = 0, y = 0;
        for (let phase = 0; phase < count; phase += 1) {
          reached += this.cells[(row * columns + x) * count + phase] / 255;
          const until = Math.min(inner, Math.round(reached * inner));
          for (; y < until; y += 1) paint(x, top + y, colours[phase]);
        }
      }
    });
    context.putImageData(image, 0, 0);
    this.canvas.style.height = `${rows.length * height}px`;
    this.drawAround(height);
  }

  drawAround(height) {
    const { rows, phases, begin, end } = this.content;
    const every = height >= 16 ? 1 : Math.ceil(16 / height);
    this.labels.style.gridTemplateRows = `repeat(${rows.length}, ${height}px)`;
    replace(this.labels, rows.map((row, place) => h("span", null, place % every ? "" : row.first === row.last ? `rank ${row.rank}` : `${row.first}–${row.last}`)));
    const seconds = end - begin;
    replace(this.axis, [0, 0.25, 0.5, 0.75, 1].map((share) => h("span", null, duration(begin - this.began + share * seconds))));
    replace(this.marks, (this.allMarks || []).filter((mark) => mark.time >= begin && mark.time <= end).map((mark) => {
      const line = h("span", { class: `time-mark ${mark.kind}`, title: `${mark.kind}: ${mark.words}` });
      line.style.left = `${((mark.time - begin) / seconds) * 100}%`;
      return line;
    }));
    const used = phases.map((name, place) => ({ name, place })).filter(({ place }) => this.isUsed(place));
    replace(this.legend, used.map(({ name }) => h("li", { class: `phase-${name}` }, WORDS[name] || name)));
    this.note.textContent = [
      rows.length < this.content.ranks ? `${whole(this.content.ranks)} ranks in ${rows.length} rows: each shows the rank of its group that works longest.` : "",
      this.content.is_thinned ? "Older steps were thinned: shares are those of the recorded steps." : "",
    ].join(" ").trim();
    this.canvas.setAttribute("aria-label", `Step timeline of ${whole(this.content.ranks)} ranks over ${duration(seconds)}. Arrow keys left and right move through the time, up and down through the ranks, plus and minus zoom, 0 shows all. The table below has step times and phases of all rows.`);
  }

  isUsed(phase) {
    const { kind, phases } = this.content;
    if (kind === "longest") return this.cells.includes(phase);
    for (let at = phase; at < this.cells.length; at += phases.length) if (this.cells[at] > 2) return true;
    return false;
  }

  drawTable() {
    if (!this.content) return;
    const { rows, steps, phases } = this.content;
    const used = phases.map((name, place) => ({ name, place })).filter(({ place }) => steps.some((one) => one.shares[place] > 0));
    redraw(this.details, h("summary", null, "Table"), h("div", { class: "scroll" }, h("table", null, h("caption", { class: "hidden" }, "Step times of ranks"),
      h("thead", null, h("tr", null, ["Rank", "Steps", "Median step", "Longest step", ...used.map(({ name }) => WORDS[name] || name)].map((title, place) => h("th", { scope: "col", class: place ? "num" : "" }, title)))),
      h("tbody", null, rows.map((row, place) => h("tr", null, h("th", { scope: "row" }, `rank ${row.rank}`), h("td", { class: "num" }, whole(steps[place].count)),
        h("td", { class: "num" }, steps[place].median === null ? "–" : duration(steps[place].median)), h("td", { class: "num" }, steps[place].longest === null ? "–" : duration(steps[place].longest)), used.map((phase) => h("td", { class: "num" }, percent(steps[place].shares[phase.place])))))))));
  }

  listen() {
    const shareAt = (event) => { const box = this.canvas.getBoundingClientRect(); return [Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)), (event.clientY - box.top) / box.height]; };
    let from = null;
    this.canvas.addEventListener("pointerdown", (event) => { if (event.button === 0 && event.pointerType !== "touch") from = shareAt(event)[0]; });
    window.addEventListener("pointerup", (event) => {
      if (from === null || !this.content) return;
      const until = shareAt(event)[0], { begin, end } = this.content;
      const [low, high] = [Math.min(from, until), Math.max(from, until)];
      from = null;
      if (high - low > 0.01) this.onZoom(begin + low * (end - begin), begin + high * (end - begin));
    }, { signal: this.ended.signal });
    this.canvas.addEventListener("dblclick", () => this.onZoom(null, null));
    this.canvas.addEventListener("keydown", (event) => {
      if (!this.content || event.ctrlKey || event.metaKey) return;
      const { begin, end } = this.content, middle = (begin + end) / 2, half = (end - begin) / 2;
      const moves = { "+": [0.5, 0], "=": [0.5, 0], "-": [2, 0], ArrowLeft: [1, -0.5], ArrowRight: [1, 0.5] };
      if (event.key === "ArrowUp" || event.key === "ArrowDown") this.speakRow(event.key === "ArrowUp" ? -1 : 1);
      else if (event.key === "0" || event.key === "Escape") { this.isZooming = true; this.onZoom(null, null); }
      else if (moves[event.key]) { this.isZooming = true; const [factor, shift] = moves[event.key]; this.onZoom(middle + shift * half - half * factor, middle + shift * half + half * factor); } else return;
      event.preventDefault();
    });
    this.canvas.addEventListener("pointermove", (event) => this.point(...shareAt(event)));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
  }

  speakRow(step) {
    const { rows, steps, phases } = this.content;
    this.row = Math.min(rows.length - 1, Math.max(0, (this.row ?? -step) + step));
    const row = rows[this.row], one = steps[this.row];
    const parts = phases.map((name, place) => [WORDS[name] || name, one.shares[place]]).filter(([, share]) => share > 0.01).sort((a, b) => b[1] - a[1]).map(([words, share]) => `${words} ${percent(share)}`);
    this.live.textContent = `Rank ${row.rank}: ${whole(one.count)} steps${one.median === null ? "" : `, median ${duration(one.median)}`}. ${parts.join(", ")}.`;
    this.point(0.5, (this.row + 0.5) / rows.length);
  }

  point(x, y) {
    if (!this.content?.rows.length) return;
    const { columns, rows, phases, kind, begin, end } = this.content;
    const column = Math.min(columns - 1, Math.floor(x * columns)), row = Math.min(rows.length - 1, Math.max(0, Math.floor(y * rows.length)));
    const parts = kind === "longest" ? [[phases[this.cells[row * columns + column]], 255]].filter(([name]) => name)
      : phases.map((name, place) => [name, this.cells[(row * columns + column) * phases.length + place]]).filter(([, share]) => share > 5).sort((a, b) => b[1] - a[1]);
    this.tip.hidden = false;
    replace(this.tip, h("p", { class: "tip-where" }, `rank ${rows[row].rank}, ${duration(begin - this.began + ((column + 0.5) / columns) * (end - begin))}`),
      parts.length ? parts.map(([name, share]) => h("p", { class: "tip-value" }, h("span", { class: `key phase-${name}` }, WORDS[name]), kind === "longest" ? "" : h("span", { class: "num" }, `${Math.round(share / 2.55)} %`))) : h("p", null, "No step recorded"));
    this.tip.style.left = x > 0.5 ? "auto" : `${x * 100}%`;
    this.tip.style.right = x > 0.5 ? `${(1 - x) * 100}%` : "auto";
  }
}
