// Answer in the playground: tokens coloured by their source, and the number of tokens of each source.

import { Placer } from "./chat.js";
import { h, put, refill } from "./dom.js";
import { fixed, percent, whole } from "./format.js";

export const GROUPS = {
  recall: ["recall", "drafted by recall, an n-gram cache of the target's answers"],
  drafter: ["drafter", "drafted by the trained drafter"],
  grammar: ["grammar", "the only token that the grammar of the answer allows"],
  target: ["target", "sampled by the target"],
};

const GROUP_OF = { recall: "recall", request: "recall", copy: "recall", grammar: "grammar", forced: "grammar", target: "target" };
export const groupOf = (source) => GROUP_OF[source] ?? "drafter";

const DESCRIPTIONS = {
  recall: "recalled from the shared table",
  request: "recalled from this request",
  copy: "copied from the prompt",
  grammar: "the only token that the grammar allows",
  target: "sampled by the target",
};

// Tooltip of a token.
class Hint {
  constructor() {
    this.element = h("div", { class: "token-hint", role: "tooltip", id: "token-hint", hidden: true });
    document.body.append(this.element);
  }

  show(span, { text, source, probability, best }) {
    const rows = best.map(([candidate, value]) =>
      h("li", { class: candidate === text ? "chosen" : "" }, h("code", {}, JSON.stringify(candidate).slice(1, -1)), h("div", { class: "track" }, h("div", { class: "fill", style: { width: `${100 * value}%` } })), h("b", {}, percent(value))));
    this.element.replaceChildren(
      h("p", { class: "title" }, h("code", {}, JSON.stringify(text).slice(1, -1)), h("span", { class: `swatch ${groupOf(source)}` }), DESCRIPTIONS[source] ?? `drafted by ${source}`),
      h("p", { class: "hint" }, probability === null ? "" : `Probability under the target: ${percent(probability)}.`), h("ol", {}, rows));
    this.element.hidden = false;
    const { left, bottom, top } = span.getBoundingClientRect();
    const { width, height } = this.element.getBoundingClientRect();
    this.element.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
    this.element.style.top = `${bottom + height + 12 < innerHeight ? bottom + 6 : Math.max(8, top - height - 6)}px`;
  }

  hide() {
    this.element.hidden = true;
  }
}

let hint = null;

export class Answer {
  constructor(title) {
    hint ??= new Hint();
    this.placer = new Placer();
    this.tokens = [];
    this.spans = [];
    this.content = "";
    this.active = -1;
    this.body = h("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": `${title}: select tokens with the arrow keys`, "aria-describedby": "token-hint", onkeydown: (event) => this.selectByKey(event), onblur: () => this.select(-1),
      onmouseover: (event) => this.select(this.spans.indexOf(event.target)), onmouseleave: () => this.select(-1), onclick: (event) => this.select(this.spans.indexOf(event.target)) });
    this.speed = h("b", { class: "speed" });
    this.counts = h("p", { class: "counts" });
    this.note = h("p", { class: "hint" });
    this.element = h("section", { class: "answer" }, h("header", {}, h("h3", {}, title), this.speed), this.body, this.counts, this.note);
  }

  append(tokens, content, end = false) {
    this.content += content;
    for (const token of tokens) {
      const span = h("span", { class: `token ${groupOf(token.source)}`, "data-source": token.source });
      token.span = span;
      this.tokens.push(token);
      this.spans.push(span);
      this.body.append(span);
    }
    for (const [token, text] of this.placer.place(tokens, content, end)) token.span.textContent = text;
    this.count();
  }

  // Shows the number of tokens of each group.
  count() {
    const counts = {};
    for (const { source } of this.tokens) counts[groupOf(source)] = (counts[groupOf(source)] ?? 0) + 1;
    const shown = Object.keys(GROUPS).filter((group) => counts[group] || group === "target");
    refill(this.counts, counts, () => shown.map((group) => h("span", { "data-group": group }, h("span", { class: `swatch ${group}` }), `${GROUPS[group][0]} `, h("b", {}, whole(counts[group] ?? 0)))));
  }

  end({ usage, drafts, finish, seconds, after }) {
    this.append([], "", true);
    const last = this.tokens.at(-1);
    if (finish === "stop" && last && last.span.textContent === "") {
      last.span.textContent = "end";
      last.span.classList.add("end");
    }
    this.tokens.filter(({ span }) => !span.textContent).forEach(({ span }) => span.classList.add("part"));
    const rate = seconds > 0 ? after / seconds : null;
    put(this.speed, rate === null ? "" : `${fixed(rate < 100 ? 1 : 0)(rate)} tokens/s`);
    const exact = matchesCounts(this.tokens, usage, drafts);
    this.body.dataset.exact = String(exact);
    const length = drafts.num_spec_steps ? `, ${fixed(2)(drafts.mean_acceptance_length)} tokens per draft` : "";
    put(this.note, exact ? `${whole(usage.completion_tokens)} tokens, ${whole(drafts.num_accepted_draft_tokens)} of ${whole(drafts.num_draft_tokens)} draft tokens accepted${length}` : "The sources of the tokens do not match the counts of the response.");
    this.note.classList.toggle("bad", !exact);
    return rate;
  }

  fail(message) {
    this.append([], "", true);
    put(this.note, message);
    this.note.classList.add("bad");
    this.note.setAttribute("role", "alert");
  }

  selectByKey(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") this.select(-1);
    if (!step || !this.spans.length) return;
    event.preventDefault();
    this.select(Math.min(Math.max(this.active + step, 0), this.spans.length - 1));
  }

  select(index) {
    this.spans[this.active]?.classList.remove("active");
    this.active = index;
    const span = this.spans[index];
    if (!span) return hint.hide();
    span.classList.add("active");
    return hint.show(span, this.tokens[index]);
  }
}

// Returns whether the number of tokens of each source matches the counts of the response.
export function matchesCounts(tokens, usage, drafts) {
  const counts = {};
  for (const { source } of tokens) if (source !== "target") counts[source] = (counts[source] ?? 0) + 1;
  const reported = Object.entries(drafts.sources);
  const each = reported.every(([source, { num_accepted_draft_tokens: accepted }]) => (counts[source] ?? 0) === accepted);
  const drafted = Object.values(counts).reduce((sum, value) => sum + value, 0);
  return each && drafted === drafts.num_accepted_draft_tokens && tokens.length === usage.completion_tokens;
}
