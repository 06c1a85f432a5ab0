// Learning page: training, verdicts of the gate, cost and gain, trace streams, and recall.

import { Chart, fromZero } from "../chart.js";
import * as account from "../account.js";
import { h } from "../dom.js";
import { badgeOf, latest, marksOf, sentenceOf } from "../events.js";
import { listed } from "../figures.js";
import { bytes, fixed, percent, seconds, signed, when, whole } from "../format.js";
import { Table, Tile, badge, card, charts, facts, rateBars, tiles } from "../widgets.js";
import { inkOf } from "./overview.js";

const VERDICTS = ["published", "canary", "promoted", "rolled_back", "rejected", "drift", "revision"];
const NO_STEPS = "No training steps yet. Training starts when there are records and the fund covers the next version.";
const NO_FUND = "No fund yet. Until the trainer receives reports of replicas, training is not limited.";

export class Learning {
  constructor() {
    this.now = {
      loss: new Tile("loss", "Training loss"),
      records: new Tile("records", "Records"),
      verdicts: new Tile("verdicts", "Gate"),
      fund: new Tile("fund", "Training fund"),
      gain: new Tile("gain", "Training gain"),
    };
    this.charts = {
      loss: new Chart({
        title: "Training loss", note: "Divergence of the drafter from the target, per micro-step", series: [{ name: "loss", ink: "--drafter" }],
        format: fixed(3), label: fixed(2), range: fromZero(0.1), empty: NO_STEPS,
      }),
      balance: new Chart({
        title: "Cost and gain", note: "Core seconds of training, and measured core seconds that its versions saved",
        series: [{ name: "saved", ink: "--accent" }, { name: "certain", ink: "--accent", dash: true }, { name: "cost", ink: "--drafter" }],
        format: seconds, range: (low, high) => [Math.min(0, 1.1 * low), Math.max(0.01, 1.1 * high, -0.1 * low)], empty: NO_FUND,
      }),
      fund: new Chart({
        title: "Training fund", note: "Core seconds that training may spend, and that the next version needs",
        series: [{ name: "fund", ink: "--accent" }, { name: "needed", ink: "--drafter", dash: true }], format: seconds, range: fromZero(0.01), empty: NO_FUND,
      }),
    };
    for (const [name, chart] of Object.entries(this.charts)) chart.box.id = `chart-${name}`;
    this.verdicts = new Table("verdicts", [["Time"], ["Verdict"], ["Version"], ["Expected length", true], ["Acceptance", true], ["Reason"]], "No verdict yet. The gate judges a candidate after each slice of training.");
    this.effects = new Table("effects", [["Version"], ["Against"], ["Measured", true], ["Interval", true], ["Trials", true]], "No effect yet. It is measured when a trained version is in service or on trial.");
    this.replay = h("dl", { class: "facts", id: "replay" });
    this.stream = h("dl", { class: "facts", id: "stream" });
    this.sizes = h("dl", { class: "facts", id: "recall" });
    this.hits = h("div", { class: "bars wide", id: "hits" });
    this.learning = card("Learning stream", "", this.stream);
    const verdicts = card("Gate and canary", "The gate judges each candidate on held-out records; a canary is also tried in a share of the decoding steps", this.verdicts.element);
    const effects = card("Effects of versions", "Measured speed-up of each version in service or on trial over the version before it", this.effects.element);
    this.element = h("div", { class: "page" }, tiles(Object.values(this.now), "Now"),
      charts(Object.values(this.charts)),
      verdicts.element, effects.element,
      h("section", { class: "columns" },
        card("Replay", "Records in the trainer's memory", this.replay).element, this.learning.element),
      card("Recall", "Tables of the n-gram cache, and accepted drafts since the start by the number of tokens of the lookup", this.sizes, this.hits).element);
  }

  show(data) {
    const { bins, state, steps } = data;
    const training = state.training[state.domain];
    this.tiles(state, training, steps);
    const shown = { span: data.span, marks: marksOf(data) };
    const losses = steps.filter(([time, loss]) => time >= data.span[0] && loss != null);
    this.charts.loss.show(losses.map(([time]) => time), [losses.map(([, loss]) => loss)], shown);
    const funds = state.funds.filter(([time, fund]) => time >= data.span[0] && fund != null);
    const column = (place) => funds.map((row) => row[place]);
    this.charts.fund.show(column(0), [column(1), column(2)], shown);
    this.charts.balance.show(column(0), [column(4), column(5), column(3)], shown);
    this.showVerdicts(state.events);
    this.showEffects(training?.account);
    this.showStores(state, training);
  }

  tiles({ training, domain }, report, steps) {
    const more = Object.keys(training).filter((name) => name !== domain).length;
    const loss = report?.loss ?? steps.at(-1)?.[1] ?? null;
    this.now.loss.show(fixed(3)(loss), report ? `${whole(report.steps)} micro-steps${more ? `, ${more} more domains` : ""}` : "no step yet");
    this.now.records.show(whole(report?.records ?? 0), report ? `${whole(report.trained)} trained on, ${whole(report.held_out)} held out` : "the trainer has no records");
    this.now.verdicts.show(report ? `${whole(report.passed)} / ${whole(report.passed + report.rejected)}` : "–", report ? `candidates passed; ${whole(report.drifts)} drift${report.drifts === 1 ? "" : "s"}` : "no candidate yet");
    const fund = report?.account;
    this.now.fund.show(fund ? seconds(fund.fund) : "–", fund ? `${fund.begins ? "training may start" : "training waits"}, the next version needs ${seconds(fund.needed)}` : "no decision yet");
    this.now.gain.show(...account.gain(fund));
  }

  showVerdicts(events) {
    const rows = latest(events, VERDICTS).slice(0, 30);
    this.verdicts.show(rows, () =>
      rows.map((event) => {
        const [name, mood] = badgeOf(event);
        const change = (now, before, format) => (now == null ? "–" : [format(now), before == null ? "" : h("span", { class: "delta" }, `from ${format(before)}`)]);
        return {
          key: event.time,
          cells: [
            when(event.time), badge(name, mood), event.version == null ? "–" : `v${event.version}`,
            change(event.expected_length, event.baseline_expected_length, fixed(2)),
            change(event.acceptance ?? event.now, event.baseline_acceptance ?? event.before, percent),
            h("span", { class: "why" }, event.reason ?? sentenceOf(event)),
          ],
        };
      }));
  }

  showEffects(fund) {
    const effects = [...(fund?.effects ?? []), fund?.over_recall, fund?.trial].filter(Boolean).reverse();
    this.effects.show(effects, () =>
      effects.map((effect) => {
        const { number, before, log, width, trials } = effect;
        const isMeasured = width != null;
        return { key: `${number} ${before}`, cells: [`v${number}`, before ? `v${before}` : "recall alone", isMeasured ? signed(percent)(Math.expm1(log)) : "–", isMeasured ? account.range(effect) : "not measured yet", whole(trials)] };
      }));
  }

  // Shows the replay memory, the trace streams and the recall tables.
  showStores({ stream, totals, capture, recall, training, display }, report) {
    const hint = !capture ? "Capture is off: nothing is learned from requests."
      : stream.redis ? "Traces that wait for the trainer" : "Redis does not answer: traces are dropped until it answers.";
    this.learning.hint.textContent = hint;
    facts(this.replay, report ? [["Records", whole(report.replay_records)], ["Tokens", whole(report.replay_tokens)], ["Memory", bytes(report.replay_bytes)],
      ["Tokens trained on, with repetitions", whole(report.positions)], ["CPU seconds of training", seconds(report.cpu_seconds)], ["While requests ran", seconds(report.beside_seconds)], ["Lost by replicas", seconds(report.slowed_seconds)],
      ...Object.entries(training).filter(([, each]) => each !== report).map(([domain, each]) => [`Records of ${domain}`, whole(each.replay_records)])]
      : [["Records", "none yet: captured requests fill it"]]);
    const records = Object.values(stream.domains).reduce((sum, domain) => sum + domain.records, 0);
    const backlog = ({ lag, age, records: all, bytes: size }) =>
      lag === null ? `no trainer reads its ${whole(all)} records` : lag ? `${whole(lag)}${age === null ? "" : `, the oldest for ${seconds(age)}`}` : `none, ${bytes(size)} on the stream`;
    facts(this.stream, [["Records on the streams", `${whole(records)} of at most ${whole(stream.capacity)}`],
      ...Object.entries(stream.domains).map(([domain, state]) => [`Waiting in ${domain}`, backlog(state)]),
      ...listed({ display }, "stream", (key) => totals[key])]);
    const tables = Object.entries(recall.tables);
    facts(this.sizes, tables.length ? tables.map(([domain, { entries, bytes: size }]) => [domain, `${whole(entries)} entries, ${bytes(size)}`]) : [["Tables", "none yet: the first request fills them"]]);
    const rows = recall.orders.map(({ source, order, drafted, accepted }) => ({ name: `${source} ${order}`, part: accepted, of: drafted, ink: inkOf(source) }));
    rateBars(this.hits, rows, "No recalled drafts yet. Recall drafts when a text repeats words that it has seen.");
  }
}
