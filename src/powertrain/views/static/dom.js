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

// As replace, but the focus, open details and scrolled boxes stay as they were.
export function redraw(element, ...children) {
  const active = document.activeElement, isInside = element !== active && element.contains(active);
  const focused = isInside ? keyOf(active) : null;
  const open = new Set([...element.querySelectorAll("details[open]")].map(keyOf));
  const scrolled = [...element.querySelectorAll(".scroll")].map((box) => [box.scrollLeft, box.scrollTop]);
  replace(element, ...children);
  for (const one of element.querySelectorAll("details")) if (open.has(keyOf(one))) one.open = true;
  [...element.querySelectorAll(".scroll")].forEach((box, place) => { if (scrolled[place]) [box.scrollLeft, box.scrollTop] = scrolled[place]; });
  if (!isInside) return;
  const same = [...element.querySelectorAll("a, button, input, select, summary, [tabindex]")].find((one) => keyOf(one) === focused);
  same?.focus({ preventScroll: true });
}

const keyOf = (element) => [element.tagName, element.dataset.key || element.getAttribute("href") || element.getAttribute("aria-label") || element.textContent].join(" ");

// ---------------------------------------------------------------- requests

// The key of the session: only this page has it. Cookies alone go to every port of the host.
const key = () => localStorage.getItem("powertrain-key") || "";

// A report holds its replies: what answers for the server, and when it was made.
let kept = null;
export const isReport = () => kept !== null;
export function answerFrom(answer, made) { kept = { answer, made }; }

let ahead = 0;
// The server's time in Unix seconds: ages do not depend on the clock of this machine. That of a report stands still.
export const now = () => (kept ? kept.made : Date.now() / 1000 + ahead);

async function contentOf(reply) {
  const date = Date.parse(reply.headers.get("Date") || "");
  if (date) ahead = Math.abs(date - Date.now()) < 2000 ? 0 : (date - Date.now()) / 1000;
  const content = await reply.json().catch((error) => { if (reply.ok || error.name === "AbortError") throw error; return {}; });
  if (reply.ok) return content;
  const words = reply.status === 401 ? "Not signed in. Open the address that the terminal shows." : content.error || `The server answered with ${reply.status}.`;
  throw Object.assign(new Error(words), { status: reply.status });
}

async function ask(path, options) {
  try { return await fetch(path, { credentials: "same-origin", ...options, headers: { "X-Powertrain-Key": key(), ...options.headers } }); } catch (error) {
    if (error.name === "AbortError") throw error;
    throw Object.assign(new Error("The server does not answer. It may have been ended."), { status: 0 });
  }
}

export async function fetchJson(path, query = {}, signal = undefined) {
  if (kept) return kept.answer(path, query);
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") parts.append(name, one);
    }
  }
  const text = parts.toString();
  return contentOf(await ask(text ? `${path}?${text}` : path, { signal }));
}

export async function postJson(path, query, content) {
  const text = new URLSearchParams(query).toString();
  return contentOf(await ask(text ? `${path}?${text}` : path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content) }));
}

// A loader whose newest call counts: earlier ones are aborted, and resolve to nothing.
export function newest(load) {
  let controller = null;
  return async (...given) => {
    controller?.abort();
    const mine = controller = new AbortController();
    try { return await load(mine.signal, ...given); } catch (error) {
      if (error.name !== "AbortError" && !mine.signal.aborted) throw error;
      return undefined;
    }
  };
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
  new Date(unix * 1000).toLocaleString("sv-SE", { ...(kept ? { year: "numeric" } : {}), month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const percent = (share) => (share > 0 && share < 0.01 ? "<1 %" : `${Math.round(share * 100)} %`);

export const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;

// ---------------------------------------------------------------- small parts

// A link to another page, which a report does not have.
export const pageLink = (attributes, ...children) => (kept ? h("span", { ...attributes, href: null, tabindex: attributes.onfocus ? 0 : null }, ...children) : h("a", attributes, ...children));

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

export function complain(text) {
  const problem = document.getElementById("problem");
  if (problem.textContent !== text) problem.textContent = text;
  problem.hidden = !text;
}

// For handlers: an error is shown where screen readers notice it.
export const attempt = (promise) => promise.catch((error) => complain(error.message));

/* Load a page and load it again whenever the server tells of a change. load() returns the version that it has shown.
   A hidden tab holds no connection: a browser has only six for each server. */
export function follow(query, load) {
  const status = document.getElementById("connection");
  let source = null, timer = null, shown = null, told = null, isBusy = false, isPending = false, isLeft = false;
  const tell = (text, kind) => { if (isLeft) return; if (status.textContent !== text) status.textContent = text; status.className = `connection ${kind}`; };
  const close = () => { clearTimeout(timer); source?.close(); source = null; };

  async function run() {
    if (isBusy) { isPending = true; return true; }
    isBusy = true;
    let code = 200;
    try { shown = (await load()) ?? null; if (!isLeft) complain(""); } catch (error) {
      shown = null;
      code = error.status ?? 500;
      if (!isLeft) { complain(error.message); if (code === 401 || code === 404) tell("Not live", "off"); }
    }
    isBusy = false;
    if (isPending && !isLeft) { isPending = false; if (told !== shown) return run(); }
    return code !== 401 && code !== 404;
  }

  function open() {
    close();
    source = new EventSource(`/api/events?${new URLSearchParams({ ...query, key: key() })}`);
    source.onopen = () => tell("Live", "on");
    source.onerror = async () => {
      tell("Reconnecting…", "off");
      if (source?.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
      close();
      // The server has refused: its reply to the page's own request has the reason.
      if (await run() && !isLeft && !document.hidden) timer = setTimeout(open, 5000);
    };
    source.addEventListener("changed", (event) => {
      told = event.data;
      if (isBusy) isPending = true;
      else if (told !== shown) run().then((isThere) => { if (isThere) tell("Live", "on"); });
    });
  }

  const onVisibility = () => {
    if (document.hidden) { close(); tell("Paused", "off"); } else if (!source) { open(); run(); }
  };
  run();
  if (kept) {
    tell(`As of ${clockTime(kept.made)}`, "");
    return { again: run, stop: () => { isLeft = true; } };
  }
  document.addEventListener("visibilitychange", onVisibility);
  if (!document.hidden) open();
  return {
    again: run,
    stop: () => { isLeft = true; close(); document.removeEventListener("visibilitychange", onVisibility); status.textContent = ""; status.className = "connection"; complain(""); },
  };
}
