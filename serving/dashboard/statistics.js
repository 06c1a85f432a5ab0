// Statistics of the bins: sums, rates with intervals, and quantiles of histograms.

// Weight of the mean of the window, in drafts: values of bins with few drafts are shrunk towards the mean.
const PRIOR = 20;

const add = (sum, value) => sum + value;
export const total = (values = []) => values.reduce(add, 0);
const zeros = (bins) => bins.time.map(() => 0);

// Returns the value of an expression in each bin: "a - b" of metrics, each summed over its labels; at least 0 unless `signed`.
export function series(bins, expression, signed = false) {
  const sums = zeros(bins);
  let sign = 1;
  for (const word of expression.split(" ")) {
    if (word === "+" || word === "-") sign = word === "-" ? -1 : 1;
    else for (const [key, values] of Object.entries(bins.counts)) {
      if (key === word || key.startsWith(`${word}|`)) values.forEach((value, index) => (sums[index] += sign * value));
    }
  }
  return signed ? sums : sums.map((value) => Math.max(0, value));
}

export const sum = (bins, expression) => total(series(bins, expression));

// Returns { label: sum } of the counters with a name, by the label at `place`; `keep` filters the counters by their labels.
export function byLabel(bins, name, place = 1, keep = () => true) {
  const sums = {};
  for (const [key, values] of Object.entries(bins.counts)) {
    const labels = key.split("|");
    if (labels[0] === name && keep(labels)) sums[labels[place]] = (sums[labels[place]] ?? 0) + total(values);
  }
  return sums;
}

// Returns the ratio of `part` to `of` in each bin, shrunk towards the mean of all bins where `of` is small; null where it is 0.
// `low` and `high` are the bounds of a 95 % interval.
export function rates(part, of) {
  const mean = total(of) ? total(part) / total(of) : 0;
  const value = of.map((n, index) => (n ? (part[index] + PRIOR * mean) / (n + PRIOR) : null));
  const spread = value.map((rate, index) => (rate === null ? null : 1.96 * Math.sqrt((rate * Math.max(1 - rate, 0)) / (of[index] + PRIOR + 1))));
  return {
    value,
    low: value.map((rate, index) => (rate === null ? null : Math.max(0, rate - spread[index]))),
    high: value.map((rate, index) => (rate === null ? null : Math.min(1, rate + spread[index]))),
  };
}

// Returns the mean part / of in each bin, shrunk towards the mean of all bins where `of` is small; null where it is 0.
export function means(part, of, prior = PRIOR) {
  const mean = total(of) ? total(part) / total(of) : 0;
  return of.map((n, index) => (n ? (part[index] + prior * mean) / (n + prior) : null));
}

// Returns the 95 % interval of the ratio `part` / `of` (Wilson, 1927).
export function interval(part, of) {
  if (!of) return [0, 1];
  const z = 1.96, rate = part / of, scale = 1 + z ** 2 / of;
  const middle = (rate + z ** 2 / (2 * of)) / scale;
  const half = (z * Math.sqrt((rate * (1 - rate)) / of + z ** 2 / (4 * of ** 2))) / scale;
  return [Math.max(0, middle - half), Math.min(1, middle + half)];
}

// Returns the sums { part, of, seconds } over the newest bins in which `of` reaches `least`, or over all bins.
export function recent(bins, part, of, least) {
  const [parts, all] = [series(bins, part), series(bins, of)];
  let [sumPart, sumOf, index] = [0, 0, bins.time.length];
  while (index > 0 && sumOf < least) {
    index -= 1;
    sumPart += parts[index];
    sumOf += all[index];
  }
  return { part: sumPart, of: sumOf, seconds: (bins.time.length - index) * bins.width };
}

// Returns the counts of a histogram, [bin][bucket].
function buckets(bins, name, bounds) {
  const places = Array.from({ length: bounds.length + 1 }, (_, place) => bins.counts[`${name}_bucket|${place}`]);
  return bins.time.map((_, index) => places.map((values) => values?.[index] ?? 0));
}

// Returns the quantile `share` of a histogram, interpolated within its bucket; null without counts.
export function quantile(counts, bounds, share) {
  const all = total(counts);
  if (!all) return null;
  let below = 0;
  for (let place = 0; place < counts.length; place += 1) {
    if (counts[place] && below + counts[place] >= share * all) {
      const low = place ? bounds[place - 1] : 0;
      const high = bounds[Math.min(place, bounds.length - 1)];
      return low + (high - low) * ((share * all - below) / counts[place]);
    }
    below += counts[place];
  }
  return bounds.at(-1);
}

export const SHARES = [0.5, 0.95, 0.99];
const LEAST = [1, 8, 40];
const POOL = 30;

// Returns the quantiles of the 30 seconds before the end of each bin; null where there are too few counts.
export function quantiles(bins, name, bounds) {
  const counts = buckets(bins, name, bounds);
  const span = Math.max(1, Math.round(POOL / bins.width));
  const pooled = zeros({ time: bounds.concat(0) });
  return SHARES.map((share, which) => {
    pooled.fill(0);
    return counts.map((added, index) => {
      added.forEach((value, place) => (pooled[place] += value - (index >= span ? counts[index - span][place] : 0)));
      return total(pooled) >= LEAST[which] ? quantile(pooled, bounds, share) : null;
    });
  });
}

// Returns the quantiles and the number of counts of the whole window: { quantiles, count }.
export function quantilesOfAll(bins, name, bounds) {
  const counts = buckets(bins, name, bounds).reduce((sums, bin) => sums.map((value, place) => value + bin[place]), new Array(bounds.length + 1).fill(0));
  const count = total(counts);
  return { count, quantiles: SHARES.map((share, which) => (count >= LEAST[which] ? quantile(counts, bounds, share) : null)) };
}
