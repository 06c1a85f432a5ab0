// Charts over time: lines that fade where the sample is small, a band of uncertainty, and marks of events.

import { h, put } from "./dom.js";
import { clock } from "./format.js";

const probe = document.createElement("i");

// Returns a colour of the style sheet in the form that the canvas needs.
function colour(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.hidden = true;
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

const faint = (ink, alpha) => ink.replace(/^rgba?\(([^)]*)\)$/, (_, parts) => `rgba(${parts.split(",").slice(0, 3).join(",")}, ${alpha})`);

// Sample size from which a line has its full colour.
const ENOUGH = 40;
const STRIP_HEIGHT = 22;
// Longest gap that a line bridges, as a share of the time range.
const BRIDGED = 1 / 12;
// More marks than this are drawn fainter.
const MANY_MARKS = 10;
// Kinds of marks whose names are shown first if there is not enough room for all.
const NAME_ORDER = ["drift", "swap", "canary"];

const all = new Set();
const redraw = () => all.forEach((chart) => chart.rebuild());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
new MutationObserver(redraw).observe(document.documentElement, { attributeFilter: ["data-theme"] });

// Chart. `series` are { name, ink, dash, area }; `format` formats a value, `label` a value on the axis; `range` maps
// (low, high) to the range of the axis; `empty` is the text without data; `count` is the noun of the sample sizes.
export class Chart {
  constructor({ title, note, series, format, label = format, range, empty, count = null }) {
    Object.assign(this, { series, format, label, range, count, plot: null, data: null, marks: [], counts: null });
    this.values = series.map(() => h("b"));
    const keys = series.map(({ name, ink, dash }, index) =>
      h("span", { class: "key" }, h("i", { class: dash ? "dash" : "", style: { "--paint": `var(${ink})` } }), name, this.values[index]),
    );
    this.reading = h("span", { class: "reading" });
    this.box = h("div", { class: "plot", role: "img", "aria-label": title });
    this.empty = h("p", { class: "empty" }, empty);
    this.box.append(this.empty);
    this.element = h("figure", { class: "card chart" },
      h("figcaption", {}, h("h2", {}, title), h("p", { class: "hint" }, note)),
      h("div", { class: "legend" }, series.length > 1 ? keys : this.values[0], this.reading), this.box);
    this.title = title;
    new ResizeObserver(() => this.resize()).observe(this.box);
    all.add(this);
  }

  // Shows new data: `lines` has the values of each series, `low` and `high` bound the first one, `counts` are its sample sizes.
  show(times, lines, { span, marks = [], low = null, high = null, counts = null }) {
    const filled = lines.some((values) => values.some((value) => value !== null));
    this.empty.hidden = filled;
    Object.assign(this, { marks, span, counts, times });
    this.banded = low !== null;
    this.data = filled ? [times, ...lines, ...(this.banded ? [low, high] : [])] : null;
    this.showValues(null);
    if (!filled) {
      this.plot?.destroy();
      this.plot = null;
    } else if (this.plot) {
      this.plot.setData(this.data);
    } else {
      this.rebuild();
    }
  }

  size() {
    return { width: Math.max(this.box.clientWidth, 120), height: this.box.clientHeight };
  }

  resize() {
    if (this.box.clientWidth === 0) return;
    if (this.plot) this.plot.setSize(this.size());
    else this.rebuild();
  }

  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    if (!this.data || this.box.clientWidth === 0) return;
    const axis = { stroke: colour("--soft"), font: "12px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: colour("--line"), width: 1 };
    const gaps = (plot, which, from, to, all) => all.filter(([left, right]) => right - left > BRIDGED * plot.bbox.width);
    const lines = this.series.map(({ ink, dash, area }) => {
      const stroke = colour(ink);
      return {
        stroke: this.counts ? (plot) => this.fading(plot, stroke) : stroke,
        width: 2,
        dash: dash ? [5, 4] : undefined,
        fill: area ? faint(stroke, 0.1) : undefined,
        gaps,
        points: { show: (plot, which) => plot.data[which].reduce((count, value) => count + (value !== null), 0) < 3, filter: (plot, which, every) => (every ? null : this.isolated(which)), size: 6, fill: stroke, stroke },
      };
    });
    const edge = { stroke: "transparent", width: 0, gaps, points: { show: false } };
    const first = lines.length + 1;
    this.plot = new uPlot(
      {
        ...this.size(),
        padding: [20, 24, 0, 0],
        legend: { show: false },
        cursor: { y: false, points: { size: 7 }, drag: { x: false, y: false } },
        scales: { x: { range: () => this.span }, y: { range: (_, low, high) => this.range(low ?? 0, high ?? 0) } },
        axes: [
          { ...axis, grid: { show: false }, space: 80, size: 26, values: (_, ticks) => ticks.map((tick) => clock(tick).slice(0, this.span[1] - this.span[0] > 240 ? 5 : 8)) },
          { ...axis, grid, size: 54, gap: 4, space: 34, values: (_, ticks) => ticks.map((tick) => this.label(tick)) },
        ],
        series: [{}, ...lines, ...(this.banded ? [edge, edge] : [])],
        bands: this.banded ? [{ series: [first + 1, first], fill: faint(colour(this.series[0].ink), 0.14) }] : [],
        hooks: {
          drawAxes: [(plot) => this.drawCounts(plot)],
          draw: [(plot) => this.drawMarks(plot)],
          setCursor: [(plot) => this.showValues(plot.cursor.idx)],
        },
      },
      this.data,
      this.box,
    );
  }

  // Returns the indices of values with gaps on both sides, which need a point because no line shows them; null for none.
  isolated(which) {
    const gap = BRIDGED * (this.span[1] - this.span[0]);
    const indices = this.data[which].flatMap((value, index) => (value === null ? [] : [index]));
    const far = (a, b) => a === undefined || b === undefined || this.data[0][b] - this.data[0][a] > gap;
    const isolated = indices.filter((index, place) => far(indices[place - 1], index) && far(index, indices[place + 1]));
    return isolated.length ? isolated : null;
  }

  // Returns a stroke that is fainter where the sample is smaller.
  fading(plot, stroke) {
    const { left, width } = plot.bbox;
    const [from, to] = this.span;
    const gradient = plot.ctx.createLinearGradient(left, 0, left + width, 0);
    this.times.forEach((time, index) => {
      const place = (time - from) / (to - from);
      const sure = Math.min(1, (this.counts[index] ?? 0) / ENOUGH);
      if (place >= 0 && place <= 1 && this.counts[index]) gradient.addColorStop(place, faint(stroke, 0.2 + 0.8 * sure));
    });
    return gradient;
  }

  // Draws the sample sizes as bars at the bottom.
  drawCounts(plot) {
    if (!this.counts) return;
    const most = Math.max(...this.counts, ENOUGH);
    const { ctx, bbox } = plot;
    const bar = Math.max(1, (bbox.width / Math.max(this.times.length, 30)) * 0.6);
    ctx.save();
    ctx.fillStyle = faint(colour("--soft"), 0.3);
    this.times.forEach((time, index) => {
      const height = (this.counts[index] / most) * STRIP_HEIGHT * devicePixelRatio;
      if (height && time >= this.span[0]) ctx.fillRect(plot.valToPos(time, "x", true) - bar / 2, bbox.top + bbox.height - height, bar, height);
    });
    ctx.restore();
  }

  // Draws marks as elements over the canvas, so that they have text that pages can search. Names stand above it in one row.
  drawMarks(plot) {
    const shown = this.marks.filter(({ time }) => time >= this.span[0] && time <= this.span[1]);
    const taken = [];
    const named = new Map();
    for (const mark of [...shown].sort((a, b) => NAME_ORDER.indexOf(a.kind) - NAME_ORDER.indexOf(b.kind) || b.time - a.time)) {
      const at = plot.valToPos(mark.time, "x");
      const width = 7 * mark.text.length + 14;
      const left = Math.max(0, Math.min(at - width / 2, plot.over.clientWidth - width));
      if (taken.some(([from, to]) => left < to && left + width > from)) continue;
      taken.push([left, left + width]);
      named.set(mark, left - at);
    }
    const elements = shown.map((mark) => {
      const { time, kind, text, title } = mark;
      const label = h("span", named.has(mark) ? { title, style: { left: `${named.get(mark)}px` } } : { class: "hidden" }, text);
      return h("div", { class: `mark ${kind}`, "data-mark": text, style: { left: `${plot.valToPos(time, "x")}px` } }, label);
    });
    for (const old of plot.over.querySelectorAll(".mark")) old.remove();
    plot.over.classList.toggle("many", elements.length > MANY_MARKS);
    plot.over.append(...elements);
  }

  // Shows the values at `index` in the legend, or the last values.
  showValues(index) {
    if (!this.data) {
      this.values.forEach((value) => put(value, ""));
      put(this.reading, "");
      return;
    }
    const at = index ?? this.data[1].findLastIndex((value) => value !== null);
    this.values.forEach((value, which) => put(value, at < 0 ? "" : this.format(this.data[which + 1][at] ?? null)));
    const counted = this.counts && at >= 0 ? `${this.counts[at]?.toLocaleString("en") ?? 0} ${this.count}, ` : "";
    put(this.reading, at < 0 ? "" : `${counted}${clock(this.data[0][at])}`);
    this.box.setAttribute("aria-label", `${this.title}: ${this.values.map((value) => value.textContent).join(", ")}`);
  }
}

// Range of an axis from 0 to at least `least`, with some room above the data.
export const fromZero = (least) => (_, high) => [0, Math.max(least, 1.15 * high)];
