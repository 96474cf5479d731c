// The list of runs and sweeps.

import { age, attempt, clockTime, duration, fetchJson, follow, h, now, number, plural, redraw, replace, s, stateBadge, whole } from "./dom.js";

const COLUMNS = [
  { key: "name", title: "Run" },
  { key: "state", title: "State" },
  { key: "rows", title: "Rows", class: "num" },
  { key: "world_size", title: "Workers", class: "num" },
  { key: "metric", title: "Metric" },
  { key: "finding", title: "Finding" },
  { key: "seconds", title: "Duration", class: "num" },
  { key: "started", title: "Started", class: "num" },
];

export function sparkline(spark, width = 96, height = 24) {
  const values = spark.last;
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return null;
  const low = Math.min(...known), high = Math.max(...known), first = spark.rows[0];
  const span = spark.rows[spark.rows.length - 1] - first || 1;
  let path = "", isDown = false;
  values.forEach((value, place) => {
    if (value === null) { isDown = false; return; }
    const x = ((spark.rows[place] - first) / span) * (width - 4) + 2;
    const y = height - 3 - ((value - low) / (high - low || 1)) * (height - 6);
    path += `${isDown ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    isDown = true;
  });
  const label = `${spark.name} from ${number(known[0])} to ${number(known[known.length - 1])}`;
  return s("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, s("path", { d: path }));
}

export function runsPage(main) {
  document.title = "Runs · Powertrain";
  const view = { filter: "", states: "all", sort: "started", isDescending: true, data: null, sparks: new Map(), chosen: new Set() };
  const query = new URLSearchParams(location.search);
  view.filter = query.get("filter") || "";
  const body = h("tbody");
  const head = h("tr");
  const count = h("p", { class: "muted", role: "status" });
  const root = h("p", { class: "path" });
  const sweeps = h("section", { "aria-labelledby": "sweeps-title" });
  const compare = h("a", { class: "button", href: "/", hidden: true }, "Compare");
  const filter = h("input", { type: "search", value: view.filter, placeholder: "Filter by name", "aria-label": "Filter by name", oninput: (event) => { view.filter = event.target.value; draw(); } });
  const states = h("select", { "aria-label": "State", onchange: (event) => { view.states = event.target.value; draw(); } },
    ["all", "active", "finished", "failed", "stopped", "interrupted"].map((name) => h("option", { value: name }, name === "all" ? "All states" : name)));
  replace(main, h("div", { class: "head" }, h("div", null, h("h1", null, "Runs"), root), h("div", { class: "tools" }, filter, states, compare)),
    sweeps, count, h("div", { class: "scroll" }, h("table", { class: "runs" }, h("caption", { class: "hidden" }, "Runs"), h("thead", null, head), body)));

  const isActive = (run) => !["finished", "failed", "stopped", "preempted", "interrupted", "unreadable"].includes(run.state);

  function shown() {
    const words = view.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const runs = view.data.runs.filter((run) => words.every((word) => run.name.toLowerCase().includes(word)))
      .filter((run) => view.states === "all" || (view.states === "active" ? isActive(run) : run.state === view.states));
    const value = (run) => view.sort === "metric" ? view.sparks.get(run.id)?.spark?.value ?? -Infinity
      : view.sort === "finding" ? view.sparks.get(run.id)?.finding?.cost ?? -1 : run[view.sort] ?? "";
    const sign = view.isDescending ? -1 : 1;
    return runs.sort((a, b) => { const x = value(a), y = value(b); return sign * (x < y ? -1 : x > y ? 1 : 0); });
  }

  function drawHead() {
    replace(head, h("th", { scope: "col", class: "pick" }, h("span", { class: "hidden" }, "Compare")), COLUMNS.map((column) => {
      const isOn = view.sort === column.key;
      const order = isOn ? (view.isDescending ? "descending" : "ascending") : "none";
      return h("th", { scope: "col", "aria-sort": order, class: `${column.class || ""} col-${column.key}` },
        h("button", { type: "button", class: "sort", onclick: () => { view.isDescending = isOn ? !view.isDescending : column.key !== "name"; view.sort = column.key; draw(); } },
          column.title, h("span", { "aria-hidden": "true", class: "arrow" }, isOn ? (view.isDescending ? "↓" : "↑") : "")));
    }));
  }

  function row(run) {
    const more = view.sparks.get(run.id);
    const spark = more?.spark;
    const metric = spark ? h("div", { class: "metric" }, sparkline(spark),
      h("div", { class: "values" }, h("span", { class: "value" }, number(spark.value)), h("span", { class: "faint" }, spark.name))) : null;
    const finding = more?.finding ? h("span", { class: `finding-line ${more.finding.severity}`, title: more.finding.summary }, more.finding.summary) : null;
    const pick = h("input", { type: "checkbox", "aria-label": `Compare ${run.name}`, onchange: (event) => { event.target.checked ? view.chosen.add(run.id) : view.chosen.delete(run.id); drawCompare(); } });
    pick.checked = view.chosen.has(run.id);
    const cell = (key, ...content) => h("td", { class: `col-${key} ${COLUMNS.find((column) => column.key === key).class || ""}` }, content);
    return h("tr", { "data-run": run.id }, h("td", { class: "pick" }, pick),
      h("th", { scope: "row", class: "col-name" }, h("a", { href: `/runs/${run.id}` }, run.name), run.unsaved ? h("span", { class: "faint" }, ` ${run.unsaved} unsaved`) : null),
      cell("state", stateBadge(run.state), run.silent_since ? h("span", { class: "faint" }, ` not heard of since ${clockTime(run.silent_since)}`) : null),
      cell("rows", run.rows ? whole(run.rows) : "–"),
      cell("world_size", run.world_size || "–"),
      cell("metric", metric), cell("finding", finding),
      cell("seconds", run.started ? h("span", isActive(run) && !run.silent_since ? { "data-since": run.started } : null, duration(isActive(run) && !run.silent_since ? now() - run.started : run.seconds)) : "–"),
      cell("started", run.started ? h("time", { datetime: new Date(run.started * 1000).toISOString(), title: new Date(run.started * 1000).toLocaleString(), "data-age": run.started }, `${age(now() - run.started)} ago`) : "–"));
  }

  function drawCompare() {
    const [first, ...rest] = [...view.chosen];
    compare.hidden = !rest.length;
    compare.textContent = `Compare ${view.chosen.size} runs`;
    if (rest.length) compare.href = `/runs/${first}?${new URLSearchParams(rest.map((id) => ["with", id]))}`;
  }

  function drawSweeps() {
    const found = view.data.sweeps;
    if (!found.length) { replace(sweeps); return; }
    redraw(sweeps, h("h2", { id: "sweeps-title" }, "Sweeps"), h("ul", { class: "sweeps" }, found.map((one) => h("li", null,
      h("a", { href: `/sweeps/${one.id}` }, one.name), stateBadge(one.state),
      h("span", { class: "muted num" }, one.total === undefined ? "" : `${one.done} of ${one.total ?? "?"} trials`),
      h("span", { class: "num" }, one.best || ""), one.started ? h("span", { class: "faint num", "data-age": one.started }, `${age(now() - one.started)} ago`) : null))),
    h("h2", null, "Single runs"));
  }

  function draw() {
    if (!view.data) return;
    const focus = document.activeElement?.closest?.("th[aria-sort]") ? [...head.children].indexOf(document.activeElement.closest("th")) : -1;
    drawHead();
    if (focus >= 0) head.children[focus]?.querySelector("button")?.focus();
    root.textContent = view.data.root;
    const runs = shown();
    drawSweeps();
    const all = view.data.runs.length;
    count.textContent = runs.length === all ? plural(all, "run") : `${runs.length} of ${plural(all, "run")}`;
    redraw(body, runs.length ? runs.map(row) : h("tr", null, h("td", { colspan: 9, class: "empty" }, all ? "No run matches." : "There are no runs here yet. A run appears as soon as fit() is called.")));
    if (!isLoading) attempt(loadSparks(runs.slice(0, 100).filter((run) => view.sparks.get(run.id)?.version !== versionOf(run))));
  }

  const versionOf = (run) => (isActive(run) ? `${run.state} ${run.rows} ${view.data.version}` : `${run.state} ${run.seconds}`);
  let isLoading = false;
  async function loadSparks(runs) {
    if (isLoading || !runs.length) return;
    isLoading = true;
    try {
      for (let start = 0; start < runs.length; start += 50) {
        const part = runs.slice(start, start + 50);
        const found = new Map((await fetchJson("/api/sparks", { run: part.map((run) => run.id) })).map((one) => [one.id, one]));
        for (const run of part) view.sparks.set(run.id, { ...found.get(run.id), version: versionOf(run) });
      }
    } finally { isLoading = false; }
    draw();
  }

  async function load() {
    view.data = await fetchJson("/api/runs");
    draw();
    return view.data.version;
  }
  // Ages and durations go on between two changes.
  const ticking = setInterval(() => {
    for (const one of main.querySelectorAll("[data-age]")) one.textContent = `${age(now() - Number(one.dataset.age))} ago`;
    for (const one of main.querySelectorAll("[data-since]")) one.textContent = duration(now() - Number(one.dataset.since));
  }, 1000);
  const following = follow({}, load);
  return { leave: () => { following.stop(); clearInterval(ticking); } };
}
