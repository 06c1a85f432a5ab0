// What several pages are made of.

import { h, put, refill } from "./dom.js";
import { badgeOf, storyOf, told } from "./events.js";
import { clock, percent, whole } from "./format.js";
import { interval } from "./statistics.js";

export const badge = (text, mood = "") => h("span", { class: `badge ${mood}` }, text);

// A figure with its name and a note: `show(figure, note, mood)`.
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

export const tiles = (made, name) => h("section", { class: "tiles", "aria-label": name }, made.map((tile) => tile.element));

// A card with a title, a hint, and a body that pages fill.
export function card(title, hint, ...body) {
  const told = h("p", { class: "hint" }, hint);
  return { element: h("article", { class: "card" }, h("h2", {}, title), told, ...body), hint: told };
}

// Names beside figures: [name, figure, mood].
export function facts(list, rows) {
  refill(list, rows, () => rows.flatMap(([name, figure, mood]) => [h("dt", {}, name), h("dd", { class: mood ?? "" }, figure)]));
}

export const empty = (text) => h("p", { class: "empty" }, text);

// Rates with what they leave open: [{ name, part, of, ink, more }]. What stands on little is faint, and says so.
export function rateBars(box, rows, nothing) {
  refill(box, [rows, nothing], () => {
    if (!rows.length) return empty(nothing);
    return rows.map(({ name, part, of, ink = "--accent", more = "" }) => {
      const [low, high] = interval(part, of);
      const bar = h("div", { class: "track" },
        h("div", { class: "fill", style: { width: percent(of ? part / of : 0, 2).replace(" ", ""), "--paint": `var(${ink})` } }),
        h("div", { class: "whisker", style: { left: `${100 * low}%`, width: `${100 * (high - low)}%` } }));
      return h("div", { class: of < 40 ? "bar few" : "bar", "data-name": name },
        h("span", { class: "label" }, name), bar,
        h("b", {}, of ? percent(part / of) : "–"),
        h("span", { class: "of" }, `${whole(part)} of ${whole(of)}${more}`));
    });
  });
}

// The events as a list of sentences.
export class Lately {
  constructor(title, hint, kinds, nothing) {
    this.kinds = kinds;
    this.nothing = empty(nothing);
    this.list = h("ol", { class: "events", tabindex: 0, "aria-label": title });
    this.element = h("section", { class: "card" }, h("h2", {}, title), h("p", { class: "hint" }, hint), this.list, this.nothing);
  }

  show(events, more = () => null) {
    const rows = told(events, this.kinds).slice(0, 60);
    refill(this.list, rows, () =>
      rows.map((event) => {
        const [name, mood] = badgeOf(event);
        return h("li", {}, h("time", {}, clock(event.time)), h("div", {}, badge(name, mood)), h("div", {}, storyOf(event), more(event)));
      }));
    this.list.hidden = !rows.length;
    this.nothing.hidden = rows.length > 0;
  }
}

// A table whose rows become cards on a phone: `columns` are [title, numeric].
export class Table {
  constructor(id, columns, nothing) {
    this.columns = columns;
    this.body = h("tbody");
    this.nothing = empty(nothing);
    const head = columns.map(([title, numeric]) => h("th", { scope: "col", class: numeric ? "number" : "" }, title));
    this.table = h("table", { id, class: "stacked" }, h("thead", {}, h("tr", {}, head)), this.body);
    this.element = h("div", { class: "scroll" }, this.table, this.nothing);
  }

  // Rows are { key, cells, class }; `state` says whether anything has changed.
  show(state, make) {
    refill(this.body, state, () => {
      const rows = make();
      this.table.hidden = !rows.length;
      this.nothing.hidden = rows.length > 0;
      return rows.map(({ key, cells, mood = "" }) =>
        h("tr", { "data-key": key, class: mood }, cells.map((cell, index) => {
          const [title, numeric] = this.columns[index];
          return h(index ? "td" : "th", { "data-label": title, class: numeric ? "number" : "", scope: index ? null : "row" }, cell);
        })));
    });
  }
}
