// Overview page: four answers, acceptance and speed over time, recent events, and acceptance in detail.

import * as account from "../account.js";
import { h, put, refill } from "../dom.js";
import { marksOf } from "../events.js";
import { Figures } from "../figures.js";
import { fixed, percent } from "../format.js";
import { problems } from "../problems.js";
import * as statistics from "../statistics.js";
import { Lines, RecentEvents, card, charts, rateBars } from "../widgets.js";

// Returns the colour of a source, which is the same in all charts.
export const inkOf = (source) =>
  ({ recall: "--recall", request: "--recall", copy: "--recall", grammar: "--grammar", target: "--target" })[source] ?? "--drafter";

// Returns the name of a version; recall alone and initial weights draft without one.
const versionName = (number) => ({ 0: "no version", older: "older" })[number] ?? `v${number}`;

export class Overview {
  constructor({ display }) {
    this.figures = new Figures("overview", display);
    this.by = this.figures.page.breakdowns[0];
    this.noDrafts = this.figures.page.charts[0].empty;
    this.buttons = this.figures.page.breakdowns.map((breakdown) =>
      h("button", { type: "button", "aria-pressed": String(breakdown === this.by), "data-by": breakdown.by, onclick: () => this.choose(breakdown) }, breakdown.by));
    this.breakdown = h("div", { class: "bars", id: "breakdown" });
    this.positions = h("div", { class: "bars", id: "positions" });
    this.events = new RecentEvents("Recent events", "Why acceptance or speed changed: versions, canaries and drift, newest first", undefined,
      "No event yet. An event appears when a version is published, swapped in, rejected or rolled back, and when acceptance falls.");
    this.events.list.id = "events";
    const by = card("Acceptance by", "Accepted share of draft tokens in this time range, with its 95 % interval",
      h("div", { class: "segments", role: "group", "aria-label": "Acceptance by" }, this.buttons), this.breakdown);
    this.byPhase = h("div", { class: "bars" });
    this.phases = card("Thinking and answers", "Accepted share of draft tokens while the target thinks and while it answers, in this time range, with its 95 % interval", this.byPhase).element;
    this.phases.id = "phases";
    const place = card("Acceptance by position", "Share of drafts whose token at this position was accepted", this.positions);
    const [acceptance, speed, length] = this.figures.charts;
    this.element = h("div", { class: "page" }, this.answers(), charts([acceptance, speed]), this.events.element,
      h("section", { class: "columns" }, by.element, place.element), this.phases, charts([length]));
  }

  // Creates the cards that answer how much faster, at which cost, with which version, and whether anything is wrong.
  answers() {
    const { acceptance, length } = this.figures.tiles;
    this.speedup = { figure: h("p", { class: "figure", id: "now-speedup" }), note: h("p", { class: "note", id: "note-speedup" }) };
    this.training = new Lines({ cost: "Cost", saved: "Saved", gain: "Gain", payback: "Payback" });
    this.versions = new Lines({ version: "In service", trial: "Tried now", trainer: "Trainer" });
    this.problems = h("ul", { class: "problems", id: "problems" });
    const answer = (id, title, ...body) => h("article", { class: "card", id: `answer-${id}` }, h("h2", {}, title), ...body);
    return h("section", { class: "summary", "aria-label": "Summary" },
      answer("speed", "How much faster?", this.speedup.figure, this.speedup.note,
        h("div", { class: "pair" }, [["Acceptance rate", acceptance], ["Mean acceptance length", length]].map(([name, { figure, note }]) => h("div", {}, h("h3", {}, name), figure, note)))),
      answer("cost", "Does training pay?", this.training.element),
      answer("versions", "What runs, and what is tried?", this.versions.element, h("a", { href: "#versions" }, "Roll back or pin a version")),
      answer("problems", "Is anything wrong?", this.problems));
  }

  choose(by) {
    this.by = by;
    for (const button of this.buttons) button.setAttribute("aria-pressed", String(button.dataset.by === by.by));
    this.bars(this.data);
  }

  show(data) {
    this.data = data;
    this.figures.show(data, { span: data.span, marks: marksOf(data) });
    this.showAnswers(data);
    this.bars(data);
    this.showPhases(data.bins);
    this.events.show(data.state.events);
  }

  showAnswers(data) {
    const { state } = data;
    const fund = state.training[state.domain]?.account;
    const [figure, note] = account.speedup(state);
    put(this.speedup.figure, figure);
    put(this.speedup.note, note);
    this.speedup.figure.classList.toggle("words", !/^\d/.test(figure));
    this.training.show("cost", account.cost(state));
    this.training.show("saved", account.saved(fund));
    this.training.show("gain", account.gain(fund));
    this.training.show("payback", account.payback(fund, state.funds));
    this.versions.show("version", account.running(state));
    this.versions.show("trial", account.tried(state));
    this.versions.show("trainer", account.activity(state));
    const all = problems(data);
    refill(this.problems, all, () => (all.length
      ? all.map(([text, action]) => h("li", { class: "bad" }, text, " ", h("span", { class: "note" }, action)))
      : h("li", { class: "good" }, "No problem found.")));
  }

  // Shows the phases only if a step drafted while the target was thinking.
  showPhases(bins) {
    const { part, of, steps } = this.figures.page.phases;
    const [accepted, drafted, rounds] = [part, of, steps].map((name) => statistics.byLabel(bins, name));
    this.phases.hidden = !drafted.thinking;
    rateBars(this.byPhase, ["thinking", "answer"].filter((name) => drafted[name]).map((name) => {
      const kept = accepted[name] ?? 0;
      return { name, part: kept, of: drafted[name], more: `, ${fixed(2)(kept / rounds[name])} accepted per step` };
    }), this.noDrafts);
  }

  bars({ bins, state: { domain } }) {
    const { by, place, own } = this.by;
    const [of, part] = [this.by.of, this.by.part].map((name) => statistics.byLabel(bins, name, place, ([, first]) => !own || first === domain));
    const accepted = statistics.total(Object.values(part));
    const rows = Object.keys(of).filter((name) => of[name]).sort((a, b) => of[b] - of[a]).map((name) => ({
      name: by === "version" ? versionName(name) : name, part: part[name] ?? 0, of: of[name], ink: by === "source" ? inkOf(name) : "--accent",
      more: accepted ? `, ${percent((part[name] ?? 0) / accepted, 0)} of all accepted` : "",
    }));
    rateBars(this.breakdown, rows, this.noDrafts);
    const { positions } = this.figures.page;
    const rounds = statistics.sum(bins, positions.of);
    const places = statistics.byLabel(bins, positions.part);
    const ranks = Object.keys(places).map(Number).sort((a, b) => a - b);
    rateBars(this.positions, rounds ? ranks.map((rank) => ({ name: `${rank + 1}`, part: places[rank], of: rounds })) : [], rounds ? "No draft token was accepted yet." : this.noDrafts);
  }
}
