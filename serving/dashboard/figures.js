// Charts, tiles and lists of metrics, from the definitions of charts.py.

import { Chart, fromZero } from "./chart.js";
import { fixed, percent, seconds, short, whole } from "./format.js";
import * as statistics from "./statistics.js";
import { Tile } from "./widgets.js";

const FORMATS = { share: percent, quantiles: seconds };
const LABELS = { share: (value) => percent(value, 0), level: fixed(0) };

// For each kind of chart, a function from its definition, the bins and the bounds of its histogram to { values, low, high }.
const KINDS = {
  rate: ({ lines }, bins) => {
    const all = lines.map(({ part }) => statistics.series(bins, part));
    const any = all.some((values) => statistics.total(values));
    return { values: all.map((values) => values.map((n) => (any ? n / bins.width : null))) };
  },
  level: ({ lines }, bins) => ({ values: lines.map(({ part }) => bins.gauges[part] ?? bins.time.map(() => null)) }),
  share: ({ lines: [{ part, of }] }, bins) => {
    const { value, low, high } = statistics.rates(statistics.series(bins, part), statistics.series(bins, of));
    return { values: [value], low, high };
  },
  mean: ({ lines, base }, bins) => ({
    values: lines.map(({ part, of }) => statistics.means(statistics.series(bins, part), statistics.series(bins, of)).map((value) => (value === null ? null : base + value))),
  }),
  pace: ({ lines }, bins) => ({
    values: lines.map(({ part, of }) => statistics.means(statistics.series(bins, part), statistics.series(bins, of)).map((took) => (took ? 1 / took : null))),
  }),
  quantiles: ({ of }, bins, bounds) => ({ values: statistics.quantiles(bins, of, bounds) }),
};

// For each kind of chart with a tile, a function that returns [figure, note].
const TILES = {
  share: ({ lines: [{ part, of }], counts: [, noun], enough }, bins) => {
    const rate = statistics.recent(bins, part, of, enough);
    return rate.of ? [percent(rate.part / rate.of), `${whole(rate.part)} of ${whole(rate.of)} ${noun}, last ${seconds(rate.seconds)}`] : ["–", `nothing ${noun} in this time range`];
  },
  mean: ({ lines: [{ part, of }], counts: [, noun], base, digits, enough }, bins) => {
    const mean = statistics.recent(bins, part, of, enough);
    return mean.of ? [fixed(digits)(base + mean.part / mean.of), `of ${whole(mean.of)} ${noun}, last ${seconds(mean.seconds)}`] : ["–", `no ${noun} in this time range`];
  },
  quantiles: ({ of }, bins, bounds) => {
    const { quantiles: [half, , most], count } = statistics.quantilesOfAll(bins, of, bounds);
    return [seconds(half), count ? `median of ${whole(count)}${most === null ? "" : `, 99 % below ${seconds(most)}`}` : "no data in this time range"];
  },
};

export class Figures {
  constructor(page, { pages, listed, bounds }) {
    this.page = pages[page];
    this.listed = listed;
    this.bounds = bounds;
    this.charts = this.page.charts.map((chart) => {
      const { id, title, note, kind, lines, digits, base, least, empty, counts } = chart;
      const format = FORMATS[kind] ?? fixed(digits);
      const range = kind === "share" ? () => [0, 1] : (low, high) => [base, fromZero(least)(low, high)[1]];
      const drawn = new Chart({ title, note, series: lines, format, label: LABELS[kind] ?? format, range, empty, count: counts?.[1] });
      drawn.box.id = `chart-${id}`;
      return drawn;
    });
    this.tiles = {};
    for (const { id, title, tile } of [...this.page.charts, ...this.page.tiles]) {
      if (tile !== "") this.tiles[id] = new Tile(id, tile ?? title);
    }
  }

  show({ bins, state: { totals, replicas } }, shown) {
    this.page.charts.forEach((chart, index) => {
      const { values, ...band } = KINDS[chart.kind](chart, bins, this.bounds[chart.of]);
      const counts = chart.counts && statistics.series(bins, chart.counts[0]);
      this.charts[index].show(bins.time, values, { ...shown, ...band, counts });
      this.tiles[chart.id]?.show(...(TILES[chart.kind]?.(chart, bins, this.bounds[chart.of]) ?? []));
    });
    const sum = (gauge) => replicas.reduce((all, replica) => all + (replica[gauge] ?? 0), 0);
    for (const { id, note, total, gauges, alarm } of this.page.tiles) {
      const text = note.replace(/{(window|total):(\w+)}/g, (_, of, key) => whole(of === "total" ? totals[key] : statistics.sum(bins, key)));
      this.tiles[id].show(total ? short(totals[total]) : gauges.map(sum).join(" / "), text, totals[alarm] ? "bad" : "");
    }
  }
}

// Returns the rows [title, value, mood] of the metrics that are listed at `place`; `value` maps a key to its value.
export function listed({ display }, place, value) {
  return display.listed.filter((row) => row.place === place).map(({ key, title, unit, alarm }) => {
    const figure = value(key);
    return [title, unit === "seconds" ? seconds(figure) : whole(figure), alarm && figure ? "bad" : ""];
  });
}
