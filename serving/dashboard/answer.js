// An answer on the page: its tokens coloured by who they come from, and the counts that they add up to.

import { Placer } from "./chat.js";
import { h, put, refill } from "./dom.js";
import { fixed, percent, whole } from "./format.js";

export const GROUPS = {
  recall: ["recall", "what the target said after these tokens before"],
  drafter: ["drafter", "what the trained drafter proposed"],
  grammar: ["form", "what the form of the answer leaves no choice about"],
  target: ["target", "what the target drew itself"],
};

const OF = { recall: "recall", request: "recall", copy: "recall", grammar: "grammar", forced: "grammar", target: "target" };
export const groupOf = (source) => OF[source] ?? "drafter";

const SAYS = {
  recall: "recalled from the table that all share",
  request: "recalled from this request itself",
  copy: "copied from the prompt",
  grammar: "the form leaves no choice",
  target: "drawn by the target",
};

// The card beside a token.
class Hint {
  constructor() {
    this.element = h("div", { class: "token-hint", role: "tooltip", id: "token-hint", hidden: true });
    document.body.append(this.element);
  }

  show(span, { text, source, probability, best }) {
    const rows = best.map(([other, value]) =>
      h("li", { class: other === text ? "chosen" : "" }, h("code", {}, JSON.stringify(other).slice(1, -1)), h("div", { class: "track" }, h("div", { class: "fill", style: { width: `${100 * value}%` } })), h("b", {}, percent(value))));
    this.element.replaceChildren(
      h("p", { class: "title" }, h("code", {}, JSON.stringify(text).slice(1, -1)), h("span", { class: `swatch ${groupOf(source)}` }), SAYS[source] ?? `drafted by ${source}`),
      h("p", { class: "hint" }, probability === null ? "" : `The target gave it ${percent(probability)}.`), h("ol", {}, rows));
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
    this.body = h("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": `${title}: arrow keys go through its tokens`, "aria-describedby": "token-hint", onkeydown: (event) => this.walk(event), onblur: () => this.point(-1),
      onmouseover: (event) => this.point(this.spans.indexOf(event.target)), onmouseleave: () => this.point(-1), onclick: (event) => this.point(this.spans.indexOf(event.target)) });
    this.speed = h("b", { class: "speed" });
    this.counts = h("p", { class: "counts" });
    this.note = h("p", { class: "hint" });
    this.element = h("section", { class: "answer" }, h("header", {}, h("h3", {}, title), this.speed), this.body, this.counts, this.note);
  }

  hear(tokens, content, end = false) {
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

  // How many tokens each group has.
  count() {
    const found = {};
    for (const { source } of this.tokens) found[groupOf(source)] = (found[groupOf(source)] ?? 0) + 1;
    const shown = Object.keys(GROUPS).filter((group) => found[group] || group === "target");
    refill(this.counts, found, () => shown.map((group) => h("span", { "data-group": group }, h("span", { class: `swatch ${group}` }), `${GROUPS[group][0]} `, h("b", {}, whole(found[group] ?? 0)))));
  }

  end({ usage, drafts, finish, seconds, after }) {
    this.hear([], "", true);
    const last = this.tokens.at(-1);
    if (finish === "stop" && last && last.span.textContent === "") {
      last.span.textContent = "end";
      last.span.classList.add("end");
    }
    this.tokens.filter(({ span }) => !span.textContent).forEach(({ span }) => span.classList.add("part"));
    const rate = seconds > 0 ? after / seconds : null;
    put(this.speed, rate === null ? "" : `${fixed(rate < 100 ? 1 : 0)(rate)} tokens/s`);
    const exact = addsUp(this.tokens, usage, drafts);
    this.body.dataset.exact = String(exact);
    const length = drafts.num_spec_steps ? `, ${fixed(2)(drafts.mean_acceptance_length)} tokens a round that drafted` : "";
    put(this.note, exact ? `${whole(usage.completion_tokens)} tokens, ${whole(drafts.num_accepted_draft_tokens)} of ${whole(drafts.num_draft_tokens)} drafted kept${length}` : "The colours do not add up to the counts of the response.");
    this.note.classList.toggle("bad", !exact);
    return rate;
  }

  fail(message) {
    this.hear([], "", true);
    put(this.note, message);
    this.note.classList.add("bad");
    this.note.setAttribute("role", "alert");
  }

  walk(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") this.point(-1);
    if (!step || !this.spans.length) return;
    event.preventDefault();
    this.point(Math.min(Math.max(this.active + step, 0), this.spans.length - 1));
  }

  point(index) {
    this.spans[this.active]?.classList.remove("active");
    this.active = index;
    const span = this.spans[index];
    if (!span) return hint.hide();
    span.classList.add("active");
    return hint.show(span, this.tokens[index]);
  }
}

// Whether the tokens are those that the response counts, source by source.
export function addsUp(tokens, usage, drafts) {
  const found = {};
  for (const { source } of tokens) if (source !== "target") found[source] = (found[source] ?? 0) + 1;
  const told = Object.entries(drafts.sources);
  const each = told.every(([source, { num_accepted_draft_tokens: kept }]) => (found[source] ?? 0) === kept);
  const drafted = Object.values(found).reduce((sum, value) => sum + value, 0);
  return each && drafted === drafts.num_accepted_draft_tokens && tokens.length === usage.completion_tokens;
}
