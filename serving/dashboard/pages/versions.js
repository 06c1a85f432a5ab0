// Versions page: versions of a domain, a comparison of two versions, and the operator's actions.

import { range } from "../account.js";
import { $, h, put, refill } from "../dom.js";
import { day, fixed, percent, points, seconds, signed, whole } from "../format.js";
import { authorization, forget, keep, keyFor, refusal } from "../keys.js";
import { interval } from "../statistics.js";
import { Table, badge, card, empty } from "../widgets.js";

const COLUMNS = [["Version"], ["State"], ["Parent"], ["Published"], ["Records", true], ["Held-out acceptance", true], ["Expected length", true], ["Live acceptance", true], ["Measured", true], ["Compare", true]];

// Actions of the operator. `effect` returns the text of the confirmation; `suffix` names the domain unless it is the
// service's domain. Actions with `takesVersion` act on the selected version.
const ACTIONS = {
  promote: { name: "Promote canary", effect: (version, { canary, stable }, suffix) => `v${canary} will replace v${stable} and draft for every request${suffix}.`, takesVersion: false },
  rollback: { name: "Roll back", effect: (version, { stable, canary }, suffix) => `v${version} will replace v${stable} and draft for every request${suffix}${canary === null ? "" : `; the trial of v${canary} ends`}.`, takesVersion: true },
  pin: { name: "Pin", effect: (version, state, suffix) => `v${version}${suffix} will stay in service until it is unpinned; the trainer will not replace it.`, takesVersion: true },
  unpin: { name: "Unpin", effect: (version, { stable }, suffix) => `The trainer may replace v${stable}${suffix} again.`, takesVersion: false },
};

export class Versions {
  constructor() {
    this.selected = [];
    this.table = new Table("versions", COLUMNS, "No drafter version is published yet. The first one is published when the service starts, and the next when a candidate of the trainer passes the gate.");
    this.comparison = h("div", { id: "comparison" });
    this.domains = h("select", { id: "domain", onchange: () => this.changeDomain() });
    this.domainLabel = h("label", { class: "place", hidden: true }, "Domain", this.domains);
    this.oneDomain = h("p", { class: "hint" });
    this.error = h("p", { class: "notice bad", role: "alert", hidden: true });
    this.element = h("div", { class: "page" },
      this.domainLabel, this.oneDomain, this.error, this.operator(),
      card("Drafter versions", "The gate measured the held-out figures; live figures are from requests of this service, with 95 % intervals", this.table.element).element,
      card("Comparison", "The two versions that are selected in the table", this.comparison).element);
  }

  operator() {
    this.key = h("input", { type: "password", id: "admin-key", autocomplete: "off", placeholder: "serving.admin_key", "aria-label": "Operator's key", required: true });
    this.keyForm = h("form", { class: "row", onsubmit: (event) => this.enter(event) }, this.key, h("button", { type: "submit" }, "Use key"));
    this.version = h("select", { id: "version", "aria-label": "Version to act on" });
    this.buttons = Object.entries(ACTIONS).map(([action, { name }]) => [action, h("button", { type: "button", id: `do-${action}`, onclick: () => this.ask(action) }, name)]);
    const group = (takesVersion) => this.buttons.filter(([action]) => ACTIONS[action].takesVersion === takesVersion).map(([, button]) => button);
    const forgetButton = h("button", { type: "button", class: "quiet", onclick: () => this.forgetKey() }, "Forget key");
    this.actions = h("div", { class: "actions", hidden: true }, h("span", { class: "group" }, this.version, group(true)), h("span", { class: "group" }, group(false)), forgetButton);
    this.result = h("p", { id: "result", role: "status" });
    this.effect = h("p", {});
    this.confirm = h("button", { type: "button", class: "primary", id: "confirm", onclick: () => this.act() }, "Confirm");
    this.dialog = h("dialog", { "aria-labelledby": "dialog-title" }, h("h2", { id: "dialog-title" }, "Confirm"), this.effect,
      h("div", { class: "row end" }, h("button", { type: "button", onclick: () => this.dialog.close() }, "Cancel"), this.confirm));
    return h("section", { class: "card operator" }, h("h2", {}, "Operate"), h("p", { class: "hint" }, "Actions need the operator's key, which stays in this tab. The audit log records every action."),
      this.keyForm, this.actions, this.result, this.dialog);
  }

  async enter(event) {
    event.preventDefault();
    keep("admin", this.key.value);
    const response = await this.request("admin", "/admin/drafters");
    if (response?.ok) this.report("The key is accepted.");
    else {
      forget("admin");
      this.report(response ? await refusal(response) : "The server does not answer.", "bad");
    }
    this.key.value = "";
    this.updateControls();
  }

  forgetKey() {
    forget("admin");
    this.report("The key is forgotten.");
    this.updateControls();
    this.key.focus();
  }

  // Sends a request with the key of a right; returns the response, or null if the server does not answer.
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
    put($("dialog-title"), `${ACTIONS[action].name}?`);
    put(this.effect, ACTIONS[action].effect(Number(this.version.value), this.state, this.suffix()));
    put(this.confirm, ACTIONS[action].name);
    this.dialog.showModal();
  }

  async act() {
    this.dialog.close();
    const { takesVersion, name } = ACTIONS[this.action];
    const body = { domain: this.state.domain, ...(takesVersion ? { version: Number(this.version.value) } : {}) };
    this.report(`${name} …`);
    const response = await this.request("admin", `/admin/drafters/${this.action}`, body);
    if (response === null) return this.report("The server does not answer. It may have carried out the action.", "bad");
    if (!response.ok) return this.report(await refusal(response), "bad");
    const moved = await response.json();
    if (this.service.domain !== moved.domain) this.loadDomain();
    return this.report(`Done: v${moved.version}${this.suffix()} is in service${moved.pinned ? ", pinned" : ""}${moved.previous === moved.version ? "" : `, and replaces v${moved.previous}`}. Replicas follow within a second.`, "good");
  }

  report(text, mood = "") {
    this.result.className = mood;
    put(this.result, text);
  }

  // Returns " of DOMAIN" unless the domain is the service's domain.
  suffix() {
    return this.state.domain === this.service.domain ? "" : ` of ${this.state.domain}`;
  }

  show({ state }) {
    this.service = state;
    const selected = this.domains.value;
    refill(this.domains, [state.domains], () => state.domains.map((name) => h("option", { value: name, selected: name === selected }, name)));
    this.domainLabel.hidden = state.domains.length < 2;
    this.oneDomain.hidden = !this.domainLabel.hidden;
    put(this.oneDomain, `Only the domain ${state.domain} has versions. Set trainer.extra_domains to train drafters of further domains.`);
    if (this.domains.value === state.domain) this.render(state);
    else this.loadDomain();
  }

  // Shows the selected domain; actions are disabled until its data has arrived.
  changeDomain() {
    this.state = null;
    this.selected = [];
    this.report("");
    this.element.setAttribute("aria-busy", "true");
    this.updateControls();
    this.show({ state: this.service });
  }

  // Requests the data of the selected domain. The stream holds the service's domain only, so each event leads to a request.
  async loadDomain() {
    const domain = this.domains.value;
    if (this.loading === domain) return;
    this.loading = domain;
    const response = await this.request("watch", `/dashboard/versions?domain=${encodeURIComponent(domain)}`);
    const state = response?.ok ? await response.json() : null;
    if (this.loading === domain) this.loading = null;
    if (this.domains.value !== domain) return;
    if (state) this.render(state);
    this.error.hidden = state !== null;
    put(this.error, state ? "" : response ? await refusal(response) : "The server does not answer.");
  }

  render(state) {
    const { domain, versions, stable, canary, pinned } = state;
    const before = this.state?.domain === domain ? Number(this.version.value) : 0;
    this.state = state;
    this.error.hidden = true;
    this.element.removeAttribute("aria-busy");
    this.updateControls();
    const key = [domain, versions, stable, canary, pinned, state.share, this.selected];
    this.table.show(key, () => [...versions].reverse().map((version) => this.row(version)));
    refill(this.version, [domain, versions.map(({ number, problem }) => [number, problem]), stable], () => {
      const selected = before || versions.findLast(({ number, problem }) => number < stable && !problem)?.number || stable;
      return [...versions].reverse().filter(({ problem }) => !problem).map(({ number }) =>
        h("option", { value: number, selected: number === selected }, number === stable ? `v${number}, in service` : `v${number}`));
    });
    refill(this.comparison, key, () => this.compared());
  }

  updateControls() {
    const open = keyFor("admin") !== null;
    this.keyForm.hidden = open;
    this.actions.hidden = !open;
    const { stable, canary, pinned } = this.state ?? { stable: null, canary: null, pinned: false };
    const possible = { promote: canary !== null, rollback: stable !== null, pin: stable !== null, unpin: pinned };
    for (const [action, button] of this.buttons) button.disabled = !possible[action];
  }

  row(version) {
    const { number, manifest, live, speedup } = version;
    const gate = manifest.gate ?? {};
    const checkbox = h("input", { type: "checkbox", "aria-label": `Compare v${number}`, onchange: () => this.select(number) });
    checkbox.checked = this.selected.includes(number);
    return {
      key: number, keep: version.in_service || [this.state.stable, this.state.canary, ...this.selected].includes(number),
      cells: [
        h("strong", {}, `v${number}`), this.stateOf(version), manifest.parent ? `v${manifest.parent}` : "–", day(manifest.created), whole(manifest.trained_on?.records),
        withChange(gate.acceptance, gate.baseline_acceptance, percent, points), withChange(gate.expected_length, gate.baseline_expected_length, fixed(2)), liveAcceptance(live), measured(speedup),
        h("label", { class: "tick" }, checkbox),
      ],
    };
  }

  stateOf({ number, problem, in_service: serving }) {
    const { stable, canary, share, pinned } = this.state;
    if (problem) return badge("damaged", "bad");
    if (number === canary) return badge(`canary, ${percent(share, 0)}`, "good");
    if (serving) return [badge("in service", "good"), pinned && number === stable ? badge("pinned") : null].filter(Boolean);
    if (number === stable) return badge(this.state.domain === this.service.domain ? "next" : "not loaded");
    return badge(stable !== null && number > stable ? "set aside" : "earlier");
  }

  select(number) {
    this.selected = this.selected.includes(number) ? this.selected.filter((each) => each !== number) : [...this.selected, number].slice(-2);
    this.render(this.state);
    document.querySelector(`#versions tr[data-key="${number}"] input`)?.focus();
  }

  compared() {
    const pair = this.selected.map((number) => this.state.versions.find((version) => version.number === number)).filter(Boolean).sort((a, b) => a.number - b.number);
    if (pair.length < 2) return empty("Select two versions in the table to compare them.");
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
      h("p", { class: "hint" }, conclusion(pair.map(({ live }) => live), pair)),
    ];
  }
}

function withChange(now, before, format, between = format) {
  if (now == null) return "–";
  if (before == null) return format(now);
  return [format(now), h("span", { class: `delta ${now < before ? "bad" : "good"}` }, signed(between)(now - before))];
}

function measured(speedup) {
  if (speedup?.width == null) return "–";
  return [signed(percent)(Math.expm1(speedup.log)), h("span", { class: "delta" }, range(speedup))];
}

function liveAcceptance({ drafted, accepted }) {
  if (!drafted) return "–";
  const [low, high] = interval(accepted, drafted);
  return [percent(accepted / drafted), h("span", { class: "delta" }, `${percent(low, 0).replace(" %", "")}–${percent(high, 0)} of ${whole(drafted)}`)];
}

// Returns a sentence that compares the live acceptance rates of two versions.
function conclusion([a, b], pair) {
  if (!a.drafted || !b.drafted) return "The live acceptance rates cannot be compared, because one version has no drafts.";
  const [first, second] = [a, b].map(({ accepted, drafted }) => interval(accepted, drafted));
  const [better] = first[1] < second[0] ? [pair[1]] : second[1] < first[0] ? [pair[0]] : [];
  if (better) return `v${better.number} has the higher live acceptance rate: the 95 % intervals do not overlap.`;
  return "The live acceptance rates do not differ clearly: their 95 % intervals overlap.";
}
