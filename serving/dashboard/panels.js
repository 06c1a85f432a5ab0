// Everything that is not a chart. Text only ever goes in as text.

import { clock, fixed, percent } from "./charts.js";

const whole = (value) => (value == null ? "–" : Math.round(value).toLocaleString("en"));
const share = (value) => `${whole(100 * value)} %`;
const put = (id, text) => {
  document.getElementById(id).textContent = text;
};

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
}

// Mean of the known values of a list's end or start.
function mean(values, from, to) {
  const known = values.slice(from, to).filter((value) => value !== null);
  return known.length ? known.reduce((a, b) => a + b) / known.length : null;
}

function trend(values, format) {
  const part = Math.max(1, Math.floor(values.length / 6));
  const [first, last] = [mean(values, 0, part), mean(values, -part)];
  if (first === null || last === null || values.length < 12) return "";
  return `${format(first)} at the left of the chart`;
}

export function tiles(data) {
  const { history, replicas, totals } = data;
  const recent = Math.max(3, Math.ceil(history.time.length / 40));
  put("now-acceptance", percent(mean(history.acceptance_rate, -recent)));
  put("note-acceptance", trend(history.acceptance_rate, percent));
  put("now-length", fixed(2)(mean(history.mean_acceptance_length, -recent)));
  put("note-length", trend(history.mean_acceptance_length, fixed(2)));
  put("now-speed", fixed(0)(mean(history.tokens_per_second, -recent)));
  put("note-speed", `${whole(totals.completion_tokens)} tokens since the start`);
  const versions = [...new Set(replicas.map((replica) => replica.version))];
  const plain = data.drafter === "none" || (replicas.length && replicas.every((replica) => !replica.speculation));
  put("now-version", plain ? "off" : versions.map((version) => `v${version}`).join(", ") || "–");
  const trial = data.canary === null ? "" : `, v${data.canary} on trial for ${share(data.share)} of requests`;
  const pinned = data.pinned ? ", pinned" : "";
  put("note-version", plain ? "every request decodes plainly" : `${whole(totals.swaps)} swaps, ${data.drafter}${trial}${pinned}`);
  const sum = (name) => replicas.reduce((total, replica) => total + replica[name], 0);
  put("now-load", `${sum("running")} / ${sum("waiting")}`);
  put("note-load", `${whole(totals.requests)} so far, ${whole(totals.failed)} failed`);
}

export function positions({ history }) {
  const box = document.getElementById("positions");
  if (!history.rounds || !history.accepted_per_position.length) {
    const text = history.rounds ? "No draft token was accepted yet." : "No round has drafted yet.";
    box.replaceChildren(element("p", text, "empty"));
    return;
  }
  box.replaceChildren(
    ...history.accepted_per_position.map((accepted, index) => {
      const row = element("div", "", "bar");
      const share = accepted / history.rounds;
      const track = element("div", "", "track");
      track.appendChild(element("div", "", "fill")).style.width = `${100 * share}%`;
      row.append(element("span", `${index + 1}`), track, element("b", percent(share)));
      return row;
    }),
  );
}

// Whoever drafts keeps its colour, whatever the others do.
const colours = ["recall", "request", "copy"];

export function sources({ history }) {
  const box = document.getElementById("sources");
  const known = Object.entries(history.by_source);
  const all = known.reduce((sum, [, [, accepted]]) => sum + accepted, 0);
  if (!all) {
    box.replaceChildren(element("p", "No draft token was accepted yet.", "empty"));
    return;
  }
  box.replaceChildren(
    ...known.map(([name, [drafted, accepted]]) => {
      const row = element("div", "", "bar wide");
      row.dataset.source = name;
      const track = element("div", "", "track");
      const place = colours.includes(name) ? colours.indexOf(name) : colours.length;
      track.appendChild(element("div", "", `fill source-${place + 1}`)).style.width = `${(100 * accepted) / all}%`;
      const told = `${share(accepted / all)}, ${drafted ? percent(accepted / drafted) : "–"}`;
      row.append(element("span", name), track, element("b", told));
      return row;
    }),
  );
}

export function stream({ stream, totals, capture }) {
  const hint = !capture
    ? "Capture is off: nothing is learned from requests."
    : stream.redis
      ? "Traces on their way to the trainer"
      : "Redis does not answer: traces are dropped until it does.";
  put("stream-hint", hint);
  const facts = [
    ["Traces written", whole(totals.traces_written)],
    ["Traces dropped", whole(totals.traces_dropped), totals.traces_dropped ? "bad" : ""],
    ["Not yet trained on", stream.lag === null ? "–" : `${whole(stream.lag)} of at most ${whole(stream.capacity)}`],
    ["Versions refused by a replica", whole(totals.rejected_versions), totals.rejected_versions ? "bad" : ""],
  ];
  document
    .getElementById("stream")
    .replaceChildren(...facts.flatMap(([name, value, mood = ""]) => [element("dt", name), element("dd", value, mood)]));
}

export function replicas({ replicas }) {
  const box = document.getElementById("replicas");
  const list = element("dl", "", "facts");
  for (const { name, version, canary, others, running, waiting, swap_stall_seconds_max: stall } of replicas) {
    const own = canary === null ? `v${version}` : `v${version} and v${canary}`;
    const drafters = [own, ...Object.entries(others).map(([domain, other]) => `${domain} v${other}`)].join(", ");
    const pause = stall ? `, longest swap ${fixed(1)(1000 * stall)} ms` : "";
    list.append(element("dt", name), element("dd", `${drafters} · ${running} / ${waiting}${pause}`));
  }
  box.replaceChildren(replicas.length ? list : element("p", "No replica has reported yet.", "empty"));
}

function figure(value, baseline, format) {
  const cell = element("td", value === undefined ? "–" : format(value), "number");
  if (value !== undefined && baseline !== undefined) {
    const gain = value - baseline;
    const text = `${gain < 0 ? "−" : "+"}${format(Math.abs(gain))}`;
    cell.append(element("span", text, `delta ${gain < 0 ? "bad" : "good"}`));
  }
  return cell;
}

function stateOf({ number, problem, in_service: serving }, { stable, canary, share: part }) {
  if (problem) return element("span", "damaged", "badge off");
  if (number === canary) return element("span", `canary, ${share(part)}`, "badge on");
  if (serving) return element("span", "in service", "badge on");
  if (number === stable) return element("span", "next", "badge");
  return element("span", number > stable && stable !== null ? "set aside" : "earlier", "badge");
}

export function versions(data) {
  const rows = [...data.versions].reverse().map((version) => {
    const { number, manifest, live } = version;
    const row = element("tr");
    row.dataset.version = number;
    const gate = manifest.gate ?? {};
    const last = element("td");
    last.append(stateOf(version, data));
    row.append(
      element("td", `v${number}`),
      element("td", manifest.parent ? `v${manifest.parent}` : "–"),
      element("td", manifest.created ? clock(manifest.created) : "–"),
      element("td", whole(manifest.trained_on?.records), "number"),
      figure(gate.acceptance, gate.baseline_acceptance, percent),
      figure(gate.expected_length, gate.baseline_expected_length, fixed(2)),
      element("td", live.drafted ? percent(live.accepted / live.drafted) : "–", "number"),
      last,
    );
    return row;
  });
  document.querySelector("#versions tbody").replaceChildren(...rows);
  document.getElementById("versions").hidden = !rows.length;
  document.getElementById("versions-empty").hidden = rows.length > 0;
}

const seconds = (value) => (value == null ? "–" : `${value < 0 ? "−" : ""}${fixed(1)(Math.abs(value))} s`);

export function ledger({ ledger: { versions, unpublished, total } }) {
  const line = (name, values) => {
    const row = element("tr");
    row.dataset.version = name;
    row.append(element("td", name), element("td", values.tokens == null ? "–" : whole(values.tokens), "number"));
    for (const column of ["plain", "decode", "saved", "training", "net"]) {
      const judged = ["saved", "net"].includes(column) && values[column] != null;
      const cell = element("td", "", "number");
      const mood = judged ? (values[column] < 0 ? "bad" : "good") : "";
      cell.append(element("span", seconds(values[column]), mood));
      row.append(cell);
    }
    row.append(element("td", values.payback == null ? "–" : `${whole(values.payback)} s`, "number"));
    return row;
  };
  const rows = [...versions].reverse().map((values) => line(values.version === "older" ? "older" : `v${values.version}`, values));
  if (unpublished) rows.unshift(line("in training", { training: unpublished }));
  if (rows.length) rows.push(line("total", total));
  document.querySelector("#ledger tbody").replaceChildren(...rows);
  document.getElementById("ledger").hidden = !rows.length;
  document.getElementById("ledger-empty").hidden = rows.length > 0;
}

const kinds = {
  published: ["published", "on"],
  swapped: ["swapped", "on"],
  canary: ["canary", "on"],
  promoted: ["promoted", "on"],
  pinned: ["pinned", "on"],
  unpinned: ["unpinned", "on"],
  drift: ["drift", "off"],
  revision: ["new target", "off"],
  rejected: ["rejected", "off"],
  keys_refused: ["keys", "off"],
  rolled_back: ["rolled back", "off"],
};

const why = ({ reason }) => (reason ? `: ${reason}` : "");

function story(event) {
  if (event.kind === "published") {
    return `v${event.version} passed the gate: expected length ${fixed(2)(event.expected_length ?? null)}, before ${fixed(2)(event.baseline_expected_length ?? null)}`;
  }
  if (event.kind === "canary") return `v${event.version} passed the gate and serves ${share(event.share)} of requests beside v${event.parent}`;
  if (event.kind === "promoted") return `v${event.version} proved itself and takes the place of v${event.parent}${why(event)}`;
  if (event.kind === "pinned") return `v${event.version} stays in service until it is unpinned`;
  if (event.kind === "unpinned") return `The trainer may move on from v${event.version} again`;
  if (event.kind === "drift") return `Acceptance of ${event.source} under v${event.version} fell from ${percent(event.before)} to about ${percent(event.now)}`;
  if (event.kind === "revision") return `v${event.version} learnt from another revision of the target${why(event)}`;
  if (event.kind === "swapped") return `v${event.version} is in service, before it v${event.previous}`;
  if (event.kind === "keys_refused") return `The keys stay as they were: ${event.reason}`;
  if (event.kind === "rejected" && event.stage === "load") return `v${event.version} was refused by a replica: ${event.reason}`;
  if (event.kind === "rejected") return `A candidate did not pass the gate: ${event.reason}`;
  const left = event.previous ? ` from v${event.previous}` : "";
  return `Back to v${event.version}${left}${why(event)}`;
}

export function events({ events }) {
  // Each replica tells of the same swap or refusal: once is enough to read.
  const told = events.filter((event) => event.kind in kinds).reverse();
  const same = (a, b) => a && a.kind === b.kind && a.version === b.version && a.reason === b.reason;
  const shown = told.filter((event, index) => !same(told[index - 1], event)).slice(0, 60);
  const rows = shown.map((event) => {
    const [name, mood] = kinds[event.kind];
    const row = element("li");
    const badge = element("div");
    badge.append(element("span", name, `badge ${mood}`));
    row.append(element("time", clock(event.time)), badge, element("div", story(event)));
    return row;
  });
  document.getElementById("events").replaceChildren(...rows);
  document.getElementById("events-empty").hidden = rows.length > 0;
}
