// What the server told: the bins of the window, and the state of now. It follows the stream and goes on where it broke.

import { authorization, forget, keyFor } from "./keys.js";
import { eventsOf } from "./sse.js";

const SILENCE = 6000;
const AGAIN = 500;

const empty = () => ({ width: 1, time: [], gauges: {}, counts: {}, swaps: [] });

export const store = { seconds: 900, time: 0, bins: empty(), state: null, steps: [] };

const listeners = { data: () => {}, status: () => {}, key: () => {} };
export const on = (name, listener) => (listeners[name] = listener);

let lastId = null;
let stopped = new AbortController();

// Takes an event of the stream.
export function take(kind, { time, bins, state }) {
  if (kind === "snapshot") store.bins = empty();
  append(store.bins, bins);
  store.time = time;
  store.state = { ...store.state, ...state };
  if (state.steps) merge(state.steps);
}

function append(known, more) {
  const from = known.time.length;
  known.width = more.width;
  known.swaps = more.swaps;
  const fresh = more.time.map((_, index) => index).filter((index) => !(more.time[index] <= known.time.at(-1)));
  known.time.push(...fresh.map((index) => more.time[index]));
  for (const kind of ["gauges", "counts"]) {
    for (const name of new Set([...Object.keys(known[kind]), ...Object.keys(more[kind])])) {
      const values = (known[kind][name] ??= new Array(from).fill(0));
      values.push(...fresh.map((index) => more[kind][name]?.[index] ?? 0));
    }
  }
  const old = known.time.length - Math.floor(store.seconds / known.width);
  if (old <= 0) return;
  for (const values of [known.time, ...Object.values(known.gauges), ...Object.values(known.counts)]) values.splice(0, old);
  for (const [name, values] of Object.entries(known.counts)) if (!values.some(Boolean)) delete known.counts[name];
}

// The server tells the last steps; those that it told before stay for an hour.
function merge(steps) {
  const first = steps[0]?.[0] ?? Infinity;
  store.steps = [...store.steps.filter(([time]) => time < first && time > store.time - 3600), ...steps];
}

// Shows another window of the past.
export function show(seconds) {
  store.seconds = seconds;
  lastId = null;
  follow();
}

// Follows the stream from now on; what was followed before ends.
export async function follow() {
  stopped.abort();
  const mine = (stopped = new AbortController());
  while (!mine.signal.aborted) {
    try {
      if (!(await once(mine.signal))) return;
    } catch (error) {
      if (mine.signal.aborted) return;
      console.warn(`the stream broke: ${error.message}`);
      listeners.status("lost");
    }
    await new Promise((wake) => setTimeout(wake, AGAIN));
  }
}

export function pause() {
  stopped.abort();
}

// Reads one stream to its end; false where a key is needed.
async function once(signal) {
  const silent = new AbortController();
  let timer = null;
  const wait = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silent.abort(new Error("nothing came for too long")), SILENCE);
  };
  wait();
  try {
    const response = await fetch(`/dashboard/stream?seconds=${store.seconds}`, {
      headers: { ...authorization("watch"), ...(lastId ? { "Last-Event-ID": lastId } : {}) },
      signal: AbortSignal.any([signal, silent.signal]),
    });
    if (response.status === 401 || response.status === 403) {
      const refused = keyFor("watch") !== null;
      forget("watch");
      listeners.key(refused);
      return false;
    }
    if (!response.ok) throw new Error(`status ${response.status}`);
    for await (const { event, id, data } of eventsOf(response)) {
      wait();
      if (event !== "snapshot" && event !== "update") continue;
      take(event, JSON.parse(data));
      lastId = id;
      listeners.status("live");
      listeners.data(store);
    }
    return true;
  } finally {
    clearTimeout(timer);
  }
}
