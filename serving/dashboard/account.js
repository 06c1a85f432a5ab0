// Cost and measured gain of a domain's training. Each function returns [figure, note].

import { day, percent, seconds, signed, whole } from "./format.js";

const signedPercent = signed((value) => percent(value));
const change = (log) => signedPercent(Math.expm1(log));

export const range = ({ log, width }) => `${change(log - width)} to ${change(log + width)}`;

export function cost(training) {
  if (!training) return ["–", "no training yet"];
  const { cpu_seconds: cpu, beside_seconds: paid, slowed_seconds: slowed } = training;
  return [seconds(cpu + slowed), `core seconds, ${seconds(paid + slowed)} of them while requests ran`];
}

export function gain(account) {
  if (!account || account.log == null) return ["–", "no version is measured yet"];
  return [change(account.log), `${range(account)} since version ${account.effects[0].number}, measured`];
}

export function paidBack(account) {
  if (!account || account.paid_back == null) return ["not yet", `${seconds(account?.certain ?? 0)} saved with certainty`];
  return [day(account.paid_back), `${seconds(account.certain)} saved with certainty`];
}

export function trial(account) {
  const version = account?.trial ?? account?.effects.at(-1);
  if (!version || (!account.trial && version.width != null && Math.abs(version.log) > version.width)) {
    return account && !account.begins ? ["none", `the fund has ${seconds(account.fund)} of ${seconds(account.needed)}`] : ["none", "no version on trial"];
  }
  const against = `v${version.number} against v${version.before}`;
  return version.width == null ? [against, "not measured yet"] : [against, `${change(version.log)} (${range(version)}), ${whole(version.trials)} trials`];
}
