// Overview: how drafting does, against plain decoding, by who drafts, and what happened lately.

import { Chart, fromZero, share } from "../chart.js";
import { h } from "../dom.js";
import { marksOf } from "../events.js";
import { fixed, percent, seconds, times, whole } from "../format.js";
import * as statistics from "../statistics.js";
import { Lately, Tile, card, rateBars, tiles } from "../widgets.js";

// Whoever drafts keeps its colour, whatever the others do.
export const inkOf = (source) =>
  ({ recall: "--recall", request: "--recall", copy: "--recall", grammar: "--grammar", target: "--target" })[source] ?? "--drafter";

const NO_DRAFTS = "No round has drafted yet.";
const BY = {
  source: { drafted: (bins) => statistics.byLabel(bins, "source_drafted"), accepted: (bins) => statistics.byLabel(bins, "source_accepted") },
  version: { drafted: (bins, own) => versions(bins, "version_drafted", own), accepted: (bins, own) => versions(bins, "version_accepted", own) },
  domain: { drafted: (bins) => statistics.byLabel(bins, "version_drafted"), accepted: (bins) => statistics.byLabel(bins, "version_accepted") },
};

// Of the service's own domain: each says its own number.
function versions(bins, name, own) {
  const found = statistics.byLabel(bins, name, 2, ([, domain]) => domain === own);
  return Object.fromEntries(Object.entries(found).map(([version, value]) => [version === "older" ? version : `v${version}`, value]));
}

export class Overview {
  title = "Overview";

  constructor() {
    this.by = "source";
    this.now = {
      acceptance: new Tile("acceptance", "Acceptance rate"),
      length: new Tile("length", "Mean acceptance length"),
      speed: new Tile("speed", "Against plain decoding"),
      version: new Tile("version", "Drafter in service"),
      load: new Tile("load", "Running / waiting"),
    };
    this.charts = {
      acceptance: new Chart({
        title: "Acceptance rate", note: "Share of draft tokens that the target kept; few drafts are drawn towards the mean, the band is what they leave open",
        series: [{ name: "acceptance", ink: "--accent" }], format: percent, label: (value) => percent(value, 0), range: share, empty: NO_DRAFTS, count: "drafted",
      }),
      length: new Chart({
        title: "Mean acceptance length", note: "Tokens of a round that drafted, the target's own included",
        series: [{ name: "length", ink: "--accent" }], format: fixed(2), range: (_, high) => [1, Math.max(2, 1.1 * high)], empty: NO_DRAFTS, count: "rounds",
      }),
      speed: new Chart({
        title: "Decoding speed", note: "Tokens a second of an engine at work, beside what plain decoding would have made of the same seconds",
        series: [{ name: "with drafts", ink: "--accent" }, { name: "plain", ink: "--target", dash: true }], format: fixed(0), range: fromZero(10),
        empty: "No traffic yet: ask something in the Playground.",
      }),
      tokens: new Chart({
        title: "Tokens served", note: "Completion tokens a second, all replicas",
        series: [{ name: "tokens/s", ink: "--accent", area: true }], format: fixed(0), range: fromZero(10),
        empty: "No traffic yet: ask something in the Playground.",
      }),
    };
    for (const [name, chart] of Object.entries(this.charts)) chart.box.id = `chart-${name}`;
    this.buttons = Object.keys(BY).map((by) =>
      h("button", { type: "button", "aria-pressed": String(by === this.by), "data-by": by, onclick: () => this.choose(by) }, by));
    this.breakdown = h("div", { class: "bars", id: "breakdown" });
    this.positions = h("div", { class: "bars", id: "positions" });
    this.lately = new Lately("Lately", "Versions, canaries and drift, the newest first", undefined, "Nothing was published, swapped or rejected yet.");
    this.lately.list.id = "events";
    const by = card("Acceptance by", "Accepted of drafted tokens in the time shown, and the range that they leave open",
      h("div", { class: "segments", role: "group", "aria-label": "Acceptance by" }, this.buttons), this.breakdown);
    const place = card("Acceptance by position", "Share of drafting rounds that kept the token at that place of the draft", this.positions);
    this.element = h("div", { class: "page" }, tiles(Object.values(this.now), "Now"),
      h("section", { class: "charts", "aria-label": "Over time" }, Object.values(this.charts).map((chart) => chart.element)),
      h("section", { class: "columns" }, by.element, place.element), this.lately.element);
  }

  choose(by) {
    this.by = by;
    for (const button of this.buttons) button.setAttribute("aria-pressed", String(button.dataset.by === by));
    if (this.data) this.show(this.data);
  }

  show(data) {
    this.data = data;
    const { bins, state } = data;
    this.tiles(bins, state);
    const shown = { span: data.span, marks: marksOf(data) };
    const [drafted, rounds] = [statistics.series(bins, "drafted"), statistics.series(bins, "rounds")];
    const rate = statistics.rates(statistics.series(bins, "accepted"), drafted);
    this.charts.acceptance.show(bins.time, [rate.value], { ...shown, low: rate.low, high: rate.high, counts: drafted });
    const length = statistics.means(statistics.series(bins, "accepted"), rounds).map((value) => (value === null ? null : 1 + value));
    this.charts.length.show(bins.time, [length], { ...shown, counts: rounds });
    const tokens = statistics.overLabels(bins, "version_tokens");
    const speed = (name) => {
      const took = statistics.overLabels(bins, name);
      const mean = statistics.total(took) ? statistics.total(took) / statistics.total(tokens) : 0;
      return tokens.map((n, index) => (n && mean ? (n + statistics.PRIOR) / (took[index] + statistics.PRIOR * mean) : null));
    };
    this.charts.speed.show(bins.time, [speed("version_decode_seconds"), speed("version_plain_seconds")], shown);
    const served = statistics.series(bins, "completion_tokens");
    this.charts.tokens.show(bins.time, [statistics.total(served) ? served.map((n) => n / bins.width) : bins.time.map(() => null)], shown);
    this.bars(bins, state);
    this.lately.show(state.events);
  }

  tiles(bins, { replicas, totals, drafter, canary, share: part, pinned }) {
    const rate = statistics.recent(bins, "accepted", "drafted", 500);
    this.now.acceptance.show(rate.of ? percent(rate.part / rate.of) : "–", rate.of ? `${whole(rate.part)} of ${whole(rate.of)} drafted, last ${seconds(rate.seconds)}` : "nothing drafted in the time shown");
    const length = statistics.recent(bins, "accepted", "rounds", 150);
    this.now.length.show(length.of ? fixed(2)(1 + length.part / length.of) : "–", length.of ? `of ${whole(length.of)} rounds, last ${seconds(length.seconds)}` : "no round drafted");
    const [plain, took, tokens] = ["plain_seconds", "decode_seconds", "tokens"].map((name) => statistics.total(statistics.overLabels(bins, `version_${name}`)));
    this.now.speed.show(took ? times(plain / took) : "–", took ? `${fixed(0)(tokens / took)} tokens/s, plain ${fixed(0)(tokens / plain)}; of ${whole(tokens)} tokens` : "no tokens with drafts");
    const off = drafter === "none" || (replicas.length > 0 && replicas.every(({ speculation }) => !speculation));
    const serving = [...new Set(replicas.map(({ version }) => `v${version}`))].join(", ");
    const trial = canary === null ? "" : `, v${canary} on trial for ${percent(part, 0)} of requests`;
    this.now.version.show(off ? "off" : serving || "–", off ? "every request decodes plainly" : `${drafter}, ${whole(totals.swaps)} swaps${trial}${pinned ? ", pinned" : ""}`);
    const sum = (name) => replicas.reduce((all, replica) => all + replica[name], 0);
    this.now.load.show(`${sum("running")} / ${sum("waiting")}`, `${whole(totals.requests)} requests so far, ${whole(totals.failed)} failed`, totals.failed ? "bad" : "");
  }

  bars(bins, { domain }) {
    const { drafted, accepted } = BY[this.by];
    const [of, part] = [drafted(bins, domain), accepted(bins, domain)];
    const kept = statistics.total(Object.values(part));
    const rows = Object.keys(of).filter((name) => of[name]).sort((a, b) => of[b] - of[a]).map((name) => ({
      name, part: part[name] ?? 0, of: of[name], ink: this.by === "source" ? inkOf(name) : "--accent",
      more: kept ? `, ${percent((part[name] ?? 0) / kept, 0)} of all kept` : "",
    }));
    rateBars(this.breakdown, rows, NO_DRAFTS);
    const rounds = statistics.sum(bins, "rounds");
    const places = statistics.byLabel(bins, "accepted_per_position");
    const ranks = Object.keys(places).map(Number).sort((a, b) => a - b);
    rateBars(this.positions, rounds ? ranks.map((rank) => ({ name: `${rank + 1}`, part: places[rank], of: rounds })) : [], rounds ? "No draft token was accepted yet." : NO_DRAFTS);
  }
}
