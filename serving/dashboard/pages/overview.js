// Overview: how drafting does, against plain decoding, by source, version and domain, and what happened lately.

import * as account from "../account.js";
import { h } from "../dom.js";
import { marksOf } from "../events.js";
import { Figures } from "../figures.js";
import { percent, times, whole } from "../format.js";
import * as statistics from "../statistics.js";
import { Lately, Tile, card, charts, rateBars, tiles } from "../widgets.js";

// A source keeps its colour, whatever the others do.
export const inkOf = (source) =>
  ({ recall: "--recall", request: "--recall", copy: "--recall", grammar: "--grammar", target: "--target" })[source] ?? "--drafter";

const NO_DRAFTS = "No round has drafted yet.";

export class Overview {
  constructor({ display }) {
    this.figures = new Figures("overview", display);
    this.version = new Tile("version", "Drafter in service");
    this.speedup = new Tile("speedup", "Speed-up now");
    this.trained = {
      cost: new Tile("cost", "Training cost"), brought: new Tile("brought", "Training brought"),
      paidBack: new Tile("paid-back", "Paid back"), trying: new Tile("trying", "Trying now"),
    };
    this.by = this.figures.page.breakdowns[0];
    this.buttons = this.figures.page.breakdowns.map((one) =>
      h("button", { type: "button", "aria-pressed": String(one === this.by), "data-by": one.by, onclick: () => this.choose(one) }, one.by));
    this.breakdown = h("div", { class: "bars", id: "breakdown" });
    this.positions = h("div", { class: "bars", id: "positions" });
    this.lately = new Lately("Lately", "Versions, canaries and drift, the newest first", undefined, "Nothing was published, swapped or rejected yet.");
    this.lately.list.id = "events";
    const by = card("Acceptance by", "Accepted of drafted tokens in the time shown, and the range that they leave open",
      h("div", { class: "segments", role: "group", "aria-label": "Acceptance by" }, this.buttons), this.breakdown);
    const place = card("Acceptance by position", "Share of drafting rounds that kept the token at that place of the draft", this.positions);
    const { acceptance, length, load } = this.figures.tiles;
    this.element = h("div", { class: "page" }, tiles([this.speedup, acceptance, length, this.version, load], "Now"), tiles(Object.values(this.trained), "Training"), charts(this.figures.charts),
      h("section", { class: "columns" }, by.element, place.element), this.lately.element);
  }

  choose(by) {
    this.by = by;
    for (const button of this.buttons) button.setAttribute("aria-pressed", String(button.dataset.by === by.by));
    this.bars(this.data);
  }

  show(data) {
    this.data = data;
    this.figures.show(data, { span: data.span, marks: marksOf(data) });
    this.running(data.state);
    this.measured(data.state);
    this.training(data.state);
    this.bars(data);
    this.lately.show(data.state.events);
  }

  running({ replicas, totals, drafter, canary, share, pinned }) {
    const off = drafter === "none" || (replicas.length > 0 && replicas.every(({ speculation }) => !speculation));
    const serving = [...new Set(replicas.map(({ version }) => `v${version}`))].join(", ");
    const trial = canary === null ? "" : `, v${canary} on trial in ${percent(share, 0)} of the steps`;
    this.version.show(off ? "off" : serving || "–", off ? "every request decodes plainly" : `${drafter}, ${whole(totals.swaps)} swaps${trial}${pinned ? ", pinned" : ""}`);
  }

  // The speed-up is measured by short blocks of steps in which drafting is off.
  measured({ speedup }) {
    if (speedup === null) {
      this.speedup.show("–", "over plain decoding, not measured yet");
      return;
    }
    const { estimate, low, high, price, guarded } = speedup;
    const range = low === null ? "too few trials for an interval" : `${low.toFixed(2)} to ${times(high)} at the same load`;
    const off = guarded ? `, drafting is off in ${whole(guarded)} replicas as it lost time` : "";
    this.speedup.show(times(estimate), `${range}; measuring costs ${percent(price)}${off}`, guarded ? "bad" : "");
  }

  training({ training, domain }) {
    const own = training[domain];
    this.trained.cost.show(...account.cost(own));
    for (const name of ["brought", "paidBack", "trying"]) this.trained[name].show(...account[name](own?.account));
  }

  bars({ bins, state: { domain } }) {
    const { by, place, own } = this.by;
    const [of, part] = [this.by.of, this.by.part].map((name) => statistics.byLabel(bins, name, place, ([, first]) => !own || first === domain));
    const kept = statistics.total(Object.values(part));
    const rows = Object.keys(of).filter((name) => of[name]).sort((a, b) => of[b] - of[a]).map((name) => ({
      name: by === "version" && name !== "older" ? `v${name}` : name, part: part[name] ?? 0, of: of[name], ink: by === "source" ? inkOf(name) : "--accent",
      more: kept ? `, ${percent((part[name] ?? 0) / kept, 0)} of all kept` : "",
    }));
    rateBars(this.breakdown, rows, NO_DRAFTS);
    const { positions } = this.figures.page;
    const rounds = statistics.sum(bins, positions.of);
    const places = statistics.byLabel(bins, positions.part);
    const ranks = Object.keys(places).map(Number).sort((a, b) => a - b);
    rateBars(this.positions, rounds ? ranks.map((rank) => ({ name: `${rank + 1}`, part: places[rank], of: rounds })) : [], rounds ? "No draft token was accepted yet." : NO_DRAFTS);
  }
}
