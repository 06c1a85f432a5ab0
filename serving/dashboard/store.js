// Data from the server: the bins of the window and the current state. A stream that breaks continues where it ended.

import { authorization, forget, keyFor } from "./keys.js";
import { eventsOf } from "./sse.js";

const TIMEOUT_MS = 6000;
const RETRY_MS = 500;

const empty = () => ({ width: 1, time: [], gauges: {}, counts: {}, swaps: [] });

export const store = { seconds: 900, time: 0, bins: empty(), state: null, steps: [] };

const listeners = { data: () => {}, status: () => {}, key: () => {} };
export const on = (name, listener) => (listeners[name] = listener);

let lastId = null;
let controller = new AbortController();

// Applies an event of the stream.
export function apply(kind, { time, bins, state }) {
  if (kind === "snapshot") store.bins = empty();
  append(store.bins, bins);
  store.time = time;
  store.state = { ...store.state, ...state };
  if (state.steps) merge(state.steps);
}

// Appends new bins and drops the bins before the window.
function append(bins, more) {
  const from = bins.time.length;
  bins.width = more.width;
  bins.swaps = more.swaps;
  const fresh = more.time.map((_, index) => index).filter((index) => !(more.time[index] <= bins.time.at(-1)));
  bins.time.push(...fresh.map((index) => more.time[index]));
  for (const kind of ["gauges", "counts"]) {
    for (const name of new Set([...Object.keys(bins[kind]), ...Object.keys(more[kind])])) {
      const values = (bins[kind][name] ??= new Array(from).fill(0));
      values.push(...fresh.map((index) => more[kind][name]?.[index] ?? 0));
    }
  }
  const old = bins.time.length - Math.floor(store.seconds / bins.width);
  if (old <= 0) return;
  for (const values of [bins.time, ...Object.values(bins.gauges), ...Object.values(bins.counts)]) values.splice(0, old);
  for (const [name, values] of Object.entries(bins.counts)) if (!values.some(Boolean)) delete bins.counts[name];
}

// Merges the latest training steps from the server into the steps of the last hour.
function merge(steps) {
  const first = steps[0]?.[0] ?? Infinity;
  store.steps = [...store.steps.filter(([time]) => time < first && time > store.time - 3600), ...steps];
}

// Changes the length of the window.
export function show(seconds) {
  store.seconds = seconds;
  lastId = null;
  follow();
}

// Reads the stream until the next call of `follow` or `pause`, and reconnects after errors.
export async function follow() {
  controller.abort();
  controller = new AbortController();
  const { signal } = controller;
  while (!signal.aborted) {
    try {
      if (!(await readStream(signal))) return;
    } catch (error) {
      if (signal.aborted) return;
      console.warn(`the stream broke: ${error.message}`);
      listeners.status("lost");
    }
    await new Promise((wake) => setTimeout(wake, RETRY_MS));
  }
}

export function pause() {
  controller.abort();
}

// Reads one stream to its end; returns false if a key is needed.
async function readStream(signal) {
  const timeout = new AbortController();
  let timer = null;
  const restartTimer = () => {
    clearTimeout(timer);
    timer = setTimeout(() => timeout.abort(new Error(`no event within ${TIMEOUT_MS / 1000} s`)), TIMEOUT_MS);
  };
  restartTimer();
  try {
    const response = await fetch(`/dashboard/stream?seconds=${store.seconds}`, {
      headers: { ...authorization("watch"), ...(lastId ? { "Last-Event-ID": lastId } : {}) },
      signal: AbortSignal.any([signal, timeout.signal]),
    });
    if (response.status === 401 || response.status === 403) {
      const refused = keyFor("watch") !== null;
      forget("watch");
      listeners.key(refused);
      return false;
    }
    if (!response.ok) throw new Error(`status ${response.status}`);
    for await (const { event, id, data } of eventsOf(response)) {
      restartTimer();
      if (event !== "snapshot" && event !== "update") continue;
      apply(event, JSON.parse(data));
      lastId = id;
      listeners.status("live");
      listeners.data(store);
    }
    return true;
  } finally {
    clearTimeout(timer);
  }
}
