// Learning: what training does, what its verdicts were, and whether it pays.

import { Chart, fromZero } from "../chart.js";
import * as account from "../account.js";
import { h } from "../dom.js";
import { badgeOf, marksOf, storyOf, told } from "../events.js";
import { listed } from "../figures.js";
import { bytes, fixed, percent, seconds, signed, when, whole } from "../format.js";
import { Table, Tile, badge, card, charts, facts, rateBars, tiles } from "../widgets.js";
import { inkOf } from "./overview.js";

const VERDICTS = ["published", "canary", "promoted", "rolled_back", "rejected", "drift", "revision"];
const AT_REST = "The trainer has not told a step yet: it begins when records have come and its fund covers a version.";
const NO_FUND = "The trainer has not seen the work of a replica yet: until then it learns freely.";

export class Learning {
  constructor() {
    this.now = {
      loss: new Tile("loss", "Training loss"),
      records: new Tile("records", "Records"),
      verdicts: new Tile("verdicts", "Gate"),
      fund: new Tile("fund", "Fund of training"),
      brought: new Tile("brought", "Training brought"),
    };
    this.charts = {
      loss: new Chart({
        title: "Training loss", note: "Divergence of the drafter from the target, each micro-step", series: [{ name: "loss", ink: "--drafter" }],
        format: fixed(3), label: fixed(2), range: fromZero(0.1), empty: AT_REST,
      }),
      balance: new Chart({
        title: "Cost and gain", note: "Core seconds that training took, and those that its versions saved as measured",
        series: [{ name: "saved", ink: "--accent" }, { name: "certain", ink: "--accent", dash: true }, { name: "cost", ink: "--drafter" }],
        format: seconds, range: (low, high) => [Math.min(0, 1.1 * low), Math.max(0.01, 1.1 * high, -0.1 * low)], empty: NO_FUND,
      }),
      fund: new Chart({
        title: "Fund of training", note: "Core seconds that training may spend, and those that the next version needs",
        series: [{ name: "fund", ink: "--accent" }, { name: "needed", ink: "--drafter", dash: true }], format: seconds, range: fromZero(0.01), empty: NO_FUND,
      }),
    };
    for (const [name, chart] of Object.entries(this.charts)) chart.box.id = `chart-${name}`;
    this.verdicts = new Table("verdicts", [["Time"], ["Verdict"], ["Version"], ["Expected length", true], ["Acceptance", true], ["Why"]], "No candidate was judged yet.");
    this.effects = new Table("effects", [["Version"], ["Against"], ["Measured", true], ["Interval", true], ["Trials", true]], "No trained version is in service yet.");
    this.replay = h("dl", { class: "facts", id: "replay" });
    this.stream = h("dl", { class: "facts", id: "stream" });
    this.sizes = h("dl", { class: "facts", id: "recall" });
    this.hits = h("div", { class: "bars wide", id: "hits" });
    this.learning = card("Learning stream", "", this.stream);
    const verdicts = card("Gate and canary", "Each candidate is judged on records that it was not trained on, and may have to prove itself in a share of the decoding steps", this.verdicts.element);
    const effects = card("Effects of versions", "Measured speed-up of each version in service or on trial over the version before it", this.effects.element);
    this.element = h("div", { class: "page" }, tiles(Object.values(this.now), "Now"),
      charts(Object.values(this.charts)),
      verdicts.element, effects.element,
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
    const funds = state.funds.filter(([time, fund]) => time >= data.span[0] && fund != null);
    const column = (place) => funds.map((row) => row[place]);
    this.charts.fund.show(column(0), [column(1), column(2)], shown);
    this.charts.balance.show(column(0), [column(4), column(5), column(3)], shown);
    this.judged(state.events);
    this.measured(training?.account);
    this.hold(state, training);
  }

  tiles({ training, domain }, own, steps) {
    const others = Object.keys(training).filter((name) => name !== domain).length;
    const loss = own?.loss ?? steps.at(-1)?.[1] ?? null;
    this.now.loss.show(fixed(3)(loss), own ? `${whole(own.steps)} micro-steps${others ? `, ${others} more domains` : ""}` : "no step yet");
    this.now.records.show(whole(own?.records ?? 0), own ? `${whole(own.trained)} trained on, ${whole(own.held_out)} only judge` : "none has come to the trainer");
    this.now.verdicts.show(own ? `${whole(own.passed)} / ${whole(own.passed + own.rejected)}` : "–", own ? `passed of judged; ${whole(own.drifts)} drift${own.drifts === 1 ? "" : "s"}` : "no candidate was judged");
    const fund = own?.account;
    this.now.fund.show(fund ? seconds(fund.fund) : "–", fund ? `${fund.begins ? "training may go on" : "training waits"}, a version needs ${seconds(fund.needed)}` : "nothing was decided yet");
    this.now.brought.show(...account.brought(fund));
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

  measured(found) {
    const effects = [...(found?.effects ?? []), found?.trial].filter(Boolean).reverse();
    this.effects.show(effects, () =>
      effects.map((effect) => {
        const { number, before, log, width, trials } = effect;
        const known = width != null;
        return { key: number, cells: [`v${number}`, `v${before}`, known ? signed(percent)(Math.expm1(log)) : "–", known ? account.range(effect) : "not measured yet", whole(trials)] };
      }));
  }

  hold({ stream, totals, capture, recall, training, display }, own) {
    const hint = !capture ? "Capture is off: nothing is learned from requests."
      : stream.redis ? "Traces on their way to the trainer" : "Redis does not answer: traces are dropped until it does.";
    this.learning.hint.textContent = hint;
    facts(this.replay, own ? [["Records", whole(own.replay_records)], ["Tokens", whole(own.replay_tokens)], ["Memory", bytes(own.replay_bytes)],
      ["Tokens trained on, repeats included", whole(own.positions)], ["CPU seconds of training", seconds(own.cpu_seconds)], ["While requests ran", seconds(own.beside_seconds)], ["Lost by replicas", seconds(own.slowed_seconds)],
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
