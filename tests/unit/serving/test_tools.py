"""Function calls in chats: parsing, required calls, and invalid requests."""

from __future__ import annotations

import json
import random

import pytest

from osd.engine.request import Update
from serving.api.messages import MOST_TOOLS
from serving.api.tool_calls import TOOL_FORMATS, CallReader, NoToolsError, tool_format
from tests.tiny import CHAT_TEMPLATE, tokenizer
from tests.unit.serving.answers import CHAT, error_of, events_of, refusal_of

WEATHER = {
    "name": "weather",
    "description": "of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "time"}}]
NAMES = ["weather", "time"]
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome \\"}{\\"", "days": 3}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Rome"}}'
ARGUMENTS = '{"city": "Rome \\"}{\\"", "days": 3}'

READ = {
    "text": ("hermes", "Hello <tool you>.\n", "Hello <tool you>.\n", []),
    "a call": ("hermes", ROME, "", [("weather", ARGUMENTS)]),
    "text before it": ("hermes", f"I look.\n{ROME}", "I look.", [("weather", ARGUMENTS)]),
    "two, and text between and after": (
        "hermes", f"{ROME}\nand\n{NOW}\nbye", "and\n\nbye", [("weather", ARGUMENTS), ("time", "{}")],
    ),
    "two in a row": ("hermes", f"{ROME}\n{NOW}", "", [("weather", ARGUMENTS), ("time", "{}")]),
    "another function": ("hermes", ROME.replace("weather", "other"), ROME.replace("weather", "other"), []),
    "no JSON": ("hermes", "<tool_call>\nweather</tool_call>", "<tool_call>\nweather</tool_call>", []),
    "no object": ("hermes", ROME.replace(ARGUMENTS, "3"), ROME.replace(ARGUMENTS, "3"), []),
    "a bad name": ("hermes", ROME.replace("weather", "\\x"), ROME.replace("weather", "\\x"), []),
    "cut in its arguments": ("hermes", ROME[: ROME.index("days")], "", [("weather", '{"city": "Rome \\"}{\\"", "')]),
    "cut before them": ("hermes", ROME[:20], ROME[:20], []),
    "without its end": ("hermes", ROME[:-3], "", [("weather", ARGUMENTS)]),
    "Llama's": ("llama3", LLAMA, "", [("weather", '{"city": "Rome"}')]),
    "Llama's text": ("llama3", 'It is {"name": "weather"}', 'It is {"name": "weather"}', []),
    "Llama's other JSON": ("llama3", '{"answer": 3}', '{"answer": 3}', []),
    "Llama's later call": ("llama3", f"see {LLAMA}", f"see {LLAMA}", []),
}  # fmt: skip


def read(form, pieces):
    reader = CallReader(TOOL_FORMATS[form], NAMES)
    parsed = [reader.feed(piece) for piece in pieces]
    parsed.append(reader.close())
    streamed = {}
    for part in (part for answer_part in parsed for part in answer_part.calls):
        if "id" in part:
            streamed[part["index"]] = {"id": part["id"], **part["function"]}
        else:
            streamed[part["index"]]["arguments"] += part["function"]["arguments"]
    assert [call["id"] for call in streamed.values()] == [call.id for call in reader.calls]
    calls = [(call.name, call.arguments) for call in reader.calls]
    assert [(call["name"], call["arguments"]) for call in streamed.values()] == calls
    return "".join(answer_part.text for answer_part in parsed), calls


@pytest.mark.parametrize("name", READ)
def test_reader_separates_calls_from_text_for_any_split(name):
    form, answer, text, calls = READ[name]
    assert read(form, [answer]) == (text, calls)
    assert read(form, list(answer)) == (text, calls)
    chance = random.Random(0)  # noqa: S311 - repeatable, not secret
    for _ in range(20):
        cuts = sorted(chance.randrange(len(answer) + 1) for _ in range(4))
        pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
        assert read(form, pieces) == (text, calls)


def test_reader_streams_arguments():
    reader = CallReader(TOOL_FORMATS["hermes"], NAMES)
    (first,) = reader.feed(ROME[: ROME.index("Rome")]).calls
    assert first["function"] == {"name": "weather", "arguments": '{"city": "'}
    (second,) = reader.feed("Rome").calls
    assert second == {"index": 0, "function": {"arguments": "Rome"}}


def test_tool_format_follows_the_chat_template():
    assert tool_format(CHAT_TEMPLATE) is TOOL_FORMATS["hermes"]
    llama = '{% if tools %}{"name": function name, "parameters": dictionary of argument name and its value}{% endif %}'
    assert tool_format(llama) is TOOL_FORMATS["llama3"]
    with pytest.raises(NoToolsError, match="does not support tools"):
        tool_format("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(NoToolsError, match="not supported"):
        tool_format("{% if tools %}<function=name>{% endif %}")


def answers(service, *texts, finish="stop"):
    ends = [None] * (len(texts) - 1) + [finish]
    service.script = lambda request: [
        Update(request.id, (1,), text, end) for text, end in zip(texts, ends, strict=True)
    ]


def test_response_and_stream_contain_the_calls(client, service):
    half = ROME.index("days")
    answers(service, "I look. ", ROME[:half], ROME[half:])
    body = {**CHAT, "tools": TOOLS}
    (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}
    events = events_of(client.post("/v1/chat/completions", json={**body, "stream": True}))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert "".join(part["function"]["arguments"] for part in parts) == ARGUMENTS
    assert parts[0]["function"]["name"] == "weather"
    assert parts[0]["id"].startswith("call_")
    assert all("id" not in part for part in parts[1:])
    assert len(parts) == 2
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_answer_without_complete_calls_keeps_its_finish_reason(client, service):
    answers(service, "Hello <tool", "!")
    (choice,) = client.post("/v1/chat/completions", json={**CHAT, "tools": TOOLS}).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello <tool!"}
    assert choice["finish_reason"] == "stop"
    answers(service, ROME[: ROME.index("days")], finish="length")
    (choice,) = client.post("/v1/chat/completions", json={**CHAT, "tools": TOOLS}).json()["choices"]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "length"
    answers(service, ROME)
    (choice,) = client.post("/v1/chat/completions", json={**CHAT, "tools": TOOLS, "tool_choice": "none"}).json()[
        "choices"
    ]
    assert choice["message"] == {"role": "assistant", "content": ROME}
    assert service.rendered[-1][1] == []


def test_chat_template_receives_tools_calls_and_results(client, service):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    assert client.post("/v1/chat/completions", json={"messages": messages, "tools": TOOLS}).status_code == 200
    turns, tools = service.rendered[-1]
    assert turns[1]["content"] == ""
    assert turns[1]["tool_calls"] == [{**call, "function": {"name": "weather", "arguments": {"city": "Rome"}}}]
    assert turns[2] == {"role": "tool", "content": "sunny", "tool_call_id": "call_1"}
    assert tools[0] == TOOLS[0]
    assert tools[1]["function"] == {"name": "time", "parameters": {"type": "object"}}
    text = tokenizer().apply_chat_template(turns, tools=tools, tokenize=False)
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>' in text


def test_history_of_an_agent_framework_reaches_the_template(client, service):
    call = {"id": "call_1", "index": 0, "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "user", "name": "person_a", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "grey"},
    ]
    assert client.post("/v1/chat/completions", json={"messages": messages, "tools": TOOLS}).status_code == 200
    turns, _ = service.rendered[-1]
    assert [turn.get("name") for turn in turns] == ["person_a", None, "weather"]
    assert "index" not in turns[1]["tool_calls"][0]


@pytest.mark.parametrize("parameters", [None, {}, {"description": "x"}, {"properties": {"city": {"enum": ["Rome"]}}}])
def test_named_function_without_typed_parameters_takes_an_object(client, service, parameters):
    function = {"name": "weather"} | ({} if parameters is None else {"parameters": parameters})
    tools = [{"type": "function", "function": function}]
    answer = client.post("/v1/chat/completions", json={**CHAT, "tools": tools, "tool_choice": NAMED})
    assert answer.status_code == 200
    grammar = service.submitted[-1].grammar
    assert fits(grammar, CITY)
    assert not any(fits(grammar, CITY.replace('{"city": "Rome"}', value)) for value in ("7", "false", "null", '"x"'))


def fits(grammar, text):
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    matcher = grammar.matcher()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


NAMED = {"type": "function", "function": {"name": "weather"}}
STRICT = [{"type": "function", "function": {**WEATHER, "strict": True}}, TOOLS[1]]
CITY = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOWN = CITY.replace("city", "town")
CONSTRAINED = {
    "required": ({"tools": TOOLS, "tool_choice": "required"}, [CITY, NOW, f"{NOW}\n{CITY}"], ["hi", TOWN, f"a{NOW}"]),
    "named": ({"tools": TOOLS, "tool_choice": NAMED}, [CITY], [NOW, f"{CITY}\n{CITY}", TOWN, ""]),
    "required once": (
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, [CITY, NOW], [f"{NOW}\n{CITY}"],
    ),
    "strict": ({"tools": STRICT}, ["hi", CITY, f"I look\n{CITY} and {NOW}."], [TOWN, f"hi {TOWN}", "<tool_call>x"]),
    "one at most": ({"tools": TOOLS, "parallel_tool_calls": False}, ["hi", CITY, f"a {CITY}."], [f"{NOW}\n{CITY}"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTRAINED)
def test_required_strict_or_single_calls_get_a_grammar(client, service, name):
    fields, right, wrong = CONSTRAINED[name]
    assert client.post("/v1/chat/completions", json={**CHAT, **fields}).status_code == 200
    grammar = service.submitted[-1].grammar
    assert all(fits(grammar, text) for text in right)
    assert not any(fits(grammar, text) for text in wrong)


def test_llama_calls_get_a_grammar(client, service):
    service.chat_template = '{{ tools }} {"name": function name, "parameters": ...}'
    assert client.post("/v1/chat/completions", json={**CHAT, "tools": TOOLS, "tool_choice": NAMED}).status_code == 200
    assert fits(service.submitted[-1].grammar, LLAMA)
    assert not fits(service.submitted[-1].grammar, LLAMA.replace("city", "town"))
    assert client.post("/v1/chat/completions", json={**CHAT, "tools": STRICT}).status_code == 200
    assert fits(service.submitted[-1].grammar, LLAMA)
    assert fits(service.submitted[-1].grammar, "It rains.")
    assert not fits(service.submitted[-1].grammar, LLAMA.replace("city", "town"))


def test_optional_calls_have_no_grammar(client, service):
    assert client.post("/v1/chat/completions", json={**CHAT, "tools": TOOLS, "tool_choice": "auto"}).status_code == 200
    assert service.submitted[-1].grammar is None


CALLED = {"name": "a", "arguments": ""}


def function(**fields):
    return {"tools": [{"type": "function", "function": fields}]}


REFUSED = [
    (function(), "tools[0].function.name", "required"),
    (function(name="a b"), "tools[0].function.name", "match"),
    (function(name="a", parameters=3), "tools[0].function.parameters", "object"),
    (function(name="a", parameters={"type": "string"}), "tools[0].function.parameters", "describe an object"),
    (function(name="a", more=3), "tools[0].function.more", "not supported"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "function"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "second time"),
    ({"tools": TOOLS * MOST_TOOLS}, "tools", f"limit is {MOST_TOOLS}"),
    ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice", "must be"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "names no"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", "required"),
    ({"tool_choice": "required"}, "tool_choice", "names no"),
    ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "tools", "form of the answer"),
    ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "has to be called"),
    ({**function(name="a", strict=True, parameters={"not": {}})}, "tools", "not supported: not"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "tool_call_id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {**CALLED, "arguments": "[" * 600}}]}]},
     "messages[0].tool_calls[0].function.arguments", "nested more than 100 levels deep"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": CALLED}]}]},
     "messages[0]", "assistant"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "why"), REFUSED)
def test_invalid_tools_are_400_and_name_the_field(client, service, fields, param, why):
    refusal_of(client.post("/v1/chat/completions", json={**CHAT, **fields}), param, why)
    assert not service.submitted


@pytest.mark.parametrize("begin", ["<tool_call>{", '<tool_call>{"name": "', "<tool_call>" + " " * 9])
def test_endless_head_of_a_call_is_not_buffered(begin):
    reader = CallReader(TOOL_FORMATS["hermes"], NAMES)
    shown = reader.feed(begin).text
    for _ in range(40):
        shown += reader.feed("x" * 100).text
    assert len(shown) >= 2900
    assert set(shown[-100:]) == {"x"}


def test_arguments_with_half_a_character_are_text(client, service):
    for arguments in ('{"a": "\\ud800"}', '{"\\udfff": 1}'):
        call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": arguments}}
        messages = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]
        assert client.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
        rendered = service.rendered[-1][0][-1]["tool_calls"][0]["function"]["arguments"]
        assert rendered == arguments


def test_template_without_tools_is_400_with_the_reason(client, service):
    service.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    answer = client.post("/v1/chat/completions", json={**CHAT, "tools": TOOLS})
    assert refusal_of(answer, "tools", "does not support tools")["code"] == "chat_template"
    result = [*CHAT["messages"], {"role": "tool", "tool_call_id": "1", "content": "x"}]
    assert error_of(client.post("/v1/chat/completions", json={"messages": result}), 400)["param"] == "messages"
    assert client.post("/v1/chat/completions", json={**CHAT, "tools": TOOLS, "tool_choice": "none"}).status_code == 200
    assert json.dumps(service.rendered[-1][1]) == "[]"
