// Formats of numbers and times; a missing value is a dash.

const DASH = "–";
const missing = (value) => value === null || value === undefined || Number.isNaN(value);

const clockFormat = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const dayFormat = new Intl.DateTimeFormat("en-GB", { day: "2-digit", month: "short", hour: "2-digit", minute: "2-digit" });

export const clock = (seconds) => clockFormat.format(1000 * seconds);
export const day = (seconds) => (missing(seconds) ? DASH : dayFormat.format(1000 * seconds));
// Formats a past time: the time of day, and also the date if it is not today.
export const when = (seconds) => (new Date(1000 * seconds).toDateString() === new Date().toDateString() ? clock(seconds) : day(seconds));
export const percent = (value, digits = 1) => (missing(value) ? DASH : `${(100 * value).toFixed(digits)} %`);
export const points = (value) => percent(value).replace("%", "pp"); // difference of two percentages, in percentage points
export const fixed = (digits) => (value) => (missing(value) ? DASH : value.toFixed(digits));
export const whole = (value) => (missing(value) ? DASH : Math.round(value).toLocaleString("en"));
export const counted = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
export const times = (value) => (missing(value) ? DASH : `${value.toFixed(2)}×`);
export const signed = (format) => (value) => (missing(value) ? DASH : `${value < 0 ? "−" : "+"}${format(Math.abs(value))}`);

export function short(value) {
  if (missing(value)) return DASH;
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  return Math.abs(value) >= 1e4 ? `${(value / 1e3).toFixed(0)} k` : whole(value);
}

export function seconds(value) {
  if (missing(value)) return DASH;
  const size = Math.abs(value), sign = value < 0 ? "−" : "";
  if (size === 0) return "0 s";
  if (size < 0.001) return `${sign}${(1e6 * size).toFixed(0)} µs`;
  if (size < 1) return `${sign}${(1000 * size).toFixed(size < 0.01 ? 1 : 0)} ms`;
  if (size < 100) return `${sign}${size.toFixed(size < 10 ? 1 : 0)} s`;
  if (size < 7200) return `${sign}${(size / 60).toFixed(size < 1200 ? 1 : 0)} min`;
  return `${sign}${(size / 3600).toFixed(1)} h`;
}

export function bytes(value) {
  if (missing(value)) return DASH;
  if (value < 1024) return `${whole(value)} B`;
  return value < 1 << 20 ? `${(value / 1024).toFixed(1)} KiB` : `${(value / (1 << 20)).toFixed(1)} MiB`;
}
