// Versions of a domain: what there is, two of them side by side, and what an operator does with them.

import { range } from "../account.js";
import { $, h, put, refill } from "../dom.js";
import { day, fixed, percent, points, seconds, signed, whole } from "../format.js";
import { authorization, forget, keep, keyFor, refusal } from "../keys.js";
import { interval } from "../statistics.js";
import { Table, badge, card, empty } from "../widgets.js";

const COLUMNS = [["Version"], ["State"], ["Parent"], ["Published"], ["Records", true], ["Held-out acceptance", true], ["Expected length", true], ["Live acceptance", true], ["Measured", true], ["Compare", true]];

// What may be done, and what is asked before; `of` names the domain where it is not the service's own.
const ACTIONS = {
  promote: { name: "Promote canary", says: (version, { canary, stable }, of) => `v${canary} takes the place of v${stable} and serves every request${of}.`, takes: false },
  rollback: { name: "Roll back", says: (version, { stable, canary }, of) => `v${version} serves every request${of} from now on, in place of v${stable}${canary === null ? "" : `; the trial of v${canary} ends`}.`, takes: true },
  pin: { name: "Pin", says: (version, state, of) => `v${version}${of} stays in service, whatever the trainer finds, until it is unpinned.`, takes: true },
  unpin: { name: "Unpin", says: (version, { stable }, of) => `The trainer may move on from v${stable}${of} again.`, takes: false },
};

export class Versions {
  constructor() {
    this.chosen = [];
    this.table = new Table("versions", COLUMNS, "No drafter version is published yet.");
    this.comparison = h("div", { id: "comparison" });
    this.where = h("select", { id: "domain", onchange: () => this.turn() });
    this.place = h("label", { class: "place", hidden: true }, "Domain", this.where);
    this.lost = h("p", { class: "notice bad", role: "alert", hidden: true });
    this.element = h("div", { class: "page" },
      this.place, this.lost, this.operator(),
      card("Drafter versions", "Held-out figures are what the gate measured; live ones are of this service's own requests, with the range that they leave open", this.table.element).element,
      card("Side by side", "Two versions that are ticked above", this.comparison).element);
  }

  operator() {
    this.key = h("input", { type: "password", id: "admin-key", autocomplete: "off", placeholder: "serving.admin_key", "aria-label": "Operator's key", required: true });
    this.open = h("form", { class: "row", onsubmit: (event) => this.enter(event) }, this.key, h("button", { type: "submit" }, "Use key"));
    this.which = h("select", { id: "which", "aria-label": "Version to act on" });
    this.buttons = Object.entries(ACTIONS).map(([action, { name, takes }]) => [action, h("button", { type: "button", id: `do-${action}`, onclick: () => this.ask(action) }, name), takes]);
    const leave = h("button", { type: "button", class: "quiet", onclick: () => this.leave() }, "Forget key");
    const taking = this.buttons.filter(([, , takes]) => takes).map(([, button]) => button);
    const others = this.buttons.filter(([, , takes]) => !takes).map(([, button]) => button);
    this.actions = h("div", { class: "actions", hidden: true }, h("span", { class: "group" }, this.which, taking), h("span", { class: "group" }, others), leave);
    this.said = h("p", { id: "said", role: "status" });
    this.question = h("p", {});
    this.yes = h("button", { type: "button", class: "primary", id: "confirm", onclick: () => this.act() }, "Yes");
    this.dialog = h("dialog", { "aria-labelledby": "asked" }, h("h2", { id: "asked" }, "Sure?"), this.question,
      h("div", { class: "row end" }, h("button", { type: "button", onclick: () => this.dialog.close() }, "Cancel"), this.yes));
    return h("section", { class: "card operator" }, h("h2", {}, "Operate"), h("p", { class: "hint" }, "Every action needs the operator's key, which stays in this tab, and is written to the audit log."),
      this.open, this.actions, this.said, this.dialog);
  }

  async enter(event) {
    event.preventDefault();
    keep("admin", this.key.value);
    const response = await this.request("admin", "/admin/drafters");
    if (response?.ok) this.say("The key is accepted.");
    else {
      forget("admin");
      this.say(response ? await refusal(response) : "The server does not answer.", "bad");
    }
    this.key.value = "";
    this.arrange();
  }

  leave() {
    forget("admin");
    this.say("The key is forgotten.");
    this.arrange();
    this.key.focus();
  }

  // What the server answers to who has this key, null where it does not.
  async request(right, path, body) {
    const sent = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
    try {
      return await fetch(path, { ...sent, headers: { ...authorization(right), "Content-Type": "application/json" } });
    } catch {
      return null;
    }
  }

  ask(action) {
    this.action = action;
    put($("asked"), `${ACTIONS[action].name}?`);
    put(this.question, ACTIONS[action].says(Number(this.which.value), this.state, this.of()));
    put(this.yes, ACTIONS[action].name);
    this.dialog.showModal();
  }

  async act() {
    this.dialog.close();
    const { takes, name } = ACTIONS[this.action];
    const body = { domain: this.state.domain, ...(takes ? { version: Number(this.which.value) } : {}) };
    this.say(`${name} …`);
    const response = await this.request("admin", `/admin/drafters/${this.action}`, body);
    if (response === null) return this.say("The server does not answer; nothing is known of the action.", "bad");
    if (!response.ok) return this.say(await refusal(response), "bad");
    const moved = await response.json();
    if (this.own.domain !== moved.domain) this.look();
    return this.say(`Done: v${moved.version}${this.of()} is in service${moved.pinned ? ", pinned" : ""}${moved.previous === moved.version ? "" : `; it was v${moved.previous}`}. Replicas follow within a second.`, "good");
  }

  say(text, mood = "") {
    this.said.className = mood;
    put(this.said, text);
  }

  // " of DOMAIN" where that is not the service's own.
  of() {
    return this.state.domain === this.own.domain ? "" : ` of ${this.state.domain}`;
  }

  show({ state }) {
    this.own = state;
    const chosen = this.where.value;
    refill(this.where, [state.domains], () => state.domains.map((name) => h("option", { value: name, selected: name === chosen }, name)));
    this.place.hidden = state.domains.length < 2;
    if (this.where.value === state.domain) this.fill(state);
    else this.look();
  }

  // Another domain is shown from now on; nothing can be done before it is there.
  turn() {
    this.state = null;
    this.chosen = [];
    this.say("");
    this.element.setAttribute("aria-busy", "true");
    this.arrange();
    this.show({ state: this.own });
  }

  // Domains beside the service's own are not in the stream: they are asked for whenever that says something.
  async look() {
    const domain = this.where.value;
    if (this.asked === domain) return;
    this.asked = domain;
    const response = await this.request("watch", `/dashboard/versions?domain=${encodeURIComponent(domain)}`);
    const found = response?.ok ? await response.json() : null;
    if (this.asked === domain) this.asked = null;
    if (this.where.value !== domain) return;
    if (found) this.fill(found);
    this.lost.hidden = found !== null;
    put(this.lost, found ? "" : response ? await refusal(response) : "The server does not answer.");
  }

  fill(state) {
    const { domain, versions, stable, canary, pinned } = state;
    const before = this.state?.domain === domain ? Number(this.which.value) : 0;
    this.state = state;
    this.lost.hidden = true;
    this.element.removeAttribute("aria-busy");
    this.arrange();
    const told = [domain, versions, stable, canary, pinned, state.share, this.chosen];
    this.table.show(told, () => [...versions].reverse().map((version) => this.row(version)));
    refill(this.which, [domain, versions.map(({ number, problem }) => [number, problem]), stable], () => {
      const known = before || versions.findLast(({ number, problem }) => number < stable && !problem)?.number || stable;
      return [...versions].reverse().filter(({ problem }) => !problem).map(({ number }) =>
        h("option", { value: number, selected: number === known }, number === stable ? `v${number}, in service` : `v${number}`));
    });
    refill(this.comparison, told, () => this.compared());
  }

  arrange() {
    const open = keyFor("admin") !== null;
    this.open.hidden = open;
    this.actions.hidden = !open;
    const { stable, canary, pinned } = this.state ?? { stable: null, canary: null, pinned: false };
    const possible = { promote: canary !== null, rollback: stable !== null, pin: stable !== null, unpin: pinned };
    for (const [action, button] of this.buttons) button.disabled = !possible[action];
  }

  row(version) {
    const { number, manifest, live, speedup } = version;
    const gate = manifest.gate ?? {};
    const tick = h("input", { type: "checkbox", "aria-label": `Compare v${number}`, onchange: () => this.choose(number) });
    tick.checked = this.chosen.includes(number);
    return {
      key: number, keep: version.in_service || [this.state.stable, this.state.canary, ...this.chosen].includes(number),
      cells: [
        h("strong", {}, `v${number}`), this.stateOf(version), manifest.parent ? `v${manifest.parent}` : "–", day(manifest.created), whole(manifest.trained_on?.records),
        against(gate.acceptance, gate.baseline_acceptance, percent, points), against(gate.expected_length, gate.baseline_expected_length, fixed(2)), lived(live), measured(speedup),
        h("label", { class: "tick" }, tick),
      ],
    };
  }

  stateOf({ number, problem, in_service: serving }) {
    const { stable, canary, share, pinned } = this.state;
    if (problem) return badge("damaged", "bad");
    if (number === canary) return badge(`canary, ${percent(share, 0)}`, "good");
    if (serving) return [badge("in service", "good"), pinned && number === stable ? badge("pinned") : null].filter(Boolean);
    if (number === stable) return badge(this.state.domain === this.own.domain ? "next" : "not loaded");
    return badge(stable !== null && number > stable ? "set aside" : "earlier");
  }

  choose(number) {
    this.chosen = this.chosen.includes(number) ? this.chosen.filter((other) => other !== number) : [...this.chosen, number].slice(-2);
    this.fill(this.state);
    document.querySelector(`#versions tr[data-key="${number}"] input`)?.focus();
  }

  compared() {
    const pair = this.chosen.map((number) => this.state.versions.find((version) => version.number === number)).filter(Boolean).sort((a, b) => a.number - b.number);
    if (pair.length < 2) return empty("Tick two versions to see them side by side.");
    const line = (name, value, format, better = 0, between = format) => {
      const [a, b] = pair.map(value);
      const change = a == null || b == null ? null : b - a;
      const mood = !change || !better ? "" : Math.sign(change) === better ? "good" : "bad";
      return h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "number" }, format(a)), h("td", { class: "number" }, format(b)),
        h("td", { class: `number ${mood}` }, change === null ? "–" : signed(between)(change)));
    };
    const gate = (name) => ({ manifest }) => manifest.gate?.[name];
    return [
      h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Figure"), pair.map(({ number }) => h("th", { scope: "col", class: "number" }, `v${number}`)), h("th", { scope: "col", class: "number" }, "Change"))),
        h("tbody", {},
          line("Held-out acceptance", gate("acceptance"), percent, 1, points), line("Expected length", gate("expected_length"), fixed(2), 1),
          line("Live acceptance", ({ live }) => (live.drafted ? live.accepted / live.drafted : null), percent, 1, points),
          line("Live draft tokens", ({ live }) => live.drafted, whole), line("Records trained on", ({ manifest }) => manifest.trained_on?.records, whole),
          line("Core seconds of training", ({ manifest }) => manifest.cost?.core_seconds, seconds, -1)))),
      h("p", { class: "hint" }, clear(pair.map(({ live }) => live), pair)),
    ];
  }
}

function against(now, before, format, between = format) {
  if (now == null) return "–";
  if (before == null) return format(now);
  return [format(now), h("span", { class: `delta ${now < before ? "bad" : "good"}` }, signed(between)(now - before))];
}

function measured(speedup) {
  if (speedup?.width == null) return "–";
  return [signed(percent)(Math.expm1(speedup.log)), h("span", { class: "delta" }, range(speedup))];
}

function lived({ drafted, accepted }) {
  if (!drafted) return "–";
  const [low, high] = interval(accepted, drafted);
  return [percent(accepted / drafted), h("span", { class: "delta" }, `${percent(low, 0).replace(" %", "")}–${percent(high, 0)} of ${whole(drafted)}`)];
}

// Whether live acceptance tells the two apart.
function clear([a, b], pair) {
  if (!a.drafted || !b.drafted) return "Not both have drafted for requests, so live figures do not tell them apart.";
  const [one, other] = [a, b].map(({ accepted, drafted }) => interval(accepted, drafted));
  if (one[1] < other[0]) return `Live, v${pair[1].number} is accepted more: the ranges of 95 % do not meet.`;
  if (other[1] < one[0]) return `Live, v${pair[0].number} is accepted more: the ranges of 95 % do not meet.`;
  return "Live, the ranges of 95 % meet: what was drafted so far does not tell them apart.";
}
