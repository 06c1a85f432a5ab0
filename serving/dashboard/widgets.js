// Elements that several pages use.

import { h, put, refill } from "./dom.js";
import { badgeOf, latest, sentenceOf } from "./events.js";
import { percent, when, whole } from "./format.js";
import { interval } from "./statistics.js";

export const badge = (text, mood = "") => h("span", { class: `badge ${mood}` }, text);

// Tile with a title, a figure and a note.
export class Tile {
  constructor(id, title, ink = "") {
    this.figure = h("p", { class: `figure ${ink}`, id: `now-${id}` }, "–");
    this.note = h("p", { class: "note", id: `note-${id}` });
    this.element = h("article", { class: "tile" }, h("h2", {}, title), this.figure, this.note);
  }

  show(figure, note, mood = "") {
    put(this.figure, figure);
    put(this.note, note);
    this.note.classList.toggle("bad", mood === "bad");
    return this;
  }
}

// List of named figures with notes; `names` maps ids to names.
export class Lines {
  constructor(names) {
    this.parts = Object.fromEntries(Object.keys(names).map((id) => [id, [h("b", { id: `now-${id}` }, "–"), h("span", { class: "note", id: `note-${id}` })]]));
    this.element = h("dl", { class: "lines" }, Object.entries(names).map(([id, name]) => h("div", {}, h("dt", {}, name), h("dd", {}, this.parts[id][0], " ", this.parts[id][1]))));
  }

  show(id, [figure, note]) {
    this.parts[id].forEach((element, index) => put(element, [figure, note][index]));
  }
}

export const tiles = (all, name) => h("section", { class: "tiles", "aria-label": name }, all.map((tile) => tile.element));

export const charts = (all) => h("section", { class: "charts", "aria-label": "Over time" }, all.map((chart) => chart.element));

// Creates a card with a title, a hint and a body.
export function card(title, text, ...body) {
  const hint = h("p", { class: "hint" }, text);
  return { element: h("article", { class: "card" }, h("h2", {}, title), hint, ...body), hint };
}

// Fills a list with rows of [name, figure, mood].
export function facts(list, rows) {
  refill(list, rows, () => rows.flatMap(([name, figure, mood]) => [h("dt", {}, name), h("dd", { class: mood ?? "" }, figure)]));
}

export const empty = (text) => h("p", { class: "empty" }, text);

// Fills a box with bars of rates and their intervals: [{ name, part, of, ink, more }]. Bars of small samples are faint. Only
// the first `limit` rows are shown. `nothing` is the text without rows.
export function rateBars(box, rows, nothing, limit = 12) {
  box.classList.toggle("named", rows.some(({ name }) => name.length > 12));
  refill(box, [rows, nothing], () => {
    if (!rows.length) return empty(nothing);
    const hidden = rows.length - limit;
    const rest = hidden > 0 ? [h("p", { class: "hint" }, `and ${hidden} more`)] : [];
    return rows.slice(0, limit).map(({ name, part, of, ink = "--accent", more = "" }) => {
      const [low, high] = interval(part, of);
      const bar = h("div", { class: "track" },
        h("div", { class: "fill", style: { width: percent(of ? part / of : 0, 2).replace(" ", ""), "--paint": `var(${ink})` } }),
        h("div", { class: "whisker", style: { left: `${100 * low}%`, width: `${100 * (high - low)}%` } }));
      return h("div", { class: of < 40 ? "bar few" : "bar", "data-name": name },
        h("span", { class: "label" }, name), bar,
        h("b", {}, of ? percent(part / of) : "–"),
        h("span", { class: "of" }, `${whole(part)} of ${whole(of)}${more}`));
    }).concat(rest);
  });
}

// List of events as sentences, newest first.
export class RecentEvents {
  constructor(title, hint, kinds, nothing) {
    this.kinds = kinds;
    this.nothing = empty(nothing);
    this.list = h("ol", { class: "events", tabindex: 0, "aria-label": title });
    this.element = h("section", { class: "card" }, h("h2", {}, title), h("p", { class: "hint" }, hint), this.list, this.nothing);
  }

  show(events, more = () => null) {
    const rows = latest(events, this.kinds).slice(0, 60);
    refill(this.list, rows, () =>
      rows.map((event) => {
        const [name, mood] = badgeOf(event);
        return h("li", {}, h("time", {}, when(event.time)), h("div", {}, badge(name, mood)), h("div", {}, sentenceOf(event), more(event)));
      }));
    this.list.hidden = !rows.length;
    this.nothing.hidden = rows.length > 0;
  }
}

const ROWS = 12;

// Table whose rows become cards on a phone; `columns` are [title, numeric]. Only the first rows and rows with `keep` are
// shown until the user asks for all rows.
export class Table {
  constructor(id, columns, nothing) {
    this.columns = columns;
    this.body = h("tbody");
    this.nothing = empty(nothing);
    const head = columns.map(([title, numeric]) => h("th", { scope: "col", class: numeric ? "number" : "" }, title));
    this.table = h("table", { id, class: "stacked" }, h("thead", {}, h("tr", {}, head)), this.body);
    this.all = false;
    this.more = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.toggle() });
    this.element = h("div", { class: "scroll" }, this.table, this.nothing, this.more);
  }

  toggle() {
    this.all = !this.all;
    this.show(...this.last);
  }

  // Shows the rows { key, cells, mood, keep } that `make` returns, if `state` differs from the last call.
  show(state, make) {
    this.last = [state, make];
    refill(this.body, [state, this.all], () => {
      const rows = make();
      const first = rows.filter(({ keep }, index) => keep || index < ROWS);
      this.table.hidden = !rows.length;
      this.nothing.hidden = rows.length > 0;
      this.more.hidden = first.length === rows.length;
      put(this.more, this.all ? "Show fewer" : `Show all ${rows.length}`);
      return (this.all ? rows : first).map(({ key, cells, mood = "" }) =>
        h("tr", { "data-key": key, class: mood }, cells.map((cell, index) => {
          const [title, numeric] = this.columns[index];
          return h(index ? "td" : "th", { "data-label": title, class: numeric ? "number" : "", scope: index ? null : "row" }, cell);
        })));
    });
  }
}
