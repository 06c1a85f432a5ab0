"""Structured outputs: answers that match a Pydantic model, a choice or a pattern.

    osd up                                # in another terminal
    pip install openai
    python examples/structured_output.py  # --url, --key and --model for a service elsewhere

Tokens that the form forces (names, quotes, brackets) are drafted without a model: the source "grammar" below.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Annotated, Any, Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class Trip(BaseModel):
    """Plan of a trip."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: Annotated[int, Field(ge=1, le=14)]
    by: Literal["train", "plane", "ship"]
    abroad: bool


def plan_trip(client: OpenAI, model: str) -> Trip:
    """Return a trip as an object of a Pydantic model."""
    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Plan a trip for me. Answer in JSON."}],
        response_format=Trip,
        max_tokens=120,
        extra_body={"osd": {"sources": True}},
    )
    (choice,) = answer.choices
    sources = Counter(token["source"] for token in (choice.model_extra or {})["token_sources"])
    print(choice.message.content)
    print(f"{sources['grammar']} of {sources.total()} tokens forced by the form")
    assert choice.message.parsed is not None  # noqa: S101  an answer that ends is complete
    return choice.message.parsed


def constrained_answer(client: OpenAI, model: str, question: str, form: dict[str, Any]) -> str:
    """Return an answer that matches one of vLLM's forms: json, regex, choice or grammar."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=40,
        extra_body={"structured_outputs": form},
    )
    return answer.choices[0].message.content or ""


def main() -> None:
    """Ask for an object, a choice and a pattern."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="what osd up prints")
    parser.add_argument("--key", default="none", help="serving.api_key, if it is set")
    parser.add_argument("--model", help="default: the first of /v1/models")
    options = parser.parse_args()
    with OpenAI(base_url=f"{options.url}/v1", api_key=options.key) as client:
        model = options.model or client.models.list().data[0].id
        trip = plan_trip(client, model)
        print(f"{trip.days} days in {trip.city} by {trip.by}")
        print(constrained_answer(client, model, "Is the sky blue?", {"choice": ["yes", "no"]}))
        print(constrained_answer(client, model, "Give me a colour in CSS notation.", {"regex": "#[0-9a-f]{6}"}))


if __name__ == "__main__":
    main()
