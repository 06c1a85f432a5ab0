// Speed-up, cost and gain of training, and the version on trial. Each function returns [figure, note].

import { counted, day, fixed, percent, seconds, signed, times, when, whole } from "./format.js";
import { SILENT_SECONDS } from "./problems.js";

const DAY = 86400;
// Shortest time from which a rate of savings is taken.
const LEAST_SPAN = 120;

const signedPercent = signed((value) => percent(value));
const change = (log) => signedPercent(Math.expm1(log));
const measured = (effect) => effect?.width != null;
const undecided = (effect) => Boolean(effect) && (!measured(effect) || Math.abs(effect.log) <= effect.width);

export const range = ({ log, width }) => `${change(log - width)} to ${change(log + width)}`;

// Returns whether every request uses plain decoding.
export const isPlain = ({ drafter, replicas }) => drafter === "none" || (replicas.length > 0 && replicas.every(({ speculation }) => !speculation));

// Returns the speed-up over plain decoding, which short blocks of steps without drafting measure.
export function speedup(state) {
  if (isPlain(state)) return ["Off", state.drafter === "none" ? "This service has no drafter (drafter.kind is none): every request uses plain decoding." : "Speculation is switched off: every request uses plain decoding."];
  if (!state.measures) return ["Not measured", unmeasured(state)];
  const { speedup: result } = state;
  if (result === null || result.low === null) return ["Not measured yet", waiting(state)];
  return [times(result.estimate), `the speed of plain decoding at the same load, measured. 95 % interval: ${result.low.toFixed(2)} to ${times(result.high)}. Measuring costs ${percent(result.price)} of the busy time.`];
}

function unmeasured({ answers, engine }) {
  if (!answers) return "A server that is only watched does not switch its drafts off, so nothing is compared with plain decoding.";
  if (engine !== "osd") return "vLLM does not switch its drafts off between steps, so nothing is compared with plain decoding.";
  return "The measurement is off: it needs growth.governed=true and economy.measure above 0.";
}

function waiting({ minutes_to_speedup: minutes }) {
  if (minutes === null) return "Plain decoding runs in short blocks for comparison. The first figure needs some minutes of traffic.";
  const left = minutes <= 1 ? "less than one more minute" : minutes <= 90 ? `about ${Math.ceil(minutes)} more minutes` : `about ${fixed(1)(minutes / 60)} more hours`;
  return `Plain decoding runs in short blocks for comparison. The figure needs ${left} of traffic.`;
}

export function cost({ training, domain, trainer, capture }) {
  const report = training[domain];
  if (report) return [seconds(report.cpu_seconds + report.slowed_seconds), `of core time, ${seconds(report.beside_seconds + report.slowed_seconds)} of it while requests ran`];
  if (!trainer.needed) return ["none", "this drafter is not trained, or trainer.enabled is false"];
  return ["none yet", capture ? `training starts after ${whole(trainer.min_records)} captured requests` : "capture.enabled is false, so there is nothing to train on"];
}

export function saved(account) {
  if (!account || (account.log == null && !account.saved && !account.certain)) return ["not known yet", "a trained version must run for some minutes"];
  return [seconds(account.saved), `of core time, ${seconds(account.certain)} of it with certainty`];
}

export function gain(account) {
  if (!account || account.log == null) return ["not known yet", "no trained version is measured yet"];
  const other = account.over_recall ? "recall alone" : `v${account.effects[0].before}`;
  return [change(account.log), `speed over ${other}, measured. 95 % interval: ${range(account)}`];
}

// Returns the time at which the certain savings reach the cost; `funds` are the recent rows of the fund.
export function payback(account, funds) {
  if (account?.paid_back != null) return ["reached", `on ${day(account.paid_back)}: the certain savings cover the cost`];
  if (!account || account.log == null) return ["not known yet", "needs the measured gain of a trained version"];
  const rows = funds.map(([time, , , spent, , certain]) => ({ time, spent, certain })).filter(({ certain }) => certain > 0);
  const [first, last] = [rows[0], rows.at(-1)];
  const span = rows.length ? last.time - first.time : 0;
  if (span < LEAST_SPAN) return ["not known yet", "nothing is saved with certainty yet, or only for a short time"];
  const rate = (last.certain - first.certain - (last.spent - first.spent)) / span;
  const rest = (last.spent - last.certain) / rate;
  if (!(rate > 0) || rest > DAY) return ["not within a day", `at the savings and costs of the last ${seconds(span)}`];
  return [`in about ${seconds(Math.max(rest, 60))}`, `at the savings and costs of the last ${seconds(span)}`];
}

export function running({ replicas, totals, drafter, pinned, ...state }) {
  if (isPlain({ replicas, drafter })) return ["none", "every request uses plain decoding"];
  const versions = [...new Set(replicas.map(({ version }) => `v${version}`))].join(", ");
  if (!versions) return ["–", "no replica has reported"];
  const frozen = pinned ? `, pinned: nothing replaces v${state.stable}` : "";
  const account = state.training[state.domain]?.account;
  return [versions, `${drafter}, ${counted(totals.swaps, "swap")} since the start${frozen}${rests(account?.over_recall)}`];
}

// Returns the state of the trainer, and the reason while it does not train.
export function activity({ training, domain, trainer }) {
  if (!trainer.needed) return ["none", "nothing is trained"];
  const { state, detail } = training[domain] ?? {};
  if (!state || trainer.silence === null || trainer.silence > SILENT_SECONDS) return ["–", "the trainer does not report"];
  return [state, detail || (state === "training" ? "on captured requests" : "")];
}

// Returns a note about replicas in which the trained drafter rests.
const rests = (effect) => (effect?.resting ? `; it rests in ${counted(effect.resting, "replica")}, because no gain over recall alone is measured` : "");

const result = (effect) => (measured(effect) ? `${change(effect.log)} speed (95 % interval ${range(effect)}), ${whole(effect.trials)} trials` : "not measured yet");

// Returns the canary, or else the comparison of the version in service with the version before or with recall alone.
export function tried({ training, domain, trainer, stable, canary, share, tried_since: since }) {
  const account = training[domain]?.account;
  if (canary !== null) {
    const effect = account?.trial?.number === canary ? account.trial : null;
    return [`v${canary}`, `on trial in ${percent(share, 0)} of the steps against v${stable}${since == null ? "" : ` since ${when(since)}`}: ${result(effect)}`];
  }
  const effect = [account?.effects.at(-1), account?.over_recall].find((each) => undecided(each) && each.number === stable);
  if (effect) return [`v${effect.number}`, `in service, and compared with ${effect.before ? `v${effect.before}` : "recall alone"}: ${result(effect)}${measured(effect) ? ", not certain yet" : ""}`];
  if (account && !account.begins) return ["nothing", `the next version is trained when the training fund holds ${seconds(account.needed)} of core time; it holds ${seconds(account.fund)}`];
  return ["nothing", trainer.needed ? "the trainer tries a version when it is better on held-out requests" : "nothing is trained"];
}
