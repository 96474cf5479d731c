// Logs of ranks with search and follow.

import { fetchJson, h, replace, whole } from "./dom.js";

const MOST_LINES = 5000;

export class Logs {
  constructor(id) {
    this.id = id;
    this.offset = 0;
    this.lines = h("pre", { class: "log", tabindex: 0, role: "log", "aria-label": "Output of the rank", "aria-live": "off" });
    this.attempt = h("select", { "aria-label": "Attempt", onchange: () => this.load() });
    this.rank = h("select", { "aria-label": "Rank", onchange: () => this.load() });
    this.search = h("input", { type: "search", placeholder: "Search lines", "aria-label": "Search lines", oninput: () => { clearTimeout(this.timer); this.timer = setTimeout(() => this.load(), 250); } });
    this.followBox = h("input", { type: "checkbox", checked: true, id: "follow-log" });
    this.followBox.checked = true;
    this.count = h("p", { class: "faint", role: "status" });
    this.element = h("div", null, h("div", { class: "tools" }, this.attempt, this.rank, this.search,
      h("label", { class: "check", for: "follow-log" }, this.followBox, "Follow")), this.lines, this.count);
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
    const page = await fetchJson("/api/logs", { run: this.id, attempt: this.attempt.value, rank: this.rank.value, search: this.search.value.trim() });
    this.show(page);
    replace(this.lines, page.lines.map((line) => h("span", null, `${line}\n`)));
    if (!page.has_log) replace(this.lines, h("span", { class: "faint" }, "This run has no log files: its ranks print to their own terminal, or none has been started.\n"));
    this.lines.scrollTop = this.lines.scrollHeight;
    this.tell();
  }

  async more() {
    if (!this.followBox.checked) return;
    if (!this.offset) { await this.load(); return; }
    const page = await fetchJson("/api/logs", { run: this.id, attempt: this.attempt.value, rank: this.rank.value, search: this.search.value.trim(), after: this.offset });
    if (!page.lines.length) { this.offset = page.offset || this.offset; return; }
    const isAtEnd = this.lines.scrollHeight - this.lines.scrollTop - this.lines.clientHeight < 40;
    this.show(page);
    this.lines.append(...page.lines.map((line) => h("span", null, `${line}\n`)));
    while (this.lines.childNodes.length > MOST_LINES) this.lines.firstChild.remove();
    if (isAtEnd) this.lines.scrollTop = this.lines.scrollHeight;
    this.tell();
  }

  show(page) {
    this.offset = page.offset;
    this.options(this.attempt, page.attempts, page.attempt, "Attempt");
    this.options(this.rank, page.ranks, page.rank, "Rank");
  }

  tell() {
    const count = this.lines.childNodes.length;
    this.count.textContent = this.search.value.trim() ? `${whole(count)} matching lines` : `${whole(count)} newest lines`;
  }
}
