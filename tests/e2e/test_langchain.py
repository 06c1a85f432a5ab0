"""LangChain's chat model for OpenAI as a client of the service."""

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
        monkeypatch.setenv(name, "false")  # tracing would contact another server
    return ChatOpenAI(
        model="tiny",
        base_url=f"{service.url}/v1",
        api_key="none",
        temperature=0.8,
        seed=4,
        max_tokens=200,
        max_retries=0,
    )


def test_chat_has_usage_and_finish_reason(model):
    answer = model.invoke([SystemMessage("You are terse."), HumanMessage("Hello")])
    assert isinstance(answer, AIMessage)
    assert answer.content
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert answer.usage_metadata["output_tokens"] <= 200
    assert answer.usage_metadata["total_tokens"] == sum(
        answer.usage_metadata[name] for name in ("input_tokens", "output_tokens")
    )


def test_stream_has_the_content_of_a_complete_answer(model):
    chunks = list(model.stream("Hello", stream_usage=True))
    assert len(chunks) > 2
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == model.invoke("Hello").content
    assert whole.usage_metadata["output_tokens"] > 0


def test_answer_has_logprobs(model):
    answer = model.bind(logprobs=True, top_logprobs=2).invoke("Hello")
    places = answer.response_metadata["logprobs"]["content"]
    assert all(len(place["top_logprobs"]) == 2 for place in places)
    assert len(places) == answer.usage_metadata["output_tokens"]


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tell the weather of a city."""
    return f"It rains in {city}."


def test_model_calls_a_tool_and_reads_the_result(model):
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
    """Answer of a structured request."""

    kind: Literal["cat", "dog"]
    legs: Literal[3, 4]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_has_the_requested_class(model, method):
    answer = model.with_structured_output(Pet, method=method).invoke("A cat")
    assert isinstance(answer, Pet)
