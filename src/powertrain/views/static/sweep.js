// The page of a sweep: parallel coordinates, learning curves, importance of parameters, trials.

import { LineChart } from "./chart.js";
import { decodeURIComponentSafely } from "./addresses.js";
import { age, clockTime, duration, fetchJson, follow, h, isReport, newest, now, number, pageLink, percent, redraw, replace, s, stateBadge, whole } from "./dom.js";

const HEIGHT = 260, TOP = 30, BOTTOM = 24, SIDE = 70;

export function sweepPage(main, id) {
  const header = h("header", { class: "run-head" });
  const lines = h("div", { class: "body" }), importance = h("div", { class: "body" }), trials = h("div", { class: "body" });
  const curves = new LineChart({ height: 240 });
  const plot = s("svg", { class: "plot parallel", role: "img", "aria-label": "Parallel coordinates", height: HEIGHT });
  const part = (name, title, body) => h("section", { id: name, "aria-labelledby": `${name}-title` }, h("h2", { id: `${name}-title` }, title), body);
  lines.append(h("figure", { class: "chart wide scroll" }, plot));
  replace(main, header, part("parallel", "Parameters", lines), h("div", { class: "columns two" }, part("curves", "Learning curves", h("div", { class: "body" }, curves.element)), part("importance", "Importance", importance)), part("trials", "Trials", trials));
  let page = null, marked = null;

  function drawHead() {
    document.title = `${page.name} · Powertrain`;
    const facts = [["Trials", `${page.done} of ${page.total ?? "?"}`], ["Objective", page.metric ? `${page.mode} ${page.metric}` : "–"], ["Best", page.best || "–"], ["Duration", duration(page.seconds)], ["Started", !page.started ? "–" : isReport() ? clockTime(page.started) : `${age(now() - page.started)} ago`]];
    redraw(header, h("div", { class: "head" }, h("div", null, h("h1", null, page.name, " ", stateBadge(page.state)), page.reason ? h("p", { class: "reason" }, page.reason) : null, h("p", { class: "path" }, page.path))),
      h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))));
  }

  // The better a trial, the further its colour is from grey: a share from 0 (worst) to 1 (best) by rank.
  function shares() {
    const known = page.trials.filter((trial) => trial.score !== null).sort((a, b) => (page.mode === "max" ? a.score - b.score : b.score - a.score));
    return new Map(known.map((trial, place) => [trial.number, known.length > 1 ? place / (known.length - 1) : 1]));
  }

  function drawParallel() {
    if (!page) return;
    plot.style.minWidth = `${(page.axes.length + 1) * 120}px`;
    const width = plot.clientWidth;
    if (!width) return;
    const axes = page.axes, scores = page.trials.map((trial) => trial.score).filter((score) => score !== null);
    const low = Math.min(...scores), high = Math.max(...scores), better = shares();
    const places = axes.map((axis) => axis.places);
    const ticks = axes.map((axis) => axis.ticks);
    if (scores.length) {
      places.push(page.trials.map((trial) => (trial.score === null ? null : high > low ? (trial.score - low) / (high - low) : 0.5)));
      ticks.push(high > low ? [[0, number(low)], [1, number(high)]] : [[0.5, number(low)]]);
    }
    const titles = [...axes.map((axis) => axis.path), ...(scores.length ? [page.metric] : [])];
    const X = (place) => SIDE + (titles.length > 1 ? place / (titles.length - 1) : 0.5) * (width - 2 * SIDE);
    const Y = (share) => HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM);
    const order = page.trials.map((_, place) => place).sort((a, b) => (better.get(page.trials[a].number) ?? -1) - (better.get(page.trials[b].number) ?? -1));
    const drawn = order.map((index) => {
      const trial = page.trials[index], share = better.get(trial.number);
      let path = "", isDown = false;
      places.forEach((column, place) => { if (column[index] === null) { isDown = false; return; } path += `${isDown ? "L" : "M"}${X(place).toFixed(1)} ${Y(column[index]).toFixed(1)}`; isDown = true; });
      const level = share === undefined ? "" : trial.name === page.best_trial ? "is-best" : share > 0.8 ? "is-high" : share > 0.5 ? "is-medium" : "";
      return s("path", { class: `trial ${level} ${marked === trial.number ? "on" : ""}`, d: path }, s("title", null, `${trial.name}: ${number(trial.score)}`));
    });
    const columns = titles.map((title, place) => s("g", { class: "axis" }, s("line", { x1: X(place), x2: X(place), y1: TOP, y2: HEIGHT - BOTTOM }), s("text", { class: "axis-title middle", x: X(place), y: 16 }, title.length > 18 ? `…${title.slice(-17)}` : title),
      ticks[place].map(([share, label]) => s("text", { class: "tick start", x: X(place) + 6, y: Y(share) + 4 }, label))));
    plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    plot.setAttribute("aria-label", `Parallel coordinates of ${page.trials.length} trials over ${axes.map((axis) => axis.path).join(", ")}. The table of trials has the same values.`);
    replace(plot, drawn, columns);
  }

  function drawCurves() {
    const better = shares(), named = [...page.trials].sort((a, b) => (better.get(b.number) ?? -1) - (better.get(a.number) ?? -1)).slice(0, 5).map((trial) => trial.number);
    const name = new Map(page.trials.map((trial) => [trial.number, trial.name]));
    const found = page.curves.filter((one) => one.rows.length).sort((a, b) => named.includes(a.number) - named.includes(b.number));
    const series = found.map((one) => ({ label: name.get(one.number), colour: named.includes(one.number) ? named.indexOf(one.number) : 9, x: one.rows, y: one.last }));
    curves.update({ title: page.metric || "No metric", series, marks: [] });
    replace(curves.legend, named.filter((number_) => page.curves.find((one) => one.number === number_)?.rows.length).map((number_, place) => h("li", { class: `c${place}` }, name.get(number_))));
  }

  function drawImportance() {
    const known = page.axes.filter((axis) => axis.importance !== null).sort((a, b) => b.importance - a.importance);
    if (!known.length) { replace(importance, h("p", { class: "muted" }, "It can be told once five trials have ended.")); return; }
    replace(importance, h("ul", { class: "bars" }, known.map((axis) => {
      const bar = h("span", { class: "bar" });
      bar.style.width = `${axis.importance * 100}%`;
      return h("li", null, h("span", { class: "bar-name" }, axis.path), h("span", { class: "bar-box" }, bar), h("span", { class: "num" }, percent(axis.importance)));
    })), h("p", { class: "faint" }, "The share of the differences between trials that each parameter explains by itself."));
  }

  function drawTrials() {
    const better = shares(), sorted = [...page.trials].sort((a, b) => (better.get(b.number) ?? -1) - (better.get(a.number) ?? -1));
    const paths = page.axes.map((axis) => axis.path);
    redraw(trials, h("div", { class: "scroll" }, h("table", null, h("caption", { class: "hidden" }, "Trials"),
      h("thead", null, h("tr", null, ["Trial", "State", page.metric || "Score", "Rows", "Duration", ...paths].map((title, place) => h("th", { scope: "col", class: place > 1 ? "num" : "" }, title)))),
      h("tbody", null, sorted.map((trial) => {
        const values = new Map(trial.params);
        return h("tr", { onpointerenter: () => { marked = trial.number; drawParallel(); }, onpointerleave: () => { marked = null; drawParallel(); } },
          h("th", { scope: "row" }, pageLink({ href: `/runs/${trial.id}`, onfocus: () => { marked = trial.number; drawParallel(); } }, trial.name), trial.name === page.best_trial ? h("span", { class: "tag" }, "best") : null),
          h("td", null, stateBadge(trial.state)), h("td", { class: "num" }, number(trial.score)), h("td", { class: "num" }, whole(trial.iteration)), h("td", { class: "num" }, duration(trial.seconds)), paths.map((path) => h("td", { class: "num" }, values.get(path) ?? "–")));
      })))));
  }

  const load = newest(async (signal) => {
    page = await fetchJson("/api/sweep", { run: id }, signal);
    drawHead(); drawParallel(); drawCurves(); drawImportance(); drawTrials();
    return page.version;
  });
  replace(header, h("h1", null, decodeURIComponentSafely(id)));
  const observer = new ResizeObserver(drawParallel);
  observer.observe(plot);
  const following = follow({ run: id }, load);
  return { leave: () => { following.stop(); observer.disconnect(); curves.leave(); } };
}
