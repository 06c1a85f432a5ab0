"""Traces of another server's answers, compared with the logits of transformers at each position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from osd.capture import exchange as exchanges
from osd.capture.exchange import Exchange, ExchangeError, FunctionCall
from osd.capture.trace import NOT_DRAFTED, RecordFormatError, TraceError, decode, encode
from osd.config import CaptureSettings
from osd.labelling.labeller import ROWS, Labeller
from osd.labelling.rendering import Reading, Renderer
from osd.runtime.model import SlotModel
from osd.runtime.taps import tapped
from osd.target.model import load_model
from tests.tiny import VOCABULARY, tokenizer

EOS = 257
TAPS = (0, 2)
TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}</s>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Template that ends every message with </s> and can start an answer, like the templates of real models."""


def exchange(answer: str = "Yes.", prompt: Any = "Is it?", **changed: Any) -> Exchange:
    fields: dict[str, Any] = {
        "request_id": "cmpl-1-0", "created": 5.0, "domain": "general", "target": "tiny", "temperature": 0.7, "top_k": 3,
        "top_p": 0.9, "chat": b"", "text": json.dumps(prompt).encode(), "answer": answer, "calls": (), "ended": True,
    }  # fmt: skip
    return Exchange(**{**fields, **changed})


def chat(turns: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"chat": json.dumps({"messages": turns, **more}).encode(), "text": b""}


def test_exchange_with_another_format_number_is_refused():
    assert exchanges.decode(exchanges.encode(exchange())) == exchange()
    with pytest.raises(RecordFormatError, match=r"^the record has format 2 and this build reads format 1: "):
        exchanges.decode(exchanges.encode(exchange(format=2)))


@pytest.fixture
def renderer() -> Renderer:
    tiny_tokenizer = tokenizer()
    tiny_tokenizer.chat_template = TEMPLATE
    return Renderer(tiny_tokenizer, frozenset({EOS}), VOCABULARY)


def test_deep_exchange_is_refused(renderer):
    deep = "[" * 600 + "]" * 600
    turns = [{"role": "user", "content": "a"}]
    with pytest.raises(ExchangeError, match="a call's arguments is nested more than 100 levels deep"):
        renderer.read(exchange(calls=(FunctionCall("1", "f", deep),), **chat(turns)))
    conversation = b'{"messages": [{"role": "user", "content": "a", "x": %s}]}' % deep.encode()
    with pytest.raises(ExchangeError, match="nested more than 100 levels deep"):
        renderer.read(exchange(chat=conversation))


@pytest.fixture(scope="module")
def reference(tiny_target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)


@pytest.fixture
def model(tiny_target: Path) -> SlotModel:
    loaded = load_model(tiny_target, "float32", "cpu")
    return SlotModel(loaded, slots=3, context=600, scratch=1, taps=TAPS, label="tiny@1")


def test_trace_has_the_logits_and_states_of_the_target(model, reference):
    generator = np.random.default_rng(0)
    lengths = [(5, 9), (ROWS + 3, 2), (1, 2 * ROWS), (40, 40), (7, 1)]  # more conversations than slots
    readings = [
        Reading(exchange(request_id=f"r{n}"), *(generator.integers(0, 256, size).tolist() for size in sizes))
        for n, sizes in enumerate(lengths)
    ]
    traces = Labeller(model, CaptureSettings(top_k=6), 3).traces(readings)
    assert [trace.request_id for trace in traces] == [f"r{n}" for n in range(5)]
    for reading, trace in zip(readings, traces, strict=True):
        decode(encode(trace))  # raises if the arrays do not fit each other
        prompt, text = reading.prompt, torch.tensor([reading.prompt + reading.completion])
        with torch.no_grad(), tapped(reference, TAPS) as outputs:
            logp = reference(text).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        assert trace.completion_ids.numpy().tolist() == reading.completion
        ids = torch.tensor(trace.target_ids.numpy().tolist())
        np.testing.assert_allclose(trace.target_logp.numpy(), logp.gather(-1, ids), atol=0.02)
        np.testing.assert_allclose(trace.target_logp.numpy(), logp.topk(6).values, atol=0.02)
        rest = 1 - logp.topk(6).values.exp().sum(-1)
        np.testing.assert_allclose(np.exp(trace.target_tail.numpy().astype(float)), rest, atol=0.01)
        hidden = (trace.hidden.numpy().astype(np.uint32) << 16).view(np.float32)
        states = torch.cat([outputs[tap][0] for tap in TAPS], -1)[:-1]
        np.testing.assert_allclose(hidden, states, atol=0.05, rtol=0.02)
        assert (trace.verdict.numpy() == NOT_DRAFTED).all()
        assert (trace.target, trace.created, trace.temperature, trace.completes) == ("tiny@1", 5.0, 0.7, True)


def test_long_answer_is_segmented_and_cut_to_the_context(model):
    answer_ids = list(range(200))
    readings = [
        Reading(exchange(request_id="long"), [1], answer_ids),
        Reading(exchange(request_id="full"), [1] * 600, [2]),
        Reading(exchange(request_id="cut"), [1] * 590, answer_ids),
    ]
    traces = Labeller(model, CaptureSettings(segment=64), 3).traces(readings)
    long = [trace for trace in traces if trace.request_id == "long"]
    assert [trace.segment for trace in long] == [0, 1, 2, 3]
    assert np.concatenate([trace.completion_ids.numpy() for trace in long]).tolist() == answer_ids
    for trace in traces:
        decode(encode(trace))
    (cut,) = [trace for trace in traces if trace.request_id != "long"]
    assert (cut.request_id, len(cut.completion_ids.numpy())) == ("cut", 10)


def test_text_gets_eos_only_if_the_model_ended_it(renderer):
    read = renderer.read(exchange("Yes.", "Is it?"))
    assert tokenizer().decode(read.prompt) == "Is it?"
    assert read.completion == [*tokenizer()("Yes.")["input_ids"], EOS]
    assert renderer.read(exchange("Yes.", [1, 2, 3], ended=False)).prompt == [1, 2, 3]
    assert EOS not in renderer.read(exchange("Yes.", [1, 2, 3], ended=False)).completion


def test_chat_is_rendered_with_the_chat_template(renderer):
    turns = [{"role": "user", "content": "Hi"}]
    read = renderer.read(exchange(**chat(turns)))
    assert tokenizer().decode(read.prompt) == "<|user|>Hi</s><|assistant|>"


def test_calls_are_rendered_with_the_chat_template(renderer):
    turns, tools = [{"role": "user", "content": "Where?"}], [{"type": "function", "function": {"name": "look"}}]
    calls = (FunctionCall("c1", "look", '{"at": "Rome"}'),)
    read = renderer.read(exchange("", calls=calls, **chat(turns, tools=tools)))
    text = '<tool_call>{"name": "look", "arguments": {"at": "Rome"}}</tool_call>'
    assert tokenizer().decode(read.completion[:-1]) == text
    assert tokenizer().decode(read.prompt).startswith("<tools>")


@pytest.mark.parametrize("fields", [
    {"answer": "", "ended": False},
    {"prompt": [1, VOCABULARY]},
    {"prompt": []},
    chat([{"role": "user", "content": "Hi"}], options={"chat_template": "{{ 1 }}"}),
    chat([{"role": "user", "content": "Hi"}], options={"tokenize": True}),
])  # fmt: skip
def test_invalid_exchange_raises_trace_error(renderer, fields):
    with pytest.raises(TraceError):
        renderer.read(exchange(**fields))
