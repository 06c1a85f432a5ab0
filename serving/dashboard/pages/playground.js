// Playground page: a chat that shows the source of each token, and compares it with plain decoding.

import { Answer, GROUPS } from "../answer.js";
import { ask } from "../chat.js";
import { h, put } from "../dom.js";
import { times } from "../format.js";
import { keep } from "../keys.js";
import { badge } from "../widgets.js";

const EXAMPLES = ["Write a Python function that reverses a list, with a docstring.", "List the planets of the solar system, each on its own line.", "Explain in two sentences what a hash table is."];

export class Playground {
  constructor() {
    this.messages = [];
    this.running = null;
    this.prompt = h("textarea", { id: "prompt", rows: 3, "aria-label": "Message", placeholder: "Message to the model", onkeydown: (event) => this.onKey(event) });
    this.send = h("button", { type: "submit", class: "primary", id: "send" }, "Send");
    this.stop = h("button", { type: "button", id: "stop", hidden: true, onclick: () => this.running?.abort() }, "Stop");
    this.temperature = h("input", { type: "number", id: "temperature", min: 0, max: 2, step: 0.1, value: 0 });
    this.tokens = h("input", { type: "number", id: "tokens", min: 1, max: 2048, step: 1, value: 160 });
    this.compare = h("input", { type: "checkbox", id: "compare", checked: true });
    this.turns = h("div", { class: "turns", "aria-live": "off" });
    this.examples = h("div", { class: "examples" }, h("p", { class: "hint" }, "Try an example. Send it twice: recall drafts from the first answer, unless the service keeps no requests."),
      EXAMPLES.map((text) => h("button", { type: "button", onclick: () => this.start(text) }, text)));
    this.turns.append(this.examples);
    this.plain = h("p", { class: "note-card", hidden: true }, "Drafting is off: the target samples every token.");
    const legend = h("p", { class: "legend-line" }, Object.entries(GROUPS).filter(([group]) => group !== "grammar").map(([group, [name, description]]) =>
      h("span", { title: description }, h("span", { class: `token ${group}` }, name))), h("span", { class: "hint" }, "Point at a token, or select it with the arrow keys, to see its probability."));
    this.key = h("input", { type: "password", "aria-label": "API key for chats", autocomplete: "off", required: true });
    this.login = h("form", { class: "card row", hidden: true, onsubmit: (event) => this.enter(event) }, this.key, h("button", { type: "submit", class: "primary" }, "Use key"));
    this.form = h("form", { class: "card composer", onsubmit: (event) => { event.preventDefault(); this.start(this.prompt.value); } },
      this.prompt,
      h("div", { class: "row wrap" },
        h("label", {}, "Temperature", this.temperature), h("label", {}, "Max tokens", this.tokens), h("label", { class: "check" }, this.compare, "Compare with plain decoding"),
        h("span", { class: "grow" }), h("button", { type: "button", class: "quiet", onclick: () => this.clear() }, "New chat"), this.stop, this.send));
    this.element = h("div", { class: "page playground" }, this.plain, legend, this.turns, this.login, this.form);
  }

  show({ state: { drafter, replicas } }) {
    this.plain.hidden = !(drafter === "none" || (replicas.length > 0 && replicas.every(({ speculation }) => !speculation)));
  }

  onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.start(this.prompt.value);
    }
  }

  enter(event) {
    event.preventDefault();
    keep("chat", this.key.value);
    this.key.value = "";
    this.login.hidden = true;
    this.prompt.focus();
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.turns.replaceChildren(this.examples);
    this.prompt.focus();
  }

  async start(text) {
    if (this.running || !text.trim()) return;
    if (!this.temperature.reportValidity() || !this.tokens.reportValidity()) return;
    this.running = new AbortController();
    [this.send.hidden, this.stop.hidden] = [true, false];
    this.prompt.value = "";
    this.examples.remove();
    const { signal } = this.running;
    const messages = [...this.messages, { role: "user", content: text }];
    const fast = new Answer("With drafts");
    const answers = h("div", { class: "answers" }, fast.element);
    const verdict = h("p", { class: "verdict" });
    const turn = h("article", { class: "turn" }, h("p", { class: "message" }, text), answers, verdict);
    this.turns.append(turn);
    turn.scrollIntoView({ block: "nearest" });
    const rate = await this.answer(fast, messages, true, signal);
    if (rate !== undefined) this.messages = [...messages, { role: "assistant", content: fast.content }];
    if (rate !== undefined && this.compare.checked && !signal.aborted) {
      const slow = new Answer("Plain decoding");
      answers.append(slow.element);
      const plain = await this.answer(slow, messages, false, signal);
      if (plain) verdict.append(h("b", {}, `${times(rate / plain)} `), "the speed of plain decoding ", slow.content === fast.content ? badge("same text", "good") : badge("different text"));
    }
    this.running = null;
    [this.send.hidden, this.stop.hidden] = [false, true];
  }

  // Streams an answer; returns its tokens per second, or undefined if it failed.
  async answer(answer, messages, speculate, signal) {
    const request = { messages, speculate, temperature: Number(this.temperature.value), tokens: Number(this.tokens.value) };
    put(answer.speed, "…");
    try {
      return answer.end(await ask(request, (tokens, content) => answer.append(tokens, content), signal));
    } catch (error) {
      put(answer.speed, "");
      answer.fail(signal.aborted ? "Stopped." : error instanceof TypeError ? "The server does not answer." : error.message);
      if (error.status === 401 || error.status === 403) {
        this.login.hidden = false;
        this.key.focus();
      }
      return undefined;
    }
  }
}
