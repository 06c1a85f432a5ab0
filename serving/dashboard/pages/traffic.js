// Traffic: how long requests take, how many wait, how much is drafted for them, and what was dropped.

import { h } from "../dom.js";
import { marksOf } from "../events.js";
import { Figures, listed } from "../figures.js";
import { fixed, seconds, whole } from "../format.js";
import * as statistics from "../statistics.js";
import { Table, card, charts, facts, tiles } from "../widgets.js";

export class Traffic {
  constructor({ display }) {
    this.figures = new Figures("traffic", display);
    this.replicas = new Table("replicas", [["Replica"], ["Drafter"], ["Running", true], ["Waiting", true], ["Longest swap", true]], "No replica has reported yet.");
    this.ends = h("dl", { class: "facts", id: "ends" });
    this.plan = h("dl", { class: "facts", id: "plan" });
    const { first, token, requests, waiting, dropped } = this.figures.tiles;
    this.element = h("div", { class: "page" }, tiles([requests, first, token, waiting, dropped], "Now"), charts(this.figures.charts),
      card("Replicas", "Drafter version, and requests of each", this.replicas.element).element,
      h("section", { class: "columns" },
        card("In the time shown", "How requests and rounds came out", this.ends).element,
        card("The planner", "How it is set, and what it chose", this.plan).element));
  }

  show(data) {
    const { bins, state } = data;
    this.figures.show(data, { span: data.span, marks: marksOf(data) });
    this.replicas.show(state.replicas, () => state.replicas.map((replica) => this.row(replica)));
    facts(this.ends, listed(state, "requests", (key) => statistics.sum(bins, key)));
    const { drafter, growth, governed } = state;
    const lines = this.figures.page.charts.flatMap(({ kind, lines: all }) => all.filter(({ fact }) => fact).map(({ fact, part, of }) => {
      const [some, all] = [statistics.sum(bins, part), statistics.sum(bins, of)];
      return [fact, !all ? "–" : kind === "share" ? `${whole(some)} of ${whole(all)}` : fixed(1)(some / all)];
    }));
    facts(this.plan, [["Drafter", drafter], ["Growth", growth], ["Drafts as much as pays", governed ? "yes" : "no"],
      ...listed(state, "planner", (key) => statistics.sum(bins, key)), ...lines]);
  }

  row({ name, version, canary, others, running, waiting, swap_stall_seconds_max: stall }) {
    const own = canary === null ? `v${version}` : `v${version} and v${canary}`;
    const drafters = [own, ...Object.entries(others).map(([domain, other]) => `${domain} v${other}`)].join(", ");
    return { key: name, cells: [h("code", {}, name), h("span", { class: "why" }, drafters), whole(running), whole(waiting), stall ? seconds(stall) : "–"] };
  }
}
