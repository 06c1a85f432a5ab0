"""Thinking before an answer: its own field in answers and streams, and the variables of the chat template."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osd.engine.request import Update
from osd.engine.text import TextStream
from osd.engine.thinking import Thinking, ThinkingReader
from osd.metrics import SpeculationCounts
from serving.api.thinking import THINKING_MARKS, thinking_marks
from tests.tiny import CHAT_TEMPLATE, thinking_tokenizer, tokenizer
from tests.unit.serving.answers import CHAT, error_of, events_of

MARKS = THINKING_MARKS[0]
TEMPLATE = CHAT_TEMPLATE + "{% if enable_thinking is false %}<think></think>{% endif %}{{ reasoning_effort }}"
TOOLS = [{"type": "function", "function": {"name": "look"}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'

ANSWERS = {
    "thinking and answer": (False, "<think>\nwhy\n</think>\n\n42", "\nwhy\n", "\n\n42"),
    "white space first": (False, " \n<think>a</think>b", "a", "b"),
    "begun in the prompt": (True, "why</think>42", "why", "42"),
    "no thinking": (False, "42 <think>no</think>", "", "42 <think>no</think>"),
    "another tag": (False, "<thinks>42", "", "<thinks>42"),
    "cut while thinking": (False, "<think>why", "why", ""),
    "cut in the first mark": (False, "<thi", "", "<thi"),
    "cut in the second mark": (True, "why</thi", "why</thi", ""),
    "empty": (False, "", "", ""),
}


@pytest.fixture
def thinking(service):
    service.chat_template = TEMPLATE
    return service


def says(service, *pieces):
    last = len(pieces) - 1
    service.script = lambda request: [
        Update(request.id, (97,), piece, "stop" if index == last else None, SpeculationCounts())
        for index, piece in enumerate(pieces)
    ]


def decodes(service, fast, *steps):
    """Answer with the tokens of ``steps``, as an engine with the tokenizer ``fast`` decodes them."""

    def script(request):
        text, updates = TextStream(fast, request.stop, (), request.thinking), []
        for index, ids in enumerate(steps):
            for token in ids:
                text.push(token)
            is_last = index == len(steps) - 1
            finish = "stop" if is_last else None
            updates.append(Update(request.id, tuple(ids), text.take(is_last), finish, SpeculationCounts()))
        return updates

    service.script = script


@pytest.mark.parametrize("name", ANSWERS)
@given(data=st.data())
def test_reader_separates_thinking_for_any_split(name, data):
    begun, text, thought, answer = ANSWERS[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    reader = ThinkingReader(Thinking(MARKS, begun))
    parts = [reader.feed(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parts.append(reader.close())
    assert ("".join(part[0] for part in parts), "".join(part[1] for part in parts)) == (thought, answer)


def test_marks_are_those_of_the_template():
    assert thinking_marks(TEMPLATE) is MARKS
    assert thinking_marks("{{ '<seed:think>' }}") is THINKING_MARKS[1]
    assert thinking_marks(CHAT_TEMPLATE) is None


def test_stream_has_thinking_in_its_own_field(client, thinking):
    says(thinking, "<think>w", "hy</think>4", "2")
    events = events_of(client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "reasoning_content": "w"}
    assert deltas[1:] == [{"reasoning_content": "hy", "content": "4"}, {"content": "2"}]


@pytest.mark.parametrize("prompt", ["x", "x <think>"])
@pytest.mark.parametrize("answer", ["why</think>42", "why"])
@pytest.mark.parametrize("fast", [tokenizer(), thinking_tokenizer(False), thinking_tokenizer(True)],
                         ids=["letters", "added", "special"])  # fmt: skip
def test_stream_and_answer_have_the_same_thinking(client, thinking, fast, prompt, answer):
    body = {"messages": [{"role": "user", "content": prompt}]}
    ids = fast.encode(answer if prompt.endswith(">") else f"<think>{answer}", add_special_tokens=False)
    for steps in ([ids], [[token] for token in ids], [ids[:2], ids[2:]]):
        decodes(thinking, fast, *steps)
        (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == ("why", "42" if answer.endswith("42") else None)
        events = events_of(client.post("/v1/chat/completions", json={**body, "stream": True}))
        deltas = [event["choices"][0]["delta"] for event in events]
        for name in ("reasoning_content", "content"):
            assert "".join(delta.get(name, "") for delta in deltas) == (message[name] or "")


def test_usage_counts_the_tokens_of_thinking(client, thinking):
    details = SpeculationCounts()
    thinking.script = lambda request: [
        Update(request.id, (1, 2, 3), "<think>a</think>", None),
        Update(request.id, (4,), "b", "stop", details, thinking_tokens=3),
    ]
    usage = client.post("/v1/chat/completions", json=CHAT | {"n": 2}).json()["usage"]
    assert (usage["completion_tokens"], usage["completion_tokens_details"]) == (8, {"reasoning_tokens": 6})


def test_calls_behind_thinking_are_calls(client, thinking):
    says(thinking, "<think><tool_call></think>", CALL)
    (choice,) = client.post("/v1/chat/completions", json={**CHAT, "tools": TOOLS}).json()["choices"]
    assert choice["message"]["reasoning_content"] == "<tool_call>"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["look"]


def test_form_of_an_answer_leaves_no_room_for_thinking(client, thinking):
    says(thinking, "yes")
    messages = [{"role": "user", "content": "x <think>"}]
    fields = {"messages": messages, "structured_outputs": {"choice": ["yes", "no"]}}
    (choice,) = client.post("/v1/chat/completions", json=fields).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "yes"}


def test_model_without_thinking_keeps_its_text(client, service):
    says(service, "<think>why</think>42")
    (choice,) = client.post("/v1/chat/completions", json=CHAT).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "<think>why</think>42"}


def test_template_receives_variables_and_earlier_thinking(client, thinking):
    messages = [*CHAT["messages"], {"role": "assistant", "content": "4", "reasoning_content": "why"}, *CHAT["messages"]]
    fields = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
    assert client.post("/v1/chat/completions", json={"messages": messages, **fields}).status_code == 200
    assert thinking.variables[-1] == {"reasoning_effort": "low", "enable_thinking": False}
    assert thinking.rendered[-1][0][1]["reasoning_content"] == "why"


@pytest.mark.parametrize(("fields", "param", "why"), [
    ({"reasoning_effort": "high"}, "reasoning_effort", "does not use it"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking", "not use it"),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages", "variable of the chat template"),
    ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs.a", ""),
    ({"chat_template_kwargs": {"mess": 1}}, "chat_template_kwargs.mess", "does not use it"),
])  # fmt: skip
def test_variable_that_the_template_does_not_use_is_refused(client, service, fields, param, why):
    error = error_of(client.post("/v1/chat/completions", json={**CHAT, **fields}), 400)
    assert error["param"].startswith(param)
    assert why in error["message"]


def test_no_effort_is_accepted_by_every_model(client, service):
    assert client.post("/v1/chat/completions", json={**CHAT, "reasoning_effort": "none"}).status_code == 200
    assert service.variables[-1] == {}


def test_no_effort_reaches_a_template_that_knows_it(client, thinking):
    assert client.post("/v1/chat/completions", json={**CHAT, "reasoning_effort": "none"}).status_code == 200
    assert thinking.variables[-1] == {"reasoning_effort": "none"}
