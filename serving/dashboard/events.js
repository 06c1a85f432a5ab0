// What the loop did, as marks on charts and as sentences.

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

const why = ({ reason }) => (reason ? `: ${reason}` : "");
const length = (value) => fixed(2)(value ?? null);

const STORIES = {
  published: (event) => `v${event.version} passed the gate: expected length ${length(event.expected_length)}, before ${length(event.baseline_expected_length)}`,
  canary: (event) => `v${event.version} passed the gate and serves ${percent(event.share, 0)} of requests beside v${event.parent}`,
  promoted: (event) => `v${event.version} proved itself and takes the place of v${event.parent}${why(event)}`,
  pinned: (event) => `v${event.version} stays in service until it is unpinned`,
  unpinned: (event) => `The trainer may move on from v${event.version} again`,
  drift: (event) => `Acceptance of ${event.source} under v${event.version} fell from ${percent(event.before)} to about ${percent(event.now)}`,
  revision: (event) => `v${event.version} learnt from another revision of the target${why(event)}`,
  swapped: (event) => `v${event.version} is in service, before it v${event.previous}`,
  keys_refused: (event) => `The keys stay as they were${why(event)}`,
  rejected: (event) =>
    event.stage === "load" ? `v${event.version} was refused by a replica${why(event)}` : `A candidate did not pass the gate${why(event)}`,
  rolled_back: (event) => `Back to v${event.version}${event.previous ? ` from v${event.previous}` : ""}${why(event)}`,
};

export const storyOf = (event) => STORIES[event.kind](event);

// Newest first; each replica tells of the same swap or refusal, and once is enough to read.
export function told(events, kinds = Object.keys(KINDS)) {
  const known = events.filter(({ kind }) => kinds.includes(kind)).reverse();
  const same = (a, b) => a && a.kind === b.kind && a.version === b.version && a.reason === b.reason;
  return known.filter((event, index) => !same(known[index - 1], event));
}

// Swaps as the replicas made them, canaries and drift as the trainer told them.
export function marksOf({ bins, state }) {
  const swaps = bins.swaps.map(([time, version]) => ({ time, kind: "swap", text: `v${version}`, title: `v${version} is in service` }));
  const others = told(state.events, ["canary", "drift"]).map((event) => ({
    time: event.time,
    kind: event.kind,
    text: event.kind === "drift" ? "drift" : `canary v${event.version}`,
    title: storyOf(event),
  }));
  return [...swaps, ...others].sort((a, b) => a.time - b.time);
}
