// Events of training and rollout, as sentences and as marks on charts.

import { fixed, percent } from "./format.js";

const KINDS = {
  published: ["published", "good"],
  swapped: ["swapped", "good"],
  canary: ["canary", "good"],
  promoted: ["promoted", "good"],
  pinned: ["pinned", "good"],
  unpinned: ["unpinned", "good"],
  drift: ["drift", "bad"],
  revision: ["new target", "bad"],
  rejected: ["rejected", "bad"],
  keys_refused: ["keys", "bad"],
  rolled_back: ["rolled back", "bad"],
};

export const badgeOf = ({ kind }) => KINDS[kind];

export const because = ({ reason }) => (reason ? `: ${reason}` : "");
const length = (value) => fixed(2)(value ?? null);

const SENTENCES = {
  published: (event) => `v${event.version} passed the gate: expected length ${length(event.expected_length)}, before ${length(event.baseline_expected_length)}`,
  canary: (event) => `v${event.version} passed the gate and is on trial against v${event.parent} in ${percent(event.share, 0)} of the steps`,
  promoted: (event) => `v${event.version} passed its trial and replaces v${event.parent}${because(event)}`,
  pinned: (event) => `v${event.version} stays in service until it is unpinned`,
  unpinned: (event) => `The trainer may replace v${event.version} again`,
  drift: (event) => `The acceptance rate of ${event.source} with v${event.version} fell from ${percent(event.before)} to about ${percent(event.now)}`,
  revision: (event) => `v${event.version} was trained with another revision of the target${because(event)}`,
  swapped: (event) => `v${event.version} is in service and replaces v${event.previous}`,
  keys_refused: (event) => `The key file is invalid, and the previous keys stay valid${because(event)}`,
  rejected: (event) =>
    event.stage === "load" ? `A replica rejected v${event.version}${because(event)}` : `The gate rejected a candidate${because(event)}`,
  rolled_back: (event) => `Rolled back ${event.previous ? `from v${event.previous} ` : ""}to v${event.version}${because(event)}`,
};

export const sentenceOf = (event) => SENTENCES[event.kind](event);

// Returns the events of some kinds, newest first, without repetitions: each replica reports the same swap or rejection.
export function latest(events, kinds = Object.keys(KINDS)) {
  const selected = events.filter(({ kind }) => kinds.includes(kind)).reverse();
  const same = (a, b) => a && a.kind === b.kind && a.version === b.version && a.reason === b.reason;
  return selected.filter((event, index) => !same(selected[index - 1], event));
}

// Returns the marks of swaps, canaries and drift for charts, oldest first.
export function marksOf({ bins, state }) {
  const swaps = bins.swaps.map(([time, version]) => ({ time, kind: "swap", text: `v${version}`, title: `v${version} is in service` }));
  const events = latest(state.events, ["canary", "drift"]).map((event) => ({
    time: event.time,
    kind: event.kind,
    text: event.kind === "drift" ? "drift" : `canary v${event.version}`,
    title: sentenceOf(event),
  }));
  return [...swaps, ...events].sort((a, b) => a.time - b.time);
}
