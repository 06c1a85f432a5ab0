// Learning: what training does, what its verdicts were, and whether it pays.

import { Chart, fromZero } from "../chart.js";
import { h } from "../dom.js";
import { badgeOf, marksOf, storyOf, told } from "../events.js";
import { listed } from "../figures.js";
import { bytes, fixed, percent, seconds, signed, when, whole } from "../format.js";
import * as statistics from "../statistics.js";
import { Table, Tile, badge, card, charts, facts, rateBars, tiles } from "../widgets.js";
import { inkOf } from "./overview.js";

const VERDICTS = ["published", "canary", "promoted", "rolled_back", "rejected", "drift", "revision"];
const AT_REST = "The trainer has not told a step yet: it begins when records have come and learning is expected to pay.";

export class Learning {
  constructor() {
    this.now = {
      loss: new Tile("loss", "Training loss"),
      records: new Tile("records", "Records"),
      verdicts: new Tile("verdicts", "Gate"),
      value: new Tile("value", "Next slice of training"),
      net: new Tile("net", "Net of everything"),
    };
    this.charts = {
      loss: new Chart({
        title: "Training loss", note: "Divergence of the drafter from the target, each micro-step", series: [{ name: "loss", ink: "--drafter" }],
        format: fixed(3), label: fixed(2), range: fromZero(0.1), empty: AT_REST,
      }),
      ledger: new Chart({
        title: "Ledger over time", note: "Seconds that drafts saved in serving, against the CPU seconds that training took",
        series: [{ name: "saved", ink: "--accent" }, { name: "training", ink: "--drafter" }, { name: "net", ink: "--ink", dash: true }],
        format: seconds, range: (low, high) => [Math.min(0, 1.1 * low), Math.max(0.01, 1.1 * high, -0.1 * low)], empty: "Nothing was drafted and nothing trained in the time shown.",
      }),
      value: new Chart({
        title: "What the next slice is worth", note: "Seconds of a core that it is expected to save, and those that it costs",
        series: [{ name: "earns", ink: "--accent" }, { name: "costs", ink: "--drafter", dash: true }], format: seconds, range: fromZero(0.01),
        empty: "The trainer has not reckoned with requests yet: while none run it learns freely.",
      }),
    };
    for (const [name, chart] of Object.entries(this.charts)) chart.box.id = `chart-${name}`;
    this.verdicts = new Table("verdicts", [["Time"], ["Verdict"], ["Version"], ["Expected length", true], ["Acceptance", true], ["Why"]], "No candidate was judged yet.");
    this.ledger = new Table("ledger",
      [["Version"], ["Tokens", true], ["Plain", true], ["Took", true], ["Saved", true], ["Training", true], ["Net", true], ["Payback", true]],
      "Nothing was drafted and nothing trained yet.");
    this.replay = h("dl", { class: "facts", id: "replay" });
    this.stream = h("dl", { class: "facts", id: "stream" });
    this.sizes = h("dl", { class: "facts", id: "recall" });
    this.hits = h("div", { class: "bars wide", id: "hits" });
    this.learning = card("Learning stream", "", this.stream);
    const verdicts = card("Gate and canary", "Each candidate is judged on records that it was not trained on, and may have to prove itself in a share of the decoding steps", this.verdicts.element);
    const ledger = card("Ledger by version", "Payback: seconds in service until a version is expected to have saved what it took", this.ledger.element);
    this.element = h("div", { class: "page" }, tiles(Object.values(this.now), "Now"),
      charts(Object.values(this.charts)),
      verdicts.element, ledger.element,
      h("section", { class: "columns" },
        card("Replay", "What is trained on again", this.replay).element, this.learning.element),
      card("Recall", "What the target said after these tokens: the tables, and their hits since the start by how many tokens were looked up", this.sizes, this.hits).element);
  }

  show(data) {
    const { bins, state, steps } = data;
    const training = state.training[state.domain];
    this.tiles(state, training, steps);
    const shown = { span: data.span, marks: marksOf(data) };
    const inside = steps.filter(([time]) => time >= data.span[0]);
    const losses = inside.filter(([, loss]) => loss != null);
    this.charts.loss.show(losses.map(([time]) => time), [losses.map(([, loss]) => loss)], shown);
    this.overTime(data, inside, shown);
    const offers = state.investments.filter(([time, earns]) => time >= data.span[0] && earns != null);
    this.charts.value.show(offers.map(([time]) => time), [offers.map(([, earns]) => earns), offers.map(([, , costs]) => costs)], shown);
    this.judged(state.events);
    this.account(state.ledger);
    this.hold(state, training);
  }

  tiles({ training, ledger, domain }, own, steps) {
    const others = Object.keys(training).filter((name) => name !== domain).length;
    const loss = own?.loss ?? steps.at(-1)?.[1] ?? null;
    this.now.loss.show(fixed(3)(loss), own ? `${whole(own.steps)} micro-steps${others ? `, ${others} more domains` : ""}` : "no step yet");
    this.now.records.show(whole(own?.records ?? 0), own ? `${whole(own.trained)} trained on, ${whole(own.held_out)} only judge` : "none has come to the trainer");
    this.now.verdicts.show(own ? `${whole(own.passed)} / ${whole(own.passed + own.rejected)}` : "–", own ? `passed of judged; ${whole(own.drifts)} drift${own.drifts === 1 ? "" : "s"}` : "no candidate was judged");
    const offer = own?.expected;
    this.now.value.show(offer ? (offer.pays ? "pays" : "rests") : "–", offer ? `earns ${seconds(offer.earns)}, costs ${seconds(offer.costs)}` : "not reckoned yet");
    const { net, payback, training: spent } = ledger.total;
    this.now.net.show(signed(seconds)(net), payback == null ? (spent ? "not expected to pay back" : "nothing spent on training") : `pays back after ${seconds(payback)} in service`);
  }

  // What was saved until each bin follows from what has been saved until now; what was spent, from the steps that said so.
  overTime({ bins, state }, steps, shown) {
    const saved = statistics.series(bins, state.display.saved, true);
    const { saved: all, training } = state.ledger.total;
    let until = all;
    const line = [];
    for (let index = bins.time.length - 1; index >= 0; index -= 1) {
      line[index] = until;
      until -= saved[index];
    }
    let next = 0, spent = steps[0]?.[2] ?? training;
    const cost = bins.time.map((time) => {
      while (next < steps.length && steps[next][0] <= time + bins.width) spent = steps[next++][2] ?? spent;
      return spent;
    });
    const any = all !== 0 || training !== 0;
    const none = bins.time.map(() => null);
    this.charts.ledger.show(bins.time, any ? [line, cost, line.map((value, index) => value - cost[index])] : [none, none, none], shown);
  }

  judged(events) {
    const rows = told(events, VERDICTS).slice(0, 30);
    this.verdicts.show(rows, () =>
      rows.map((event) => {
        const [name, mood] = badgeOf(event);
        const gain = (now, before, format) => (now == null ? "–" : [format(now), before == null ? "" : h("span", { class: "delta" }, `from ${format(before)}`)]);
        return {
          key: event.time,
          cells: [
            when(event.time), badge(name, mood), event.version == null ? "–" : `v${event.version}`,
            gain(event.expected_length, event.baseline_expected_length, fixed(2)),
            gain(event.acceptance ?? event.now, event.baseline_acceptance ?? event.before, percent),
            h("span", { class: "why" }, event.reason ?? storyOf(event)),
          ],
        };
      }));
  }

  account({ versions, unpublished, total }) {
    const rows = [...versions].reverse().map((row) => ({ ...row, name: row.version === "older" ? "older" : `v${row.version}` }));
    if (unpublished) rows.unshift({ name: "in training", training: unpublished });
    if (rows.length) rows.push({ ...total, name: "total" });
    this.ledger.show(rows, () =>
      rows.map((row) => {
        const judged = (value) => (value == null ? "–" : h("span", { class: value < 0 ? "bad" : "good" }, signed(seconds)(value)));
        return {
          key: row.name, mood: row.name === "total" ? "total" : "", keep: row.name === "total",
          cells: [row.name, whole(row.tokens), seconds(row.plain), seconds(row.decode), judged(row.saved), seconds(row.training), judged(row.net), seconds(row.payback)],
        };
      }));
  }

  hold({ stream, totals, capture, recall, training, display }, own) {
    const hint = !capture ? "Capture is off: nothing is learned from requests."
      : stream.redis ? "Traces on their way to the trainer" : "Redis does not answer: traces are dropped until it does.";
    this.learning.hint.textContent = hint;
    facts(this.replay, own ? [["Records", whole(own.replay_records)], ["Tokens", whole(own.replay_tokens)], ["Memory", bytes(own.replay_bytes)],
      ["Tokens trained on, repeats included", whole(own.positions)], ["CPU seconds of training", seconds(own.cpu_seconds)], ["Lost by rounds beside it", seconds(own.slowed_seconds)],
      ...Object.entries(training).filter(([, one]) => one !== own).map(([domain, one]) => [`Records of ${domain}`, whole(one.replay_records)])]
      : [["Records", "none yet"]]);
    const kept = Object.values(stream.domains).reduce((all, one) => all + one.records, 0);
    const waits = ({ lag, age, records, bytes: size }) =>
      lag === null ? `nobody learns from its ${whole(records)}` : lag ? `${whole(lag)}${age === null ? "" : `, the oldest for ${seconds(age)}`}` : `none, ${bytes(size)} kept`;
    facts(this.stream, [["Kept for training", `${whole(kept)} of at most ${whole(stream.capacity)}`],
      ...Object.entries(stream.domains).map(([domain, one]) => [`Waiting of ${domain}`, waits(one)]),
      ...listed({ display }, "stream", (key) => totals[key])]);
    const tables = Object.entries(recall.tables);
    facts(this.sizes, tables.length ? tables.map(([domain, { entries, bytes: size }]) => [domain, `${whole(entries)} entries, ${bytes(size)}`]) : [["Table", "none is at hand"]]);
    const rows = recall.orders.map(({ source, order, drafted, accepted }) => ({ name: `${source} ${order}`, part: accepted, of: drafted, ink: inkOf(source) }));
    rateBars(this.hits, rows, "Nothing was recalled yet.");
  }
}
