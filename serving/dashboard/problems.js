// Problems of the service, as sentences with what to do.

import { because, latest } from "./events.js";
import { counted, seconds, when, whole } from "./format.js";
import * as statistics from "./statistics.js";

// Seconds that replicas and the trainer get to start.
const START_SECONDS = 120;
// Seconds without a heartbeat after which the trainer counts as silent.
export const SILENT_SECONDS = 30;
const REJECTED_SECONDS = 3600;
const LOST_MINUTES = 5;

const LOGS = "the log (log.file, otherwise home/ray/ray/session_latest/logs)";

// For each problem, a function that returns [text, action], or a false value without the problem. Severe problems concern
// all pages.
const SEVERE = [
  ({ state }) => !state.stream.redis && [
    "Redis does not answer. Requests are served, but nothing is learned, and events and the rollout are unknown.",
    "Start Redis again, or check redis_url. Replicas and trainer connect by themselves."],
  ({ state: { replicas, answers } }) => !replicas.length && [
    answers ? "No replica has reported for some seconds." : "No server has reported for some seconds.",
    answers ? `Ray starts a dead replica again. If this stays, read ${LOGS}.` : "Start osd tap, or a vLLM with OSD_VLLM_CAPTURE=1, with the same Redis."],
];
const OTHERS = [
  ({ state: { replicas, expected_replicas: expected }, started }) => started && replicas.length > 0 && replicas.length < expected && [
    `${whole(replicas.length)} of ${whole(expected)} replicas report.`,
    `Ray starts a dead replica again. If this stays, check the memory of the machine and read ${LOGS}.`],
  ({ state: { trainer, stream, domain }, started }) => trainer.needed && stream.redis && trainer.silence === null && started && [
    `No trainer runs for the domain ${domain}, so nothing is learned.`,
    `Start the service again, and read ${LOGS}.`],
  ({ state: { trainer } }) => trainer.needed && trainer.silence > SILENT_SECONDS && [
    `The trainer has been silent for ${seconds(trainer.silence)}.`,
    `Ray starts a dead trainer again. If this stays, read ${LOGS}.`],
  ({ state: { events }, time }) => {
    const event = latest(events, ["rejected"]).find(({ stage, time: at }) => stage === "load" && time - at < REJECTED_SECONDS);
    return event && [
      `A replica rejected v${event.version} at ${when(event.time)}${because(event)}. The version before stays in service.`,
      "Roll back to the version before on the page Versions, so that no replica tries it again."];
  },
  ({ state: { speedup } }) => speedup?.guarded > 0 && [
    `Drafting is off in ${counted(speedup.guarded, "replica")}, because it lost time.`,
    "Drafting returns by itself when it gains time. If this stays, roll back to a better version."],
  ({ bins }) => lost(bins, "traces_dropped", (count) => [
    `Traces dropped in the last ${LOST_MINUTES} minutes: ${whole(count)}. Training misses them.`,
    "Check that Redis answers fast and has free memory, or capture less: set capture.bytes_per_second."]),
  ({ bins }) => lost(bins, "failed", (count) => [
    `Requests failed in the last ${LOST_MINUTES} minutes: ${whole(count)}.`,
    `Read ${LOGS}.`]),
];

// Calls `make` with the sum of a counter over the last minutes, if it is above 0.
function lost(bins, name, make) {
  const from = bins.time.length - Math.ceil((60 * LOST_MINUTES) / bins.width);
  const count = statistics.series(bins, name).filter((_, index) => index >= from).reduce((sum, value) => sum + value, 0);
  return count > 0 && make(count);
}

const list = (kinds, data) => {
  const shown = { ...data, started: data.time - data.state.model.created > START_SECONDS };
  return kinds.map((find) => find(shown)).filter(Boolean);
};

export const severeProblems = (data) => list(SEVERE, data);
export const problems = (data) => list([...SEVERE, ...OTHERS], data);
