// Logs of ranks with search and follow.

import { attempt, fetchJson, h, isReport, newest, replace, whole } from "./dom.js";

const MOST_LINES = 5000;

export class Logs {
  constructor(id) {
    this.id = id;
    this.page = null;
    // Which attempt and rank were chosen by hand; else the newest attempt is shown.
    this.chosen = { attempt: "", rank: "" };
    this.lines = h("pre", { class: "log", tabindex: 0, role: "log", "aria-label": "Output of the rank", "aria-live": "off" });
    this.attempt = h("select", { "aria-label": "Attempt", onchange: () => { const isNewest = this.attempt.value === String(this.page?.attempts.at(-1)); this.chosen = { attempt: isNewest ? "" : this.attempt.value, rank: this.chosen.rank }; attempt(this.load()); } });
    this.rank = h("select", { "aria-label": "Rank", onchange: () => { this.chosen.rank = this.rank.value; attempt(this.load()); } });
    this.search = h("input", { type: "search", placeholder: "Search lines", "aria-label": "Search lines", oninput: () => { clearTimeout(this.timer); this.timer = setTimeout(() => attempt(this.load()), 250); } });
    this.followBox = h("input", { type: "checkbox", id: "follow-log" });
    this.followBox.checked = true;
    this.further = h("button", { type: "button", class: "button", hidden: true, onclick: () => attempt(this.older()) });
    this.rest = h("span", { class: "rest" });
    this.count = h("p", { class: "faint", role: "status" });
    this.element = h("div", null, h("div", { class: "tools" }, this.attempt, this.rank, this.search,
      isReport() ? null : h("label", { class: "check", for: "follow-log" }, this.followBox, "Follow"), this.further), this.lines, this.count);
    // One request at a time: a newer one of any kind ends the one before.
    this.request = newest((signal, query) => fetchJson("/api/logs", { run: this.id, ...this.chosen, search: this.search.value.trim(), ...query }, signal));
  }

  options(select, values, chosen, word) {
    if (select.dataset.values !== JSON.stringify(values)) {
      select.dataset.values = JSON.stringify(values);
      replace(select, values.map((value) => h("option", { value }, `${word} ${value}`)));
    }
    select.value = String(chosen);
    select.hidden = values.length < 2;
  }

  async load() {
    const page = await this.request({});
    if (page) this.show(page);
  }

  // Lines that were added. After a restart the newest attempt is another one, and its log begins anew.
  async more() {
    if (!this.followBox.checked && this.page) return;
    if (!this.page?.has_log) { await this.load(); return; }
    const before = this.page, page = await this.request({ after: before.offset || null });
    if (!page) return;
    if (page.attempt !== before.attempt || page.rank !== before.rank) { await this.load(); return; }
    if (page.is_cut || !before.offset) { this.show(page); return; }
    const isAtEnd = this.lines.scrollHeight - this.lines.scrollTop - this.lines.clientHeight < 40;
    this.page = { ...page, searched_from: before.searched_from };
    this.rest.before(...page.lines.map((line) => h("span", null, `${line}\n`)));
    while (this.lines.childNodes.length > MOST_LINES) this.lines.firstChild.remove();
    this.finish(isAtEnd);
  }

  // The lines, or matches, before the oldest one.
  async older() {
    const page = await this.request({ before: this.page.searched_from });
    if (!page) return;
    const height = this.lines.scrollHeight, top = this.lines.scrollTop;
    this.lines.prepend(...page.lines.map((line) => h("span", null, `${line}\n`)));
    this.page.searched_from = page.searched_from;
    this.lines.scrollTop = top + this.lines.scrollHeight - height;
    this.tell();
  }

  show(page) {
    this.page = page;
    replace(this.lines, page.has_log ? page.lines.map((line) => h("span", null, `${line}\n`)) : h("span", { class: "faint" }, isReport() ? "This report has no lines of logs.\n" : "This run has no log files: its ranks print to their own terminal, or none has been started.\n"), this.rest);
    this.finish(true);
  }

  finish(isAtEnd) {
    this.options(this.attempt, this.page.attempts, this.page.attempt, "Attempt");
    this.options(this.rank, this.page.ranks, this.page.rank, "Rank");
    this.rest.textContent = this.page.rest;
    if (isAtEnd) this.lines.scrollTop = this.lines.scrollHeight;
    this.tell();
  }

  tell() {
    const count = this.page.has_log ? this.lines.childNodes.length - 1 : 0, search = this.search.value.trim();
    this.further.hidden = !this.page.searched_from;
    this.further.textContent = search ? "Search further" : "Older lines";
    this.count.textContent = search ? `${whole(count)} matching lines${this.page.searched_from ? " in the newest part of the log" : ""}` : `${whole(count)} newest lines`;
    if (this.page.is_end_only) this.count.textContent += ". This report has only the end of the log.";
  }
}
