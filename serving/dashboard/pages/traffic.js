// Traffic: how long requests take, how many wait, how much is drafted for them, and what was dropped.

import { Chart, fromZero, share } from "../chart.js";
import { h } from "../dom.js";
import { marksOf } from "../events.js";
import { fixed, percent, seconds, short, whole } from "../format.js";
import * as statistics from "../statistics.js";
import { Table, Tile, card, facts, tiles } from "../widgets.js";

const LATENCIES = [
  ["first", "time_to_first_token", "Time to first token", "From the arrival of a request to its first token"],
  ["token", "inter_token", "Time between tokens", "Between two rounds that gave a sequence tokens, however many came at once"],
  ["request", "request_time", "Time of a request", "From its arrival to its last token"],
  ["queue", "queue_time", "Wait for a slot", "Of finished sequences, while all slots were taken"],
];
const LINES = [
  { name: "median", ink: "--accent" },
  { name: "95 %", ink: "--drafter" },
  { name: "99 %", ink: "--target", dash: true },
];
const NOTHING = "No request in the time shown.";

export class Traffic {
  title = "Traffic";

  constructor() {
    this.now = {
      requests: new Tile("requests", "Requests"),
      first: new Tile("first", "Time to first token"),
      token: new Tile("token", "Time between tokens"),
      waiting: new Tile("waiting", "Running / waiting"),
      dropped: new Tile("dropped", "Traces dropped"),
    };
    const latencies = LATENCIES.map(([name, , title, note]) => [
      name, new Chart({ title, note: `${note}, of 30 seconds each`, series: LINES, format: seconds, range: (_, high) => [0, 1.15 * high || 0.01], empty: NOTHING }),
    ]);
    this.charts = {
      ...Object.fromEntries(latencies),
      load: new Chart({
        title: "Queue", note: "Requests that have a slot, and those that wait for one", series: [{ name: "running", ink: "--accent", area: true }, { name: "waiting", ink: "--drafter" }],
        format: fixed(1), label: fixed(0), range: fromZero(4), empty: "No replica has reported yet.",
      }),
      rate: new Chart({
        title: "Tokens", note: "A second, all replicas: read from prompts, found in the cache, and written",
        series: [{ name: "written", ink: "--accent" }, { name: "read", ink: "--drafter" }, { name: "cached", ink: "--target", dash: true }], format: fixed(0), range: fromZero(10), empty: NOTHING,
      }),
      draft: new Chart({
        title: "Size of drafts", note: "What the planner chose: tokens drafted in a round that drafted, and those of them that were kept",
        series: [{ name: "drafted", ink: "--accent" }, { name: "kept", ink: "--drafter" }], format: fixed(1), range: fromZero(4), empty: "No round has drafted yet.", count: "rounds",
      }),
      plain: new Chart({
        title: "Rounds without a draft", note: "Share of tokens that the planner had the target draw alone, prompts' first tokens included",
        series: [{ name: "without", ink: "--target", area: true }], format: percent, label: (value) => percent(value, 0), range: share, empty: NOTHING, count: "draws",
      }),
      stream: new Chart({
        title: "Trace stream", note: "Records a second: written for the trainer, and dropped before they came there",
        series: [{ name: "written", ink: "--accent" }, { name: "dropped", ink: "--bad", dash: true }], format: fixed(2), range: fromZero(1), empty: "No trace was written in the time shown.",
      }),
    };
    for (const [name, chart] of Object.entries(this.charts)) chart.box.id = `chart-${name}`;
    this.replicas = new Table("replicas", [["Replica"], ["Drafter"], ["Running", true], ["Waiting", true], ["Longest swap", true]], "No replica has reported yet.");
    this.ends = h("dl", { class: "facts", id: "ends" });
    this.plan = h("dl", { class: "facts", id: "plan" });
    this.element = h("div", { class: "page" }, tiles(Object.values(this.now), "Now"),
      h("section", { class: "charts", "aria-label": "Over time" }, Object.values(this.charts).map((chart) => chart.element)),
      card("Replicas", "Drafter version, and requests of each", this.replicas.element).element,
      h("section", { class: "columns" },
        card("In the time shown", "How requests and rounds came out", this.ends).element,
        card("The planner", "How it is set, and what it chose", this.plan).element));
  }

  show(data) {
    const { bins, state } = data;
    const shown = { span: data.span, marks: marksOf(data) };
    for (const [name, histogram] of LATENCIES) {
      this.charts[name].show(bins.time, statistics.quantiles(bins, histogram, state.bounds[histogram]), shown);
    }
    this.charts.load.show(bins.time, ["running", "waiting"].map((name) => bins.gauges[name] ?? bins.time.map(() => null)), shown);
    const tokens = ["completion_tokens", "prompt_tokens", "cached_tokens"].map((name) => statistics.series(bins, name));
    const read = tokens[1].map((all, index) => all - tokens[2][index]);
    const some = tokens.some((values) => statistics.total(values));
    const a_second = (values) => values.map((n) => (some ? n / bins.width : null));
    this.charts.rate.show(bins.time, [a_second(tokens[0]), a_second(read), a_second(tokens[2])], shown);
    const [rounds, drafted, accepted] = ["rounds", "drafted", "accepted"].map((name) => statistics.series(bins, name));
    this.charts.draft.show(bins.time, [statistics.means(drafted, rounds), statistics.means(accepted, rounds)], { ...shown, counts: rounds });
    const alone = tokens[0].map((n, index) => Math.max(0, n - rounds[index] - accepted[index]));
    const draws = alone.map((n, index) => n + rounds[index]);
    const plain = statistics.rates(alone, draws);
    this.charts.plain.show(bins.time, [plain.value], { ...shown, low: plain.low, high: plain.high, counts: draws });
    const traces = ["traces_written", "traces_dropped"].map((name) => statistics.series(bins, name));
    const traced = traces.some((values) => statistics.total(values));
    this.charts.stream.show(bins.time, traces.map((values) => values.map((n) => (traced ? n / bins.width : null))), shown);
    this.tiles(bins, state);
    this.replicas.show(state.replicas, () => state.replicas.map((replica) => this.row(replica)));
    this.facts(bins, state, [statistics.total(alone), statistics.total(draws)]);
  }

  tiles(bins, { totals, replicas, bounds, stream }) {
    const waiting = Object.values(stream.domains).reduce((all, { lag }) => all + lag, 0);
    this.now.requests.show(short(totals.requests), `${whole(statistics.sum(bins, "requests"))} in the time shown, ${whole(totals.failed)} failed`, totals.failed ? "bad" : "");
    for (const [name, histogram] of LATENCIES.slice(0, 2)) {
      const { quantiles: [half, , most], count } = statistics.quantilesOfAll(bins, histogram, bounds[histogram]);
      this.now[name].show(seconds(half), count ? `median of ${whole(count)}${most === null ? "" : `, 99 % below ${seconds(most)}`}` : "nothing in the time shown");
    }
    const sum = (name) => replicas.reduce((all, replica) => all + replica[name], 0);
    this.now.waiting.show(`${sum("running")} / ${sum("waiting")}`, `${replicas.length} replica${replicas.length === 1 ? "" : "s"}`);
    this.now.dropped.show(short(totals.traces_dropped), `${whole(totals.traces_written)} written${stream.redis ? `, ${whole(waiting)} not yet trained on` : ""}`, totals.traces_dropped ? "bad" : "");
  }

  row({ name, version, canary, others, running, waiting, swap_stall_seconds_max: stall }) {
    const own = canary === null ? `v${version}` : `v${version} and v${canary}`;
    const drafters = [own, ...Object.entries(others).map(([domain, other]) => `${domain} v${other}`)].join(", ");
    return { key: name, cells: [h("code", {}, name), h("span", { class: "why" }, drafters), whole(running), whole(waiting), stall ? seconds(stall) : "–"] };
  }

  facts(bins, { drafter, growth, governed }, [alone, draws]) {
    const [drafted, rounds, accepted] = ["drafted", "rounds", "accepted"].map((name) => statistics.sum(bins, name));
    const count = (name) => whole(statistics.sum(bins, name));
    facts(this.ends, [["Requests taken", count("requests")], ["Failed in the engine", count("failed")], ["Given up by clients", count("cancelled")],
      ["Lost their slot to others", count("preemptions")], ["Seconds of computing", seconds(statistics.sum(bins, "busy_seconds"))]]);
    facts(this.plan, [["Drafter", drafter], ["Growth", growth], ["Drafts as much as pays", governed ? "yes" : "no"],
      ["Rounds that drafted", whole(rounds)], ["Tokens drafted in each", rounds ? fixed(1)(drafted / rounds) : "–"], ["Tokens kept of each", rounds ? fixed(1)(accepted / rounds) : "–"],
      ["Draws without a draft", draws ? `${whole(alone)} of ${whole(draws)}` : "–"]]);
  }
}
