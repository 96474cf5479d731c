// Elements, numbers and requests. Text of a run only ever becomes a text node or an attribute's value.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.setAttribute("class", value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export function replace(element, ...children) {
  element.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
}

export async function fetchJson(path, query = {}, signal = undefined) {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") parts.append(name, one);
    }
  }
  const text = parts.toString();
  const reply = await fetch(text ? `${path}?${text}` : path, { signal, credentials: "same-origin" });
  if (reply.status === 401) throw new Error("Not signed in. Open the address that the terminal shows.");
  const content = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Error(content.error || `The server answered with ${reply.status}.`);
  return content;
}

export async function postJson(path, query, content) {
  const reply = await fetch(`${path}?${new URLSearchParams(query)}`, {
    method: "POST",
    credentials: "same-origin",
    headers: { "Content-Type": "application/json", "X-Powertrain-Control": "1" },
    body: JSON.stringify(content),
  });
  const answer = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Error(answer.error || `The server answered with ${reply.status}.`);
  return answer;
}

// ---------------------------------------------------------------- numbers

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en-US");
  for (const [limit, unit, scale] of [[1e12, " T", 1e12], [1e9, " G", 1e9], [1e6, " M", 1e6]]) {
    if (size >= limit) return `${trim((value / scale).toPrecision(4))}${unit}`;
  }
  if (size >= 1e4) return Math.round(value).toLocaleString("en-US");
  if (size !== 0 && size < 1e-3) return value.toExponential(2);
  return trim(value.toPrecision(4));
}

const trim = (text) => (text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text);

export const whole = (value) => Math.round(value).toLocaleString("en-US");

export function size(bytes) {
  let value = bytes;
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (value < 1000 || unit === "TB") return `${value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)} ${unit}`;
    value /= 1000;
  }
  return "";
}

export function duration(seconds) {
  if (!(seconds > 0)) return "0 s";
  if (seconds < 0.1) return `${(seconds * 1000).toPrecision(2)} ms`;
  if (seconds < 10) return `${trim(seconds.toFixed(2))} s`;
  if (seconds < 60) return `${trim(seconds.toFixed(1))} s`;
  const total = Math.round(seconds);
  if (total < 3600) return `${Math.floor(total / 60)} min ${String(total % 60).padStart(2, "0")} s`;
  if (total < 86400) return `${Math.floor(total / 3600)} h ${String(Math.floor((total % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(total / 86400)} d ${Math.floor((total % 86400) / 3600)} h`;
}

export function age(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

export const clockTime = (unix) =>
  new Date(unix * 1000).toLocaleString("sv-SE", { month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const percent = (share) => (share > 0 && share < 0.01 ? "<1 %" : `${Math.round(share * 100)} %`);

export const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;

// ---------------------------------------------------------------- small parts

const TONES = {
  training: "good", running: "good", finished: "done", failed: "bad", unreadable: "bad", error: "bad",
  interrupted: "warn", preempted: "warn", stopped: "warn", stopping: "warn", recovering: "warn",
};

export const stateBadge = (state) => h("span", { class: `state ${TONES[state] || "calm"}` }, state);

export function table(caption, columns, rows, attributes = {}) {
  return h("div", { class: "scroll" }, h("table", attributes,
    h("caption", { class: attributes["data-caption"] ? "" : "hidden" }, caption),
    h("thead", null, h("tr", null, columns.map((column) => h("th", { scope: "col", class: column.class }, column.title)))),
    h("tbody", null, rows)));
}

export function follow(query, onChange) {
  // EventSource connects again by itself; the page shows whether it is connected.
  const source = new EventSource(`/api/events?${new URLSearchParams(query)}`);
  const status = document.getElementById("connection");
  source.onopen = () => { status.textContent = "Live"; status.className = "connection on"; };
  source.onerror = () => { status.textContent = "Reconnecting…"; status.className = "connection off"; };
  let isBusy = false, isPending = false;
  const run = async () => {
    if (isBusy) { isPending = true; return; }
    isBusy = true;
    try { await onChange(); } catch (error) { if (error.name !== "AbortError") console.warn(error.message); }
    isBusy = false;
    if (isPending) { isPending = false; run(); }
  };
  source.addEventListener("changed", run);
  return () => { source.close(); status.textContent = ""; status.className = "connection"; };
}
