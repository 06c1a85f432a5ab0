"""LangChain's chat model for OpenAI as a client of the service."""

from __future__ import annotations

from typing import Literal

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@pytest.fixture
def model(service, monkeypatch):
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
        monkeypatch.setenv(name, "false")  # tracing would contact another server
    return ChatOpenAI(
        model="tiny", base_url=f"{service.url}/v1", api_key="none", temperature=0.8, seed=4, max_tokens=200,
        max_retries=0,
    )  # fmt: skip


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
