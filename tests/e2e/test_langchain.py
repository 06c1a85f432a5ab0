"""LangChain's chat model for OpenAI talks to the service as to OpenAI."""

from __future__ import annotations

from typing import Literal

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@pytest.fixture
def model(service, monkeypatch):
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
        monkeypatch.setenv(name, "false")  # it would tell a server elsewhere
    return ChatOpenAI(
        model="tiny",
        base_url=f"{service.url}/v1",
        api_key="none",
        temperature=0.8,
        seed=4,
        max_tokens=200,
        max_retries=0,
    )


def test_it_chats_with_usage_and_the_reason_of_the_end(model):
    answer = model.invoke([SystemMessage("You are terse."), HumanMessage("Hello")])
    assert isinstance(answer, AIMessage)
    assert answer.content
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert answer.usage_metadata["output_tokens"] <= 200
    assert answer.usage_metadata["total_tokens"] == sum(
        answer.usage_metadata[name] for name in ("input_tokens", "output_tokens")
    )


def test_it_streams_what_it_would_have_said_at_once(model):
    chunks = list(model.stream("Hello", stream_usage=True))
    assert len(chunks) > 2
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == model.invoke("Hello").content
    assert whole.usage_metadata["output_tokens"] > 0


def test_it_reports_logprobs(model):
    answer = model.bind(logprobs=True, top_logprobs=2).invoke("Hello")
    places = answer.response_metadata["logprobs"]["content"]
    assert all(len(place["top_logprobs"]) == 2 for place in places)
    assert len(places) == answer.usage_metadata["output_tokens"]


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tell the weather of a city."""
    return f"It rains in {city}."


def test_it_calls_a_tool_and_reads_the_result(model):
    bound = model.bind_tools([weather], tool_choice="weather")
    question = HumanMessage("Rain?")
    answer = bound.invoke([question])
    (call,) = answer.tool_calls
    assert call["name"] == "weather"
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert result.content in ("It rains in Rome.", "It rains in Oslo.")
    assert model.invoke([question, answer, result]).content is not None


class Pet(BaseModel):
    """What is asked about."""

    kind: Literal["cat", "dog"]
    legs: Literal[3, 4]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_what_the_class_says(model, method):
    found = model.with_structured_output(Pet, method=method).invoke("A cat")
    assert isinstance(found, Pet)
