// A report: the page of one run or sweep, whose replies are in the file itself.

import { answerFrom, h, replace } from "./dom.js";
import { runPage } from "./run.js";
import { sweepPage } from "./sweep.js";

const content = JSON.parse(document.getElementById("replies").textContent);

// The part of a step timeline between two times. It gets no finer: a report has one resolution.
function stepsBetween(steps, begin, end) {
  const width = (steps.end - steps.begin) / steps.columns;
  const first = Math.min(steps.columns - 1, Math.max(0, Math.floor((begin - steps.begin) / width)));
  const last = Math.min(steps.columns, Math.max(first + 1, Math.ceil((end - steps.begin) / width)));
  const cells = atob(steps.cells), each = steps.kind === "longest" ? 1 : steps.phases.length;
  let kept = "";
  for (let row = 0; row < steps.rows.length; row += 1) kept += cells.slice((row * steps.columns + first) * each, (row * steps.columns + last) * each);
  return { ...steps, cells: btoa(kept), columns: last - first, begin: steps.begin + first * width, end: steps.begin + last * width };
}

function logPage(logs, query) {
  const attempts = [...new Set(logs.map((log) => log.attempt))];
  const attempt = query.attempt === "" || query.attempt === undefined ? Math.max(0, ...attempts) : Number(query.attempt);
  const ranks = logs.filter((log) => log.attempt === attempt).map((log) => log.rank);
  const wanted = query.rank === "" || query.rank === undefined ? ranks[0] : Number(query.rank);
  const rank = ranks.includes(wanted) ? wanted : ranks[0] ?? 0;
  const log = logs.find((one) => one.attempt === attempt && one.rank === rank);
  const search = (query.search || "").toLowerCase();
  const lines = (log?.lines || []).filter((line) => line.toLowerCase().includes(search));
  return { attempts, ranks, attempt, rank, has_log: log !== undefined, lines, searched_from: 0, offset: 0, rest: "", is_cut: false, is_end_only: log?.is_cut || false };
}

function answer(path, query) {
  if (path === "/api/run") return content.run;
  if (path === "/api/sweep") return content.sweep;
  if (path === "/api/resources") return content.resources;
  if (path === "/api/steps") return content.steps && query.begin !== undefined ? stepsBetween(content.steps, Number(query.begin), Number(query.end)) : content.steps;
  if (path === "/api/logs") return logPage(content.logs, query);
  const wanted = new Set(query.metric);
  return { times: content.lines.times, lines: content.lines.lines.filter((line) => wanted.has(line.name) && (query.rank === "all" || line.rank === Number(query.rank))) };
}

answerFrom(answer, content.made);
const page = content.run || content.sweep;
replace(document.getElementById("crumbs"), h("span", { class: "brand" }, "Powertrain"), h("span", { class: "sep", "aria-hidden": "true" }, "/"), h("span", { "aria-current": "page" }, page.name));
(content.run ? runPage : sweepPage)(document.getElementById("content"), page.id);
