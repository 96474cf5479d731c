// The page of one run; other runs can be drawn over it.

import { decodeURIComponentSafely } from "./addresses.js";
import { LineChart } from "./chart.js";
import { age, attempt, clockTime, duration, fetchJson, follow, h, isReport, newest, now, number, percent, plural, postJson, redraw, replace, size, stateBadge, table, whole } from "./dom.js";
import { Logs } from "./logs.js";
import { Timeline, WORDS } from "./timeline.js";

const CHARTS_AT_FIRST = 12;
// Ranks that are offered by name; others are typed in.
const RANKS_OFFERED = 64;
// Seconds between two looks at logs, which grow without a change of the run, and at a run of another machine.
const LOG_INTERVAL_S = 3, SILENCE_INTERVAL_S = 60;
const SECTIONS = [["overview", "Overview"], ["metrics", "Metrics"], ["steps", "Steps"], ["resources", "Resources"], ["checkpoints", "Checkpoints"], ["events", "Events"], ["logs", "Logs"]];

const section = (id, title, ...children) => h("section", { id, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, title), children);

// Times of rows, from the reports of rank 0: charts over time place rows by them, and events are placed at rows.
function interpolate(xs, ys, x) {
  if (!xs.length) return null;
  if (x <= xs[0]) return ys[0];
  let low = 0, high = xs.length - 1;
  if (x >= xs[high]) return ys[high];
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] <= x) low = middle; else high = middle; }
  return ys[low] + ((x - xs[low]) / (xs[high] - xs[low] || 1)) * (ys[high] - ys[low]);
}

export function runPage(main, id) {
  const others = isReport() ? [] : new URLSearchParams(location.search).getAll("with");
  const view = { page: null, lines: new Map(), axis: "row", rank: "0", isLog: false, smoothing: 0, zoom: null, window: null, shown: CHARTS_AT_FIRST, turn: 0, times: new Map() };
  const charts = new Map(), resourceCharts = new Map();
  const answer = h("p", { class: "answer", role: "status" });
  const stacks = h("div");
  const header = h("header", { class: "run-head" });
  const parts = Object.fromEntries(SECTIONS.map(([name]) => [name, h("div", { class: "body" })]));
  const logs = new Logs(id);
  const timeline = new Timeline((begin, end) => { view.window = begin === null ? null : [begin, end]; attempt(loadSteps()); });
  const metricTools = h("div", { class: "tools" });
  const grid = h("div", { class: "charts" });
  const more = h("button", { type: "button", class: "button", hidden: true, onclick: () => { view.shown = Infinity; more.hidden = true; drawLines(); } });
  parts.metrics.append(metricTools, grid, more);
  parts.logs.append(logs.element);
  replace(main, header, answer, stacks, h("nav", { class: "sections", "aria-label": "Sections" }, h("ul", null, SECTIONS.map(([name, title]) => h("li", null, h("a", { href: `#${name}` }, title))))),
    SECTIONS.map(([name, title]) => section(name, title, parts[name])));

  // ---------------------------------------------------------------- head and overview

  const isOver = () => ["finished", "failed", "stopped", "preempted", "interrupted"].includes(view.page.state);

  function drawHead() {
    const page = view.page;
    document.title = `${page.name} · Powertrain`;
    const facts = [
      ["Rows", page.progress ? `${whole(page.rows)} of ${whole(page.progress.rows)} (${percent(page.progress.share)})` : whole(page.rows)], ["Workers", String(page.world_size)], ["Attempts", String(page.attempts)], ["Duration", duration(isOver() || page.silent_since ? page.seconds : now() - page.started)],
      ["Started", !page.started ? "–" : isReport() ? clockTime(page.started) : `${age(now() - page.started)} ago`], ["Engine", page.engine || "–"], ["Host", page.host || "–"],
    ];
    if (page.stands?.data) facts.push(["Data", page.stands.data]);
    const speed = page.diagnosis?.throughput;
    if (speed?.samples || speed?.steps) facts.push(["Rate", speed.samples ? `${number(speed.samples)} samples/s` : `${number(speed.steps)} steps/s`]);
    const top = (page.diagnosis?.findings || []).find((one) => one.severity !== "info");
    const buttons = page.can_control && page.is_live ? h("div", { class: "tools" }, h("button", { type: "button", class: "button", onclick: stop }, "Stop"), h("button", { type: "button", class: "button", onclick: resize }, "Resize"), h("button", { type: "button", class: "button", onclick: showStacks }, "Stacks")) : null;
    redraw(header, h("div", { class: "head" }, h("div", null, h("h1", null, page.name, " ", stateBadge(page.state)), page.reason ? h("p", { class: "reason" }, page.reason) : null, page.silent_since ? h("p", { class: "reason" }, `Not heard of since ${clockTime(page.silent_since)}, ${age(now() - page.silent_since)} ago. Its machine may be gone.`) : null, h("p", { class: "path" }, page.path)), buttons),
      top ? h("p", { class: `top-finding ${top.severity}` }, h("a", { href: "#overview" }, top.summary)) : null,
      h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))));
  }

  async function send(content) {
    answer.textContent = "Sending…";
    try { answer.textContent = (await postJson("/api/control", { run: id }, content)).message; } catch (error) { answer.textContent = error.message; }
  }
  async function showStacks() {
    answer.textContent = "Asking the ranks…";
    try {
      const found = await postJson("/api/control", { run: id }, { action: "stacks" });
      answer.textContent = found.message || `Stacks at ${clockTime(now())}`;
      replace(stacks, h("pre", { class: "log stacks", tabindex: 0, "aria-label": "Stacks of ranks" }, found.text), h("button", { type: "button", class: "quiet", onclick: () => replace(stacks) }, "Close"));
    } catch (error) { answer.textContent = error.message; }
  }
  const stop = () => { if (confirm(`Stop ${view.page.name} at its next boundary?`)) send({ action: "stop" }); };
  const resize = () => { const workers = Number(prompt("New number of workers", String(view.page.world_size))); if (Number.isInteger(workers) && workers > 0) send({ action: "resize", workers }); };

  function finding(one) {
    return h("li", { class: `finding ${one.severity}` }, h("p", { class: "finding-title" }, h("span", { class: "severity" }, one.severity), one.summary),
      one.action ? h("p", null, one.action) : null,
      one.evidence.length ? h("details", { "data-key": `${one.kind} ${one.ranks}` }, h("summary", { "data-key": `${one.kind} ${one.ranks}` }, "Evidence"), h("dl", { class: "evidence" }, one.evidence.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))))) : null);
  }

  function goodput(page) {
    if (!page.goodput.length) return null;
    const bar = h("div", { class: "stack", role: "img", "aria-label": page.goodput.map((one) => `${one.words} ${percent(one.share)}`).join(", ") }, page.goodput.map((one) => {
      const part = h("span", { class: `cause-${one.cause}`, title: `${one.words}: ${duration(one.seconds)}` });
      part.style.width = `${one.share * 100}%`;
      return part;
    }));
    return h("div", { class: "panel" }, h("h3", null, "Where the time went"), bar, h("ul", { class: "stack-legend" }, page.goodput.map((one) => h("li", null, h("span", { class: `key cause-${one.cause}` }, one.words), h("span", { class: "num" }, duration(one.seconds)), h("span", { class: "num muted" }, percent(one.share))))));
  }

  // Runs report hundreds of metrics, and the charts come below this list.
  const LAST_SHOWN = 12;

  function lastMetrics(last) {
    const list = (some) => h("dl", { class: "pairs" }, some.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))));
    if (last.length <= LAST_SHOWN + 1) return list(last);
    const more = h("summary", { "data-key": "last metrics" }, `${last.length - LAST_SHOWN} more`);
    return h("div", null, list(last.slice(0, LAST_SHOWN)), h("details", { "data-key": "last metrics" }, more, list(last.slice(LAST_SHOWN))));
  }

  function drawOverview() {
    const page = view.page, found = page.diagnosis?.findings || [], stands = page.stands;
    const status = stands ? h("p", { class: "now" }, stands.row_age >= 0 ? `Row ${whole(stands.row)}, ${age(stands.row_age)} ago.` : "No row yet.",
      stands.awaited.length ? ` Waiting for ranks ${stands.awaited.slice(0, 8).join(", ")}.` : "", stands.uploads ? ` ${plural(stands.uploads, "checkpoint")} uploading (${size(stands.upload_bytes)}, since ${duration(stands.upload_age)}).` : "") : null;
    const phases = page.diagnosis?.phases || [];
    redraw(parts.overview, status,
      (page.left_out || []).map((words) => h("p", { class: "faint" }, words)),
      Object.entries(page.unread).map(([what, why]) => h("p", { class: "unread" }, `The ${what} cannot be read: ${why}`)),
      h("div", { class: "overview" },
        h("div", { class: "panel" }, h("h3", null, "Findings"), found.length ? h("ul", { class: "findings" }, found.map(finding)) : h("p", { class: "muted" }, page.diagnosis ? "Nothing holds this run up." : "No steps were recorded yet.")),
        h("div", { class: "side" }, goodput(page),
        h("div", { class: "panel" }, h("h3", null, "Last metrics"), page.last.length ? lastMetrics(page.last) : h("p", { class: "muted" }, "Rank 0 has not reported yet.")),
        phases.length ? h("div", { class: "panel" }, h("h3", null, `A step: ${duration(page.diagnosis.step_seconds)}`), h("dl", { class: "pairs" }, phases.map((one) => h("div", null, h("dt", null, h("span", { class: `key phase-${one.phase}` }, WORDS[one.phase] || one.phase)), h("dd", null, `${duration(one.seconds)} · ${percent(one.share)}`))))) : null)));
  }

  // ---------------------------------------------------------------- metrics

  const runs = () => [id, ...others];
  const began = () => view.page.spans[0]?.begin ?? view.page.started;

  function drawTools() {
    if (metricTools.childNodes.length) return;
    // A report has the curves of these ranks only.
    const kept = view.page.kept_ranks, ranks = kept ? kept.length : view.page.ranks;
    const choose = (rank) => { view.rank = rank; attempt(loadLines()); };
    const choice = h("select", { "aria-label": "Ranks", onchange: (event) => choose(event.target.value) }, h("option", { value: "0" }, "Rank 0"),
      ranks > 1 && !others.length ? h("option", { value: "all" }, view.page.ranks > 8 ? "8 of all ranks" : "All ranks") : null,
      ranks > 1 ? (kept || Array.from({ length: Math.min(ranks, RANKS_OFFERED) }, (_, place) => place)).slice(1).map((rank) => h("option", { value: rank }, `Rank ${rank}`)) : null);
    const typed = !kept && ranks > RANKS_OFFERED ? h("input", { type: "number", min: 0, max: ranks - 1, step: 1, placeholder: `Rank up to ${ranks - 1}`, "aria-label": "Number of another rank",
      onchange: (event) => { if (event.target.value !== "" && event.target.checkValidity()) choose(event.target.value); } }) : null;
    const axis = h("select", { "aria-label": "Horizontal axis", onchange: (event) => { view.axis = event.target.value; view.zoom = null; view.reset.hidden = true; attempt(loadLines()); } }, h("option", { value: "row" }, "Over rows"), h("option", { value: "time" }, "Over time"));
    const slider = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, id: "smoothing", oninput: (event) => { view.smoothing = Number(event.target.value); drawLines(); } });
    const log = h("input", { type: "checkbox", id: "log-scale", onchange: (event) => { view.isLog = event.target.checked; drawLines(); } });
    const reset = h("button", { type: "button", class: "button reset", hidden: true, onclick: () => zoom(null, null) }, "Show all");
    replace(metricTools, choice, typed, axis, h("label", { class: "check", for: "smoothing" }, "Smoothing", slider), h("label", { class: "check", for: "log-scale" }, log, "Log scale"), reset);
    view.reset = reset;
  }

  function zoom(first, last) {
    if (first === null) view.zoom = null;
    else if (view.axis === "row") view.zoom = last - first >= 2 ? [Math.max(0, Math.floor(first)), Math.ceil(last)] : view.zoom;
    else view.zoom = [first, last];
    view.reset.hidden = !view.zoom;
    attempt(loadLines());
  }

  const names = () => view.page.metrics.slice(0, view.shown);

  // Only charts near the screen are loaded, each time they come into view after a change.
  const visible = new Set();
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) entry.isIntersecting ? visible.add(entry.target.dataset.metric) : visible.delete(entry.target.dataset.metric);
    if ([...visible].some((name) => charts.has(name) && charts.get(name).turn !== view.turn)) attempt(loadVisible());
  }, { rootMargin: "800px 0px" });

  async function loadLines() {
    view.turn += 1;
    more.hidden = view.page.metrics.length <= view.shown;
    more.textContent = `Show all ${view.page.metrics.length} metrics`;
    drawLines();
    await loadVisible();
  }

  // The time from which a run's time axis counts. view.times has the times of all rows, also where a part is shown.
  const originOf = (run) => (run === id ? began() : view.times.get(run)?.at[0] ?? 0);

  // Rows of a zoom over time, so that the server sends finer values of them.
  function rowsShown(run) {
    if (!view.zoom) return null;
    if (view.axis === "row") return view.zoom;
    const times = view.times.get(run);
    if (!times?.at.length) return null;
    const [first, last] = view.zoom.map((time) => interpolate(times.at, times.rows, time + originOf(run)));
    return [Math.max(0, Math.floor(first) - 1), Math.ceil(last) + 1];
  }

  const loadVisible = newest(async (signal) => {
    const turn = view.turn, rank = others.length && view.rank === "all" ? "0" : view.rank;
    const wanted = names().filter((name) => visible.has(name) && charts.get(name)?.turn !== turn);
    const pixels = Math.min(1000, Math.max(200, Math.ceil((grid.clientWidth > 760 ? grid.clientWidth / Math.max(1, Math.floor(grid.clientWidth / 380)) : grid.clientWidth) / 100) * 100));
    const batch = Math.max(1, Math.floor(view.page.most_curves / (rank === "all" ? Math.min(8, Math.max(1, view.page.ranks)) : 1)));
    const query = (run) => { const [first, last] = rowsShown(run) || []; return { run, rank, pixels, first, last }; };
    for (let start = 0; start < wanted.length; start += batch) {
      const part = wanted.slice(start, start + batch);
      const replies = await Promise.all(runs().map((run) => fetchJson("/api/lines", { ...query(run), metric: part }, signal).catch((error) => { if (run === id || signal.aborted) throw error; return null; })));
      runs().forEach((run, place) => {
        const kept = view.lines.get(run) || { lines: new Map(), times: null };
        if (replies[place]) kept.times = replies[place].times;
        if (kept.times && (!view.zoom || !view.times.has(run))) view.times.set(run, kept.times);
        for (const name of part) kept.lines.set(name, (replies[place]?.lines || []).filter((line) => line.name === name));
        view.lines.set(run, kept);
      });
      for (const name of part) if (charts.has(name)) charts.get(name).turn = turn;
      drawLines();
    }
  });

  function seriesOf(name) {
    const found = [];
    runs().forEach((run, place) => {
      const reply = view.lines.get(run);
      for (const line of reply?.lines.get(name) || []) {
        const times = reply.times, origin = originOf(run);
        const x = view.axis === "row" || !times ? line.rows : line.rows.map((row) => interpolate(times.rows, times.at, row) - origin);
        found.push({ label: others.length ? decodeURIComponentSafely(run) : `rank ${line.rank}`, colour: others.length ? place % 8 : found.length % 8, x, y: line.last, low: line.low, high: line.high });
      }
    });
    return found;
  }

  function marks() {
    const times = view.times.get(id);
    return view.page.marks.map((mark) => {
      const row = mark.row ?? (times ? interpolate(times.at, times.rows, mark.time) : null);
      return { ...mark, x: view.axis === "row" ? row : mark.time - began() };
    });
  }

  function drawLines() {
    const page = view.page, all = marks(), times = view.times.get(id);
    const saved = (page.checkpoints?.committed || []).map((one) => ({
      x: view.axis === "row" ? one.row : times ? interpolate(times.rows, times.at, one.row) - began() : one.row, isBest: one.is_best, words: `${one.name}, row ${one.row}${one.is_best ? ", the best" : ""}` }));
    const drawn = names();
    for (const [name, chart] of charts) if (!drawn.includes(name)) { observer.unobserve(chart.element); visible.delete(name); chart.leave(); charts.delete(name); }
    if (!drawn.length) { replace(grid, h("p", { class: "muted" }, "No metric that is a number has been reported yet.")); return; }
    for (const name of drawn) {
      if (!charts.has(name)) {
        if (!charts.size) replace(grid);
        const chart = new LineChart();
        chart.element.dataset.metric = name;
        charts.set(name, chart);
        grid.append(chart.element);
        observer.observe(chart.element);
      }
      const chart = charts.get(name);
      Object.assign(chart.options, { isLog: view.isLog, smoothing: view.smoothing });
      chart.update({ title: name, series: seriesOf(name), marks: all, points: others.length ? [] : saved, isTime: view.axis === "time", domain: view.zoom, onZoom: zoom, isLoading: chart.turn === undefined });
    }
  }

  // ---------------------------------------------------------------- steps and resources

  const loadSteps = newest(async (signal) => {
    const width = parts.steps.clientWidth || 900;
    const query = { run: id, columns: Math.min(800, Math.ceil(width / 100) * 100), rows: 96 };
    if (view.window) [query.begin, query.end] = view.window.map((time) => time.toFixed(3));
    const content = await fetchJson("/api/steps", query, signal);
    if (!content) { replace(parts.steps, h("p", { class: "muted" }, "No steps were recorded. TorchTrainer records them by itself; see the guide on tracing.")); return; }
    if (!timeline.element.isConnected) replace(parts.steps, timeline.element);
    timeline.update(content, began(), view.page.marks);
  });

  const loadResources = newest(async (signal) => {
    const content = await fetchJson("/api/resources", { run: id, columns: 200 }, signal);
    if (!content?.charts.length) { replace(parts.resources, h("p", { class: "muted" }, "No samples of the machine were recorded.")); return; }
    if (!parts.resources.querySelector(".charts")) replace(parts.resources, h("div", { class: "charts small" }));
    const box = parts.resources.querySelector(".charts"), width = (content.end - content.begin) / content.columns;
    const x = Array.from({ length: content.columns }, (_, place) => content.begin - began() + (place + 0.5) * width);
    const known = (values) => values.map((value, place) => [x[place], value]).filter(([, value]) => value !== null);
    for (const one of content.charts) {
      if (!resourceCharts.has(one.field)) { const chart = new LineChart({ height: 128 }); resourceCharts.set(one.field, chart); box.append(chart.element); }
      const series = one.lines.map((line, place) => ({ label: one.band ? `rank ${line.rank} (highest)` : `rank ${line.rank}`, colour: place % 8, x: known(line.values).map(([at]) => at), y: known(line.values).map(([, value]) => value) }));
      if (one.band) { const keep = one.band.middle.map((value) => value !== null); const pick = (values) => values.filter((_, place) => keep[place]); series.push({ label: "all ranks", colour: 6, x: pick(x), y: pick(one.band.middle), low: pick(one.band.low), high: pick(one.band.high) }); }
      resourceCharts.get(one.field).update({ title: one.title, unit: one.unit, series, marks: view.page.marks.map((mark) => ({ ...mark, x: mark.time - began() })), isTime: true, fromZero: true });
    }
  });

  // ---------------------------------------------------------------- checkpoints and events

  function drawCheckpoints() {
    const saved = view.page.checkpoints;
    if (!saved) { replace(parts.checkpoints, h("p", { class: "muted" }, "The checkpoints cannot be read.")); return; }
    const rows = [...saved.committed].reverse().map((one) => h("tr", null, h("th", { scope: "row" }, one.name, one.is_best ? h("span", { class: "tag" }, "best") : null), h("td", { class: "num" }, whole(one.row)), h("td", { class: "num" }, size(one.bytes)), h("td", { class: "num" }, whole(one.files)),
      h("td", null, h("time", { datetime: new Date(one.time * 1000).toISOString() }, clockTime(one.time))), h("td", { class: "num" }, one.lag === null ? "–" : duration(one.lag)), h("td", { class: "muted" }, one.metrics.map(([name, value]) => `${name} ${value}`).join("  "))));
    const lost = saved.unsaved.map((one) => h("tr", { class: "lost" }, h("th", { scope: "row" }, one.name || "no name", h("span", { class: "tag bad" }, "not saved")), h("td", { class: "num" }, whole(one.row)), h("td", { colspan: 5 }, one.reason)));
    const columns = [{ title: "Checkpoint" }, { title: "Row", class: "num" }, { title: "Size", class: "num" }, { title: "Files", class: "num" }, { title: "Committed" }, { title: "After its report", class: "num" }, { title: "Metrics" }];
    redraw(parts.checkpoints, saved.data ? h("p", { class: "muted" }, `Data at the newest: ${saved.data}`) : null, rows.length + lost.length ? table("Checkpoints", columns, [...lost, ...rows]) : h("p", { class: "muted" }, "No checkpoint has been committed."));
  }

  function drawEvents() {
    const page = view.page, first = began(), last = page.spans.at(-1)?.end ?? first, seconds = last - first || 1;
    const left = (time) => `${((time - first) / seconds) * 100}%`;
    const strip = h("div", { class: "strip", role: "img", "aria-label": page.spans.map((span) => `${span.cause} ${duration(span.end - span.begin)}`).join(", ") });
    for (const span of page.spans) {
      const part = h("span", { class: `cause-${span.cause}`, title: `${span.attempt >= 0 ? `attempt ${span.attempt}, ` : ""}${span.cause}: ${duration(span.end - span.begin)}` });
      part.style.left = left(span.begin);
      part.style.width = `${((span.end - span.begin) / seconds) * 100}%`;
      strip.append(part);
    }
    for (const mark of page.marks) {
      const line = h("span", { class: `time-mark ${mark.kind}`, title: `${mark.kind}: ${mark.words}` });
      line.style.left = left(mark.time);
      strip.append(line);
    }
    const axis = h("div", { class: "time-axis", "aria-hidden": "true" }, [0, 0.25, 0.5, 0.75, 1].map((share) => h("span", null, duration(share * seconds))));
    const rows = [...page.events].reverse().map((one) => h("tr", null, h("td", { class: "num" }, h("time", { datetime: new Date(one.time * 1000).toISOString(), title: clockTime(one.time) }, duration(one.time - first))), h("td", null, h("span", { class: `kind ${one.kind}` }, one.kind)), h("td", { class: "words" }, one.words)));
    redraw(parts.events, strip, axis, h("div", { class: "tall" }, table("Events", [{ title: "After", class: "num" }, { title: "Event" }, { title: "What happened" }], rows)));
  }

  // ---------------------------------------------------------------- loading

  let loaded = 0;
  async function load() {
    const page = await fetchJson("/api/run", { run: id });
    view.page = page;
    loaded = now();
    drawHead();
    drawTools();
    drawOverview();
    drawCheckpoints();
    drawEvents();
    const jobs = await Promise.allSettled([loadLines(), loadSteps(), loadResources(), logs.more()]);
    const failed = jobs.find((job) => job.status === "rejected");
    if (failed) throw failed.reason;
    return page.version;
  }
  replace(header, h("h1", null, decodeURIComponentSafely(id)));
  const following = follow({ run: id }, load);
  const ticking = setInterval(() => {
    if (!view.page || document.hidden || isReport() || isOver()) return;
    if (!view.page.is_live && now() - loaded > SILENCE_INTERVAL_S) following.again();
    else {
      drawHead();
      logs.more().catch(() => {}); // the next change of the run tells why
    }
  }, LOG_INTERVAL_S * 1000);
  return { leave: () => { following.stop(); clearInterval(ticking); observer.disconnect(); timeline.leave(); for (const chart of [...charts.values(), ...resourceCharts.values()]) chart.leave(); } };
}
