"""Chat and streaming with OpenAI's own client, with the source of each token.

    osd up                                # in another terminal
    pip install openai
    python examples/openai_client.py      # --url, --key and --model for a service elsewhere

Fields that OpenAI does not define are sent in ``extra_body`` and received in ``model_extra``.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from openai import OpenAI

QUESTION: Any = [{"role": "user", "content": "Write a Python function that reverses a list."}]


def chat(client: OpenAI, model: str, tokens: int) -> None:
    """Print one answer with its draft counts."""
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=tokens)
    print(answer.choices[0].message.content)
    drafts = (answer.model_extra or {})["metrics"]["speculative_decoding"]
    print(f"\n{drafts['num_accepted_draft_tokens']} of {drafts['num_draft_tokens']} drafted tokens accepted,", end=" ")
    print(f"mean acceptance length {drafts['mean_acceptance_length']:.2f}")


def stream(client: OpenAI, model: str, tokens: int) -> None:
    """Print an answer as it streams, an event for each decoding step, and the sources of its tokens."""
    events = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"osd": {"sources": True}},
    )
    sources: Counter[str] = Counter()
    for event in events:
        for choice in event.choices:  # the last event has no choices, only the usage
            print(choice.delta.content or "", end="", flush=True)
            sources.update(token["source"] for token in (choice.model_extra or {}).get("token_sources") or [])
        if event.usage:
            print(f"\n\n{event.usage.completion_tokens} tokens:", end=" ")
    print(", ".join(f"{count} of {source}" for source, count in sources.most_common()))


def main() -> None:
    """Ask twice: the second time recall knows the answer, so most of the stream is drafted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="what osd up prints")
    parser.add_argument("--key", default="none", help="serving.api_key, if it is set")
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--tokens", type=int, default=120, help="limit of an answer")
    options = parser.parse_args()
    with OpenAI(base_url=f"{options.url}/v1", api_key=options.key) as client:
        model = options.model or client.models.list().data[0].id
        chat(client, model, options.tokens)
        stream(client, model, options.tokens)


if __name__ == "__main__":
    main()
