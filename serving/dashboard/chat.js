// Client of the chat API that streams an answer with the source and probability of each token.

import { authorization, refusal } from "./keys.js";
import { eventsOf } from "./sse.js";

// Sends a chat request and calls `onTokens(tokens, content)` for each event. Tokens are { text, source, probability,
// best: [[text, probability]] }. Returns { usage, drafts, finish, seconds, after }: `after` tokens arrived in the `seconds`
// after the first event with tokens.
export async function ask({ messages, speculate, temperature, tokens }, onTokens, signal) {
  const body = {
    messages, temperature, max_tokens: tokens, stream: true, stream_options: { include_usage: true },
    logprobs: true, top_logprobs: 5, osd: { sources: true, speculate },
  };
  const response = await fetch("/v1/chat/completions", {
    method: "POST", body: JSON.stringify(body), signal, headers: { ...authorization("chat"), "Content-Type": "application/json" },
  });
  if (!response.ok) throw Object.assign(new Error(await refusal(response)), { status: response.status });
  const result = { usage: null, drafts: null, finish: null, seconds: 0, after: 0 };
  let started = null;
  for await (const { data } of eventsOf(response)) {
    if (data === "[DONE]") break;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    if (event.usage) [result.usage, result.drafts] = [event.usage, event.metrics.speculative_decoding];
    for (const choice of event.choices) {
      const places = choice.logprobs?.content ?? [];
      const arrived = (choice.token_sources ?? []).map(({ token, source }, index) => ({
        text: token, source, probability: probability(places[index]), best: (places[index]?.top_logprobs ?? []).map((candidate) => [candidate.token, probability(candidate)]),
      }));
      if (arrived.length) {
        if (started === null) started = performance.now();
        else result.after += arrived.length;
        result.seconds = (performance.now() - started) / 1000;
      }
      result.finish = choice.finish_reason ?? result.finish;
      onTokens(arrived, choice.delta.content ?? "");
    }
  }
  if (!result.usage) throw new Error("The answer was cut off.");
  return result;
}

const probability = (place) => (place ? Math.exp(place.logprob) : null);

// Assigns parts of the text to tokens. Several tokens may form a character; the last of them gets it. The token that ends
// the answer has no text.
export class Placer {
  waiting = [];
  text = "";

  // Returns [token, text] of the tokens whose text is certain; at the `end`, of all tokens.
  place(tokens, content, end = false) {
    this.waiting.push(...tokens);
    this.text += content;
    const placed = [];
    while (this.waiting.length) {
      const at = this.leadingSpaces(this.waiting[0].text);
      if (at !== null) {
        placed.push([this.waiting.shift(), this.cut(at + this.waitingLength)]);
        continue;
      }
      const next = this.waiting.findIndex((token, index) => index > 0 && (this.indexOf(token.text) ?? -1) >= 0);
      if (next < 0) break;
      const before = this.cut(this.indexOf(this.waiting[next].text));
      this.waiting.splice(0, next).forEach((token, index) => placed.push([token, index === next - 1 ? before : ""]));
    }
    if (end) this.waiting.splice(0).forEach((token, index) => placed.push([token, index ? "" : this.cut(this.text.length)]));
    return placed;
  }

  // Returns the number of spaces before a token's text at the start of the text; null if it does not start there.
  leadingSpaces(text) {
    this.waitingLength = text.length;
    if (!text || text.includes("\ufffd")) return null;
    if (this.text.startsWith(text)) return 0;
    return this.text.startsWith(` ${text}`) ? 1 : null;
  }

  // Returns the position of a token's text near the start of the text, or null.
  indexOf(text) {
    const at = !text || text.includes("\ufffd") ? -1 : this.text.indexOf(text);
    return at >= 0 && at < 16 ? at : null;
  }

  cut(length) {
    const text = this.text.slice(0, length);
    this.text = this.text.slice(length);
    return text;
  }
}
