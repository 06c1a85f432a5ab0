"""Parsing of answers, complete or as events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from osd.tap.answers import AnswerError, read_answer, read_events


def events(*objects: Any, end: bytes = b"data: [DONE]\n\n") -> bytes:
    return b"".join(b"data: " + json.dumps(data).encode() + b"\n\n" for data in objects) + end


def chunk(delta: dict[str, Any] | None, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"id": "chatcmpl-7", "choices": [{"index": index, "delta": delta, **more}]}


def test_stream_with_interleaved_choices_is_separated():
    answer = read_events(
        events(
            chunk({"role": "assistant", "content": ""}),
            chunk({"content": "one"}, 1),
            chunk({"content": "two "}),
            chunk({"content": None}, 1, finish_reason="length"),
            chunk({"content": "three"}),
            chunk({}, finish_reason="stop", stop_reason=None),
            {"id": "chatcmpl-7", "choices": [], "usage": {"total_tokens": 9}},
        )
    )
    assert answer.id == "chatcmpl-7"
    choices = [(choice.index, choice.text, choice.finish_reason, choice.reports_stop) for choice in answer.choices]
    assert choices == [(0, "two three", "stop", True), (1, "one", "length", False)]
    assert all(choice.plain for choice in answer.choices)


def test_stream_may_have_crlf_lines_and_comments():
    data = events(chunk({"content": "a"}), chunk({}, finish_reason="stop"))
    (choice,) = read_events(b": ping\r\n\r\nevent: x\r\n" + data.replace(b"\n", b"\r\n")).choices
    assert choice.text == "a"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "refusal", "audio"])
def test_choice_with_other_content_is_not_plain(field):
    message = {"role": "assistant", "content": "so", field: {"any": "thing"}}
    data = json.dumps({"id": "a", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
    assert not read_answer(data).choices[0].plain


@pytest.mark.parametrize("finish", [None, "content_filter", "abort"])
def test_unfinished_choice_is_not_plain(finish):
    choice = {"index": 0, "text": "so", "finish_reason": finish}
    assert not read_answer(json.dumps({"choices": [choice]}).encode()).choices[0].plain


@pytest.mark.parametrize("data", [
    b"", b"{", b"[]", b'{"choices": 3}', b'{"choices": [3]}', b'{"choices": [{"index": "x"}]}',
    b'{"error": {"message": "no"}}', b'{"choices": [{"message": {"tool_calls": [{"index": 2}]}}]}',
    b'{"choices": [{"message": {"tool_calls": [{"index": 0, "id": "a"}, {"index": 0, "id": "b"}]}}]}',
    b'{"choices": [{"message": {"content": 3}, "finish_reason": "stop"}]}', b"\xff\xfe",
])  # fmt: skip
def test_invalid_answer_raises_answer_error(data):
    with pytest.raises(AnswerError):
        read_answer(data)
    with pytest.raises(AnswerError):
        read_events(b"data: " + data.replace(b"message", b"delta") + b"\n\ndata: [DONE]\n\n" if data else b"")


def test_stream_without_done_raises_answer_error():
    with pytest.raises(AnswerError):
        read_events(events(chunk({"content": "a"}, finish_reason="stop"), end=b""))


def test_streamed_calls_of_one_index_and_two_ids_are_passed_over():
    def call(name: str) -> dict[str, Any]:
        function = {"name": "write", "arguments": f'{{"path": "{name}"}}'}
        return chunk({"tool_calls": [{"index": 0, "id": f"call_{name}", "function": function}]})

    with pytest.raises(AnswerError, match="two calls have the same index"):
        read_events(events(call("a"), call("b")))


def test_streamed_call_may_repeat_its_id():
    parts = [
        {"index": 0, "id": "call_a", "function": {"name": "write", "arguments": part}} for part in ('{"a"', ": 1}")
    ]
    parts[1]["function"] = {"arguments": ": 1}"}
    (choice,) = read_events(events(*(chunk({"tool_calls": [part]}) for part in parts))).choices
    assert choice.calls == [{"id": "call_a", "name": "write", "arguments": '{"a": 1}'}]
