// Line charts: curves in bands, marks, crosshair, zoom by dragging or by keys, and a table of the same numbers.

import { duration, h, number, replace, s, whole } from "./dom.js";

const LEFT = 52, RIGHT = 12, TOP = 8, BOTTOM = 22;
const TABLE_ROWS = 24;
let serial = 0;

export function niceTicks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough) * power;
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) ticks.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  const first = Math.floor(low), last = Math.ceil(high);
  const stride = Math.max(1, Math.ceil((last - first) / 4));
  for (let power = first; power <= last; power += stride) if (power >= low - 1e-9 && power <= high + 1e-9) ticks.push(power);
  return ticks.length > 1 ? ticks : [low, (low + high) / 2, high];
}

function timeTicks(low, high, count) {
  const steps = [0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
  const step = steps.find((one) => (high - low) / one <= count) || 604800 * 4;
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) ticks.push(tick);
  return ticks;
}

const shortTime = (seconds) => duration(seconds).replace(" min 00 s", " min").replace(" h 00 min", " h").replace(" d 0 h", " d");

export function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

function pathOf(points) {
  let path = "", isDown = false;
  for (const [x, y] of points) {
    if (y === null) { isDown = false; continue; }
    path += `${isDown ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    isDown = true;
  }
  return path;
}

function bandOf(points) {
  // Pieces between gaps, each up along the high edge and back along the low one.
  const pieces = [];
  let piece = [];
  for (const point of points) {
    if (point[1] === null || point[2] === null) { if (piece.length) pieces.push(piece); piece = []; } else piece.push(point);
  }
  if (piece.length) pieces.push(piece);
  return pieces.map((one) => `${one.map(([x, , high], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${high.toFixed(1)}`).join("")}${one.reverse().map(([x, low]) => `L${x.toFixed(1)} ${low.toFixed(1)}`).join("")}Z`).join("");
}

/* A chart: {title, unit, isTime, series: [{label, colour, x, y, low, high}], marks: [{x, kind, words}], onZoom(first, last) or null}. */
export class LineChart {
  constructor(options = {}) {
    this.options = { height: 168, isLog: false, smoothing: 0, ...options };
    this.id = `chart-${++serial}`;
    this.cursor = null;
    this.title = h("h3", { id: `${this.id}-title` });
    this.value = h("p", { class: "chart-value" });
    this.svg = s("svg", { class: "plot", role: "slider", "aria-orientation": "horizontal", "aria-label": "Chart", "aria-valuenow": 0, "aria-valuetext": "no values", tabindex: 0, height: this.options.height });
    this.tip = h("div", { class: "tip", hidden: true });
    this.legend = h("ul", { class: "legend" });
    this.details = h("details", { class: "as-table", ontoggle: () => this.drawTable() }, h("summary", null, "Table"));
    this.tableBody = h("div", { class: "scroll" });
    this.details.append(this.tableBody);
    this.element = h("figure", { class: "chart", "aria-labelledby": `${this.id}-title` },
      h("figcaption", null, this.title, this.value), h("div", { class: "plot-box" }, this.svg, this.tip), this.legend, this.details);
    this.ended = new AbortController();
    this.listen();
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.svg);
  }

  leave() {
    this.ended.abort();
    this.observer.disconnect();
    this.element.remove();
  }

  update(content) {
    this.content = content;
    this.xs = [...new Set(content.series.flatMap((one) => one.x))].sort((a, b) => a - b);
    this.title.textContent = content.title;
    const newest = content.series.map((one) => one.y.filter((value) => value !== null).at(-1)).filter((value) => value !== undefined);
    this.value.textContent = newest.length === 1 ? `${number(newest[0])}${content.unit ? ` ${content.unit}` : ""}` : content.unit || "";
    replace(this.legend, content.series.length > 1 ? content.series.map((one) => h("li", { class: `c${one.colour}` }, one.label)) : []);
    this.draw();
    if (this.details.open) this.drawTable();
  }

  scales() {
    const { series } = this.content;
    const xs = series.flatMap((one) => (one.x.length ? [one.x[0], one.x.at(-1)] : []));
    let [first, last] = this.content.domain || (xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1]);
    if (!(last > first)) { first -= 0.5; last += 0.5; }
    let low = Infinity, high = -Infinity;
    const isLog = this.options.isLog;
    this.lines = series.map((one) => {
      const y = smooth(one.y, this.options.smoothing);
      const hasBand = one.low && !this.options.smoothing;
      for (const values of hasBand ? [one.low, one.high, y] : [y]) {
        values.forEach((value, place) => {
          if (value === null || one.x[place] < first || one.x[place] > last || (isLog && value <= 0)) return;
          if (value < low) low = value;
          if (value > high) high = value;
        });
      }
      return { ...one, shown: y, hasBand };
    });
    if (!(low <= high)) { low = isLog ? 0.1 : 0; high = 1; }
    if (isLog) { low = Math.log10(low); high = Math.log10(high); }
    if (this.content.fromZero && !isLog) low = Math.min(0, low);
    if (low === high) { const pad = Math.abs(low) * 0.1 || 0.5; low -= pad; high += pad; }
    const pad = (high - low) * 0.04;
    return { first, last, low: this.content.fromZero && low === 0 ? 0 : low - pad, high: high + pad, isLog };
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!this.content || !width) return;
    const height = this.options.height, { series } = this.content;
    const scale = this.scale = this.scales();
    const right = width - RIGHT, bottom = height - BOTTOM;
    const X = this.X = (x) => LEFT + ((x - scale.first) / (scale.last - scale.first)) * (right - LEFT);
    const level = (y) => (scale.isLog ? (y > 0 ? Math.log10(y) : null) : y);
    const Y = this.Y = (y) => { const at = y === null ? null : level(y); return at === null ? null : bottom - ((at - scale.low) / (scale.high - scale.low)) * (bottom - TOP); };
    const yTicks = scale.isLog ? logTicks(scale.low, scale.high) : niceTicks(scale.low, scale.high, 4);
    const count = Math.max(2, Math.floor((right - LEFT) / 90));
    const xTicks = this.content.isTime ? timeTicks(scale.first, scale.last, count) : niceTicks(scale.first, scale.last, count).filter((tick) => Number.isInteger(tick));
    const atTick = (tick) => bottom - ((tick - scale.low) / (scale.high - scale.low)) * (bottom - TOP);
    const clip = `${this.id}-clip`;
    const drawing = [
      s("defs", null, s("clipPath", { id: clip }, s("rect", { x: LEFT, y: 0, width: Math.max(0, right - LEFT), height: bottom + 1 }))),
      yTicks.map((tick) => s("g", null, s("line", { class: "grid", x1: LEFT, x2: right, y1: atTick(tick), y2: atTick(tick) }),
        s("text", { class: "tick end", x: LEFT - 8, y: atTick(tick) + 4 }, number(scale.isLog ? 10 ** tick : tick)))),
      xTicks.map((tick) => s("text", { class: `tick ${X(tick) > right - 20 ? "end" : X(tick) < LEFT + 20 ? "start" : "middle"}`, x: X(tick), y: height - 6 }, this.content.isTime ? shortTime(tick) : whole(tick))),
    ];
    const inner = s("g", { "clip-path": `url(#${clip})` });
    for (const mark of this.content.marks || []) {
      if (mark.x === null || mark.x < scale.first || mark.x > scale.last) continue;
      inner.append(s("g", { class: `mark ${mark.kind}` }, s("line", { x1: X(mark.x), x2: X(mark.x), y1: TOP, y2: bottom }),
        s("circle", { cx: X(mark.x), cy: TOP + 2, r: 3 }), s("title", null, `${mark.kind}: ${mark.words}`)));
    }
    for (const line of this.lines) {
      if (line.hasBand) inner.append(s("path", { class: `band c${line.colour}`, d: bandOf(line.x.map((x, i) => [X(x), Y(line.low[i]), Y(line.high[i])])) }));
    }
    for (const line of this.lines) {
      inner.append(s("path", { class: `line c${line.colour}`, d: pathOf(line.x.map((x, i) => [X(x), Y(line.shown[i])])) }));
      if (line.x.length === 1 && line.shown[0] !== null) inner.append(s("circle", { class: `dot c${line.colour}`, cx: X(line.x[0]), cy: Y(line.shown[0]) ?? -9, r: 3 }));
    }
    for (const point of this.content.points || []) {
      const line = this.lines[0];
      if (!line || point.x < scale.first || point.x > scale.last) continue;
      const y = Y(line.shown[nearest(line.x, point.x)] ?? null);
      if (y !== null) inner.append(s("circle", { class: `saved ${point.isBest ? "best" : ""}`, cx: X(point.x), cy: y, r: point.isBest ? 4 : 3 }, s("title", null, point.words)));
    }
    this.crosshair = s("line", { class: "crosshair", y1: TOP, y2: bottom, visibility: "hidden" });
    this.selection = s("rect", { class: "selection", y: TOP, height: bottom - TOP, width: 0, visibility: "hidden" });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("aria-label", this.summary());
    replace(this.svg, drawing, this.selection, inner, this.crosshair);
    if (!series.some((one) => one.x.length)) this.svg.append(s("text", { class: "tick middle", x: (LEFT + right) / 2, y: bottom / 2 }, this.content.isLoading ? "Loading…" : "No values"));
    this.svg.setAttribute("aria-valuemin", scale.first);
    this.svg.setAttribute("aria-valuemax", scale.last);
    if (this.cursor !== null) this.point(this.cursor);
    else this.speak(scale.last, `${this.content.series.length ? "" : "No values. "}Newest: ${this.value.textContent || "see the table"}`);
  }

  speak(value, text) {
    this.svg.setAttribute("aria-valuenow", value);
    this.svg.setAttribute("aria-valuetext", text);
  }

  summary() {
    const parts = this.lines.map((line) => {
      const known = line.y.filter((value) => value !== null);
      return known.length ? `${line.label || this.content.title}: from ${number(known[0])} to ${number(known.at(-1))}, lowest ${number(Math.min(...known))}, highest ${number(Math.max(...known))}` : `${line.label}: no values`;
    });
    const marks = (this.content.marks || []).length;
    return `${this.content.title}. ${parts.join(". ")}.${marks ? ` ${marks} marks.` : ""} Arrow keys move through the values${this.content.onZoom ? ", plus and minus zoom" : ""}.`;
  }

  // -------------------------------------------------------------- pointer and keys

  listen() {
    const where = (event) => event.clientX - this.svg.getBoundingClientRect().left;
    let from = null;
    this.svg.addEventListener("pointermove", (event) => {
      if (!this.scale) return;
      const x = where(event);
      if (from !== null && Math.abs(x - from) > 4) {
        this.selection.setAttribute("visibility", "visible");
        this.selection.setAttribute("x", Math.min(x, from));
        this.selection.setAttribute("width", Math.abs(x - from));
      }
      this.point(this.unX(x));
    });
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("pointerdown", (event) => { if (event.button === 0 && event.pointerType !== "touch" && this.content?.onZoom) { from = where(event); event.preventDefault(); this.svg.focus(); } });
    window.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const start = from, end = where(event);
      from = null;
      this.selection?.setAttribute("visibility", "hidden");
      if (Math.abs(end - start) > 4) this.content.onZoom(this.unX(Math.min(start, end)), this.unX(Math.max(start, end)));
    }, { signal: this.ended.signal });
    this.svg.addEventListener("dblclick", () => this.content?.onZoom?.(null, null));
    this.svg.addEventListener("keydown", (event) => this.onKey(event));
  }

  unX(pixel) {
    const right = this.svg.clientWidth - RIGHT;
    const share = Math.min(1, Math.max(0, (pixel - LEFT) / (right - LEFT)));
    return this.scale.first + share * (this.scale.last - this.scale.first);
  }

  onKey(event) {
    if (!this.scale || event.ctrlKey || event.metaKey || event.altKey) return;
    const { first, last } = this.scale, shown = this.xs.filter((x) => x >= first && x <= last);
    const middle = this.cursor ?? (first + last) / 2;
    const zoom = (factor) => this.content.onZoom?.(middle - ((middle - first) * factor), middle + ((last - middle) * factor));
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      if (!shown.length) return;
      const place = nearest(shown, middle) + (this.cursor === null ? 0 : event.key === "ArrowLeft" ? -1 : 1);
      this.point(shown[Math.min(shown.length - 1, Math.max(0, place))]);
    } else if (event.key === "Home" || event.key === "End") { if (shown.length) this.point(shown.at(event.key === "Home" ? 0 : -1)); } else if (event.key === "+" || event.key === "=") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "0" || event.key === "Escape") { this.point(null); this.content.onZoom?.(null, null); }
    else return;
    event.preventDefault();
  }

  // The place of a line's value at x; null before its first and after its last.
  placeAt(line, x) {
    const count = line.x.length, step = count > 1 ? (line.x[count - 1] - line.x[0]) / (count - 1) : 0;
    if (!count || x < line.x[0] - step || x > line.x[count - 1] + step) return null;
    return nearest(line.x, x);
  }

  point(x) {
    this.cursor = x;
    const isOn = x !== null && this.lines?.some((line) => line.x.length);
    this.tip.hidden = !isOn;
    this.crosshair?.setAttribute("visibility", isOn ? "visible" : "hidden");
    if (!isOn) return;
    const at = this.xs[nearest(this.xs, x)];
    const found = this.lines.filter((line) => line.x.length).map((line) => ({ line, place: this.placeAt(line, at) }));
    this.crosshair.setAttribute("x1", this.X(at));
    this.crosshair.setAttribute("x2", this.X(at));
    const where = this.content.isTime ? shortTime(at) : `row ${whole(at)}`;
    const values = found.map(({ line, place }) => ({ label: line.label, colour: line.colour, text: this.said(line, place) }));
    const near = (this.content.marks || []).filter((mark) => mark.x !== null && Math.abs(this.X(mark.x) - this.X(at)) < 6);
    replace(this.tip, h("p", { class: "tip-where" }, where),
      values.map((one) => h("p", { class: "tip-value" }, values.length > 1 ? h("span", { class: `key c${one.colour}` }, one.label) : null, h("span", { class: "num" }, one.text))),
      near.map((mark) => h("p", { class: `tip-mark ${mark.kind}` }, `${mark.kind}: ${mark.words}`)));
    const width = this.svg.clientWidth, left = this.X(at);
    this.tip.style.left = left > width / 2 ? "auto" : `${left + 12}px`;
    this.tip.style.right = left > width / 2 ? `${width - left + 12}px` : "auto";
    this.speak(at, `${where}: ${values.map((one) => `${values.length > 1 ? `${one.label} ` : ""}${one.text}`).join(", ")}${near.length ? `. ${near.map((mark) => `${mark.kind}: ${mark.words}`).join(". ")}` : ""}`);
  }

  said(line, place) {
    if (place === null) return "–";
    const unit = this.content.unit ? ` ${this.content.unit}` : "";
    const value = `${number(line.shown[place])}${unit}`;
    if (!line.low || line.low[place] === line.high[place]) return value;
    return `${value} (${number(line.low[place])} to ${number(line.high[place])})`;
  }

  drawTable() {
    if (!this.details.open || !this.content) { replace(this.tableBody); return; }
    const lines = this.lines?.length ? this.lines : [];
    const base = this.xs;
    const stride = Math.max(1, Math.ceil(base.length / TABLE_ROWS));
    const places = base.map((_, place) => place).filter((place) => place % stride === 0 || place === base.length - 1);
    replace(this.tableBody, h("table", null, h("caption", { class: "hidden" }, this.content.title),
      h("thead", null, h("tr", null, h("th", { scope: "col", class: "num" }, this.content.isTime ? "Time" : "Row"), lines.map((line) => h("th", { scope: "col", class: "num" }, line.label || this.content.title)))),
      h("tbody", null, places.map((place) => h("tr", null, h("th", { scope: "row", class: "num" }, this.content.isTime ? shortTime(base[place]) : whole(base[place])),
        lines.map((line) => { const at = this.placeAt(line, base[place]); return h("td", { class: "num" }, at === null ? "–" : number(line.y[at])); }))))));
  }
}

export function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1; else high = middle;
  }
  return low > 0 && value - sorted[low - 1] <= sorted[low] - value ? low - 1 : low;
}
