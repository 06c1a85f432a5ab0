// Overview page: speed-up over plain decoding, acceptance by source, version, domain and phase, and recent events.

import * as account from "../account.js";
import { h } from "../dom.js";
import { marksOf } from "../events.js";
import { Figures } from "../figures.js";
import { fixed, percent, times, whole } from "../format.js";
import * as statistics from "../statistics.js";
import { RecentEvents, Tile, card, charts, rateBars, tiles } from "../widgets.js";

// Returns the colour of a source, which is the same in all charts.
export const inkOf = (source) =>
  ({ recall: "--recall", request: "--recall", copy: "--recall", grammar: "--grammar", target: "--target" })[source] ?? "--drafter";

const NO_DRAFTS = "No drafts yet.";

export class Overview {
  constructor({ display }) {
    this.figures = new Figures("overview", display);
    this.version = new Tile("version", "Drafter in service");
    this.speedup = new Tile("speedup", "Speed-up");
    this.trained = {
      cost: new Tile("cost", "Training cost"), gain: new Tile("gain", "Training gain"),
      paidBack: new Tile("paid-back", "Paid back"), trial: new Tile("trial", "On trial"),
    };
    this.by = this.figures.page.breakdowns[0];
    this.buttons = this.figures.page.breakdowns.map((breakdown) =>
      h("button", { type: "button", "aria-pressed": String(breakdown === this.by), "data-by": breakdown.by, onclick: () => this.choose(breakdown) }, breakdown.by));
    this.breakdown = h("div", { class: "bars", id: "breakdown" });
    this.positions = h("div", { class: "bars", id: "positions" });
    this.events = new RecentEvents("Recent events", "Versions, canaries and drift, newest first", undefined, "No version was published, swapped or rejected yet.");
    this.events.list.id = "events";
    const by = card("Acceptance by", "Accepted share of draft tokens in this time range, with its 95 % interval",
      h("div", { class: "segments", role: "group", "aria-label": "Acceptance by" }, this.buttons), this.breakdown);
    this.byPhase = h("div", { class: "bars" });
    this.phases = card("Thinking and answers", "Accepted share of draft tokens while the target thinks and while it answers, in this time range, with its 95 % interval", this.byPhase).element;
    this.phases.id = "phases";
    const place = card("Acceptance by position", "Share of drafts whose token at this position was accepted", this.positions);
    const { acceptance, length, load } = this.figures.tiles;
    this.element = h("div", { class: "page" }, tiles([this.speedup, acceptance, length, this.version, load], "Now"), tiles(Object.values(this.trained), "Training"), charts(this.figures.charts),
      h("section", { class: "columns" }, by.element, place.element), this.phases, this.events.element);
  }

  choose(by) {
    this.by = by;
    for (const button of this.buttons) button.setAttribute("aria-pressed", String(button.dataset.by === by.by));
    this.bars(this.data);
  }

  show(data) {
    this.data = data;
    this.figures.show(data, { span: data.span, marks: marksOf(data) });
    this.showVersion(data.state);
    this.showSpeedup(data.state);
    this.showTraining(data.state);
    this.bars(data);
    this.showPhases(data.bins);
    this.events.show(data.state.events);
  }

  showVersion({ replicas, totals, drafter, canary, share, pinned }) {
    const off = drafter === "none" || (replicas.length > 0 && replicas.every(({ speculation }) => !speculation));
    const serving = [...new Set(replicas.map(({ version }) => `v${version}`))].join(", ");
    const trial = canary === null ? "" : `, v${canary} on trial in ${percent(share, 0)} of the steps`;
    this.version.show(off ? "off" : serving || "–", off ? "every request uses plain decoding" : `${drafter}, ${whole(totals.swaps)} swaps${trial}${pinned ? ", pinned" : ""}`);
  }

  // Shows the speed-up, which is measured by short blocks of steps without drafting.
  showSpeedup({ speedup }) {
    if (speedup === null) {
      this.speedup.show("–", "over plain decoding, not measured yet");
      return;
    }
    const { estimate, low, high, price, guarded } = speedup;
    const range = low === null ? "too few trials for an interval" : `${low.toFixed(2)} to ${times(high)} at the same load`;
    const off = guarded ? `, drafting is off in ${whole(guarded)} replicas because it lost time` : "";
    this.speedup.show(times(estimate), `${range}; the measurement costs ${percent(price)}${off}`, guarded ? "bad" : "");
  }

  showTraining({ training, domain }) {
    const report = training[domain];
    this.trained.cost.show(...account.cost(report));
    for (const name of ["gain", "paidBack", "trial"]) this.trained[name].show(...account[name](report?.account));
  }

  // Shows the phases only if a step drafted while the target was thinking.
  showPhases(bins) {
    const { part, of, steps } = this.figures.page.phases;
    const [accepted, drafted, rounds] = [part, of, steps].map((name) => statistics.byLabel(bins, name));
    this.phases.hidden = !drafted.thinking;
    rateBars(this.byPhase, ["thinking", "answer"].filter((name) => drafted[name]).map((name) => {
      const kept = accepted[name] ?? 0;
      return { name, part: kept, of: drafted[name], more: `, ${fixed(2)(kept / rounds[name])} accepted per step` };
    }), NO_DRAFTS);
  }

  bars({ bins, state: { domain } }) {
    const { by, place, own } = this.by;
    const [of, part] = [this.by.of, this.by.part].map((name) => statistics.byLabel(bins, name, place, ([, first]) => !own || first === domain));
    const accepted = statistics.total(Object.values(part));
    const rows = Object.keys(of).filter((name) => of[name]).sort((a, b) => of[b] - of[a]).map((name) => ({
      name: by === "version" && name !== "older" ? `v${name}` : name, part: part[name] ?? 0, of: of[name], ink: by === "source" ? inkOf(name) : "--accent",
      more: accepted ? `, ${percent((part[name] ?? 0) / accepted, 0)} of all accepted` : "",
    }));
    rateBars(this.breakdown, rows, NO_DRAFTS);
    const { positions } = this.figures.page;
    const rounds = statistics.sum(bins, positions.of);
    const places = statistics.byLabel(bins, positions.part);
    const ranks = Object.keys(places).map(Number).sort((a, b) => a - b);
    rateBars(this.positions, rounds ? ranks.map((rank) => ({ name: `${rank + 1}`, part: places[rank], of: rounds })) : [], rounds ? "No draft token was accepted yet." : NO_DRAFTS);
  }
}
