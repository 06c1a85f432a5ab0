// Line charts over time with the swaps marked.

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const time = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
export const clock = (seconds) => time.format(1000 * seconds);
export const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);
export const fixed = (digits) => (value) => (value === null ? "–" : value.toFixed(digits));

// One chart: `show` redraws it with new data, and hides it behind a sentence while there is none.
export class Chart {
  constructor(id, { ink, format, label = format, range, empty }) {
    this.box = document.getElementById(id);
    Object.assign(this, { ink, format, label, range, plot: null, swaps: [], data: null });
    this.empty = this.box.appendChild(document.createElement("p"));
    this.empty.className = "empty";
    this.empty.textContent = empty;
    this.reading = this.box.appendChild(document.createElement("div"));
    this.reading.className = "reading";
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.rebuild());
  }

  size() {
    return { width: Math.max(this.box.clientWidth, 120), height: this.box.clientHeight };
  }

  show(times, values, swaps, [from, to]) {
    const filled = values.some((value) => value !== null);
    this.empty.hidden = filled;
    this.swaps = swaps;
    this.window = [from, to];
    this.data = filled ? [times, values] : null;
    if (!filled) {
      this.plot?.destroy();
      this.plot = null;
    } else if (this.plot) {
      this.plot.setData(this.data);
    } else {
      this.rebuild();
    }
  }

  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    if (!this.data) return;
    const axis = {
      stroke: colour("--soft"),
      font: "12px system-ui, sans-serif",
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false },
    };
    const stroke = colour(this.ink);
    this.plot = new uPlot(
      {
        ...this.size(),
        cursor: { y: false, points: { size: 8 }, drag: { x: false, y: false } },
        scales: { x: { range: () => this.window }, y: { range: (_, low, high) => this.range(low, high) } },
        axes: [
          { ...axis, grid: { show: false }, space: 90, size: 28, values: (_, ticks) => ticks.map(clock) },
          { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => this.label(tick)) },
        ],
        series: [
          {},
          {
            stroke,
            width: 2,
            fill: `color-mix(in srgb, ${stroke} 10%, transparent)`,
            spanGaps: true,
            points: { show: this.data[0].length < 3, size: 6, fill: stroke },
          },
        ],
        hooks: { draw: [(plot) => this.mark(plot)], setCursor: [(plot) => this.read(plot)] },
      },
      this.data,
      this.box,
    );
  }

  // Marks are elements over the canvas, so that they can carry text and be found.
  mark(plot) {
    for (const old of plot.over.querySelectorAll(".swap")) old.remove();
    for (const [time, version] of this.swaps) {
      if (time < this.window[0] || time > this.window[1]) continue;
      const line = document.createElement("div");
      line.className = "swap";
      line.dataset.version = version;
      line.style.left = `${plot.valToPos(time, "x")}px`;
      const label = line.appendChild(document.createElement("span"));
      label.textContent = `v${version}`;
      plot.over.appendChild(line);
    }
  }

  read(plot) {
    const value = plot.cursor.idx == null ? null : plot.data[1][plot.cursor.idx];
    this.reading.textContent =
      value == null ? "" : `${clock(plot.data[0][plot.cursor.idx])}  ${this.format(value)}`;
  }
}
