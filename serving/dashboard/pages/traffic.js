// Traffic page: latencies, queue, size of drafts, and traces.

import { h } from "../dom.js";
import { marksOf } from "../events.js";
import { Figures, listed } from "../figures.js";
import { fixed, percent, seconds, whole } from "../format.js";
import * as statistics from "../statistics.js";
import { Table, card, charts, facts, tiles } from "../widgets.js";

export class Traffic {
  constructor({ display }) {
    this.figures = new Figures("traffic", display);
    this.replicas = new Table("replicas", [["Replica"], ["Drafter"], ["Running", true], ["Waiting", true], ["Longest swap", true]], "No replica has reported yet. A replica reports once a second from its start.");
    this.traced = new Table("traced", [["Domain"], ["Drafter"], ["Requests", true], ["Acceptance", true], ["By position", true]], "No trace of a vLLM has arrived yet. Each captured request sends one when it ends.");
    this.tracedCard = card("Traced requests", "Draft tokens that verification reached, in the captured requests of vLLM since the trainer started", this.traced.element).element;
    this.ends = h("dl", { class: "facts", id: "ends" });
    this.plan = h("dl", { class: "facts", id: "plan" });
    const { first, token, requests, waiting, dropped } = this.figures.tiles;
    this.element = h("div", { class: "page" }, tiles([requests, first, token, waiting, dropped], "Now"), charts(this.figures.charts),
      card("Replicas", "Drafter versions and requests of each replica", this.replicas.element).element,
      this.tracedCard,
      h("section", { class: "columns" },
        card("Requests", "Counts in this time range", this.ends).element,
        card("Planner", "Settings, and counts in this time range", this.plan).element));
  }

  show(data) {
    const { bins, state } = data;
    this.figures.show(data, { span: data.span, marks: marksOf(data) });
    this.replicas.show(state.replicas, () => state.replicas.map((replica) => this.row(replica)));
    this.tracedCard.hidden = !state.traced.length;
    this.traced.show(state.traced, () => state.traced.map(tracedRow));
    facts(this.ends, listed(state, "requests", (key) => statistics.sum(bins, key)));
    const { drafter, growth, governed } = state;
    const lines = this.figures.page.charts.flatMap(({ kind, lines: all }) => all.filter(({ fact }) => fact).map(({ fact, part, of }) => {
      const [sum, base] = [statistics.sum(bins, part), statistics.sum(bins, of)];
      return [fact, !base ? "–" : kind === "share" ? `${whole(sum)} of ${whole(base)}` : fixed(1)(sum / base)];
    }));
    facts(this.plan, [["Drafter", drafter], ["Growth", growth], ["Draft size follows its measured value", governed ? "yes" : "no"],
      ...listed(state, "planner", (key) => statistics.sum(bins, key)), ...lines]);
  }

  row({ name, version, canary, others: domains, running, waiting, swap_stall_seconds_max: stall }) {
    const versions = canary === null ? `v${version}` : `v${version} and v${canary}`;
    const drafters = [versions, ...Object.entries(domains).map(([domain, number]) => `${domain} v${number}`)].join(", ");
    return { key: name, cells: [h("code", {}, name), h("span", { class: "why" }, drafters), whole(running), whole(waiting), stall ? seconds(stall) : "–"] };
  }
}

function tracedRow({ domain, version, requests, tested, accepted }) {
  const [all, kept] = [tested, accepted].map((counts) => counts.reduce((sum, count) => sum + count, 0));
  const places = tested.map((of, place) => percent(accepted[place] / of, 0));
  return { key: `${domain} ${version}`, cells: [h("code", {}, domain), `v${version}`, whole(requests), `${percent(kept / all)} of ${whole(all)}`, places.join(", ")] };
}
