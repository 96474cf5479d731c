// Which page an address shows. Links inside the dashboard do not load the shell again.

import { decodeURIComponentSafely } from "./addresses.js";
import { attempt, h, postJson, replace } from "./dom.js";
import { runsPage } from "./runs.js";
import { runPage } from "./run.js";
import { sweepPage } from "./sweep.js";

let leave = () => {};
let shownAddress = "";

function crumbs(path) {
  const parts = [h("a", { href: "/", class: "brand" }, "Powertrain")];
  const [, kind, ...names] = path.split("/");
  names.filter(Boolean).forEach((name, place) => {
    const isLast = place === names.length - 1;
    const shown = decodeURIComponentSafely(name);
    parts.push(h("span", { class: "sep", "aria-hidden": "true" }, "/"));
    const parent = kind === "runs" && !isLast ? `/sweeps/${name}` : null;
    parts.push(parent ? h("a", { href: parent }, shown) : h("span", { "aria-current": "page" }, shown));
  });
  replace(document.getElementById("crumbs"), parts);
}

function show(isNew) {
  leave();
  const path = location.pathname;
  shownAddress = path + location.search;
  const main = document.getElementById("content");
  crumbs(path);
  replace(main);
  const id = path.replace(/^\/(runs|sweeps)\//, "");
  const page = path.startsWith("/runs/") ? runPage(main, id) : path.startsWith("/sweeps/") ? sweepPage(main, id) : runsPage(main);
  leave = page.leave;
  if (isNew) main.focus({ preventScroll: true });
  window.scrollTo(0, 0);
}

export function go(address) {
  history.pushState(null, "", address);
  show(true);
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  const address = new URL(link.href);
  if (address.origin !== location.origin || link.getAttribute("href").startsWith("#")) return;
  event.preventDefault();
  go(address.pathname + address.search);
});

// A link within the page scrolls; the focus goes there too, and the page stays as it is.
function focusTarget() {
  const target = location.hash && document.getElementById(decodeURIComponentSafely(location.hash.slice(1)));
  if (!target) return;
  if (!target.hasAttribute("tabindex")) target.setAttribute("tabindex", "-1");
  target.focus();
}
window.addEventListener("popstate", () => {
  if (location.pathname + location.search === shownAddress) focusTarget();
  else show(false);
});
document.getElementById("sign-out").addEventListener("click", () => attempt(postJson("/api/sign-out", {}, {}).then(() => { localStorage.removeItem("powertrain-key"); location.assign("/"); })));
show(false);
