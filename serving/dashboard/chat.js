// One answer of the model, streamed, with who each token comes from and how probable it was.

import { authorization, refusal } from "./keys.js";
import { eventsOf } from "./sse.js";

// Asks, and tells `heard(tokens, content)` as they come. Tokens are { text, source, probability, best: [[text, probability]] }.
// Returns { usage, drafts, finish, seconds, after }: `after` tokens came in `seconds`, those after the first event.
export async function ask({ messages, speculate, temperature, tokens }, heard, signal) {
  const body = {
    messages, temperature, max_tokens: tokens, stream: true, stream_options: { include_usage: true },
    logprobs: true, top_logprobs: 5, osd: { sources: true, speculate },
  };
  const response = await fetch("/v1/chat/completions", {
    method: "POST", body: JSON.stringify(body), signal, headers: { ...authorization("chat"), "Content-Type": "application/json" },
  });
  if (!response.ok) throw Object.assign(new Error(await refusal(response)), { status: response.status });
  const told = { usage: null, drafts: null, finish: null, seconds: 0, after: 0 };
  let begun = null;
  for await (const { data } of eventsOf(response)) {
    if (data === "[DONE]") break;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    if (event.usage) [told.usage, told.drafts] = [event.usage, event.metrics.speculative_decoding];
    for (const choice of event.choices) {
      const places = choice.logprobs?.content ?? [];
      const came = (choice.token_sources ?? []).map(({ token, source }, index) => ({
        text: token, source, probability: probability(places[index]), best: (places[index]?.top_logprobs ?? []).map((one) => [one.token, probability(one)]),
      }));
      if (came.length) {
        if (begun === null) begun = performance.now();
        else told.after += came.length;
        told.seconds = (performance.now() - begun) / 1000;
      }
      told.finish = choice.finish_reason ?? told.finish;
      heard(came, choice.delta.content ?? "");
    }
  }
  if (!told.usage) throw new Error("The answer was cut off.");
  return told;
}

const probability = (place) => (place ? Math.exp(place.logprob) : null);

// Which part of the text each token is. A character may be made of several tokens: the last of them has it. What ends
// the answer has no text.
export class Placer {
  waiting = [];
  text = "";

  // Returns [token, text] of those that are certain now; all of them at the `end`.
  place(tokens, content, end = false) {
    this.waiting.push(...tokens);
    this.text += content;
    const placed = [];
    while (this.waiting.length) {
      const at = this.begins(this.waiting[0].text);
      if (at !== null) {
        placed.push([this.waiting.shift(), this.cut(at + this.waitingLength)]);
        continue;
      }
      const next = this.waiting.findIndex((token, index) => index > 0 && (this.found(token.text) ?? -1) >= 0);
      if (next < 0) break;
      const before = this.cut(this.found(this.waiting[next].text));
      this.waiting.splice(0, next).forEach((token, index) => placed.push([token, index === next - 1 ? before : ""]));
    }
    if (end) this.waiting.splice(0).forEach((token, index) => placed.push([token, index ? "" : this.cut(this.text.length)]));
    return placed;
  }

  // Spaces before the text of a token where the text begins with it, null where it does not.
  begins(text) {
    this.waitingLength = text.length;
    if (!text || text.includes("\ufffd")) return null;
    if (this.text.startsWith(text)) return 0;
    return this.text.startsWith(` ${text}`) ? 1 : null;
  }

  found(text) {
    const at = !text || text.includes("\ufffd") ? -1 : this.text.indexOf(text);
    return at >= 0 && at < 16 ? at : null;
  }

  cut(length) {
    const text = this.text.slice(0, length);
    this.text = this.text.slice(length);
    return text;
  }
}
