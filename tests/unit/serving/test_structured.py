"""Constraints on answers: valid constraints reach the engine, and invalid constraints are refused early."""

from __future__ import annotations

import json

import pytest

from serving.api.structured import MOST_CHOICES, MOST_TEXT
from tests.tiny import tokenizer
from tests.unit.serving.answers import CHAT, refusal_of

PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "hi"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def of_schema(schema=SCHEMA, **more):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


def structured(**fields):
    return {"structured_outputs": fields}


ACCEPTED = {
    "a schema": (of_schema(strict=True, description="a schema"), '{"a": 12}', '{"b"'),
    "any JSON object": ({"response_format": {"type": "json_object"}}, '{"b": [1, null]}', "["),
    "vLLM's schema": (structured(json=SCHEMA), '{"a": 12}', '{"a":1'),
    "its text": (structured(json=json.dumps(SCHEMA)), '{"a": 12}', "1"),
    "a regular expression": (structured(regex="[a-c]{2}"), "ab", "d"),
    "choices": (structured(choice=["yes", "no"]), "no", "nes"),
    "Lark": (structured(grammar='start: "a" /[0-9]+/'), "a17", "b"),
    "GBNF": (structured(grammar='root ::= "a" [0-9]+'), "a17", "b"),
    "with free text": ({"response_format": {"type": "text"}, **structured(choice=["yes"])}, "yes", "no"),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ACCEPTED)
def test_every_choice_gets_the_grammar_of_the_request(client, service, path, name):
    fields, valid, invalid = ACCEPTED[name]
    assert client.post(path, json={**PATHS[path], **fields, "n": 2}).status_code == 200
    first, second = service.submitted
    assert first.grammar is second.grammar
    matcher = first.grammar.matcher()
    ids = tokenizer()(valid, add_special_tokens=False)["input_ids"]
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()
    matcher.reset()
    ids = tokenizer()(invalid, add_special_tokens=False)["input_ids"]
    assert matcher.try_consume_tokens(ids) < len(ids)


def test_free_text_request_has_no_grammar(client, service):
    assert client.post("/v1/chat/completions", json={**CHAT, "response_format": {"type": "text"}}).status_code == 200
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert [request.grammar for request in service.submitted] == [None, None]


LONG = "a" * (MOST_TEXT + 1)
REFUSED = [
    ({"response_format": {"type": "xml"}}, "response_format.type", ""),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    (
        {"response_format": {"type": "text", **of_schema()["response_format"]} | {"type": "text"}},
        "response_format",
        "json",
    ),
    ({"response_format": {"type": "json_object", "more": 1}}, "response_format.more", "not supported"),
    (of_schema(name="a b"), "response_format.json_schema.name", ""),
    (of_schema(schema=3), "response_format.json_schema.schema", ""),
    (of_schema({"type": "strin"}), "response_format.json_schema.schema", "no JSON Schema"),
    (of_schema({"not": {}}), "response_format.json_schema.schema", "not supported: not"),
    (of_schema({"enum": [LONG]}), "response_format.json_schema.schema", f"limit is {MOST_TEXT}"),
    (of_schema({"type": "integer", "multipleOf": 1234567}), "response_format.json_schema.schema", "100 ms"),
    (structured(), "structured_outputs", "has 0"),
    (structured(regex="a", choice=["a"]), "structured_outputs", "has 2"),
    (structured(structural_tag="x"), "structured_outputs.structural_tag", "not supported"),
    (structured(json="{"), "structured_outputs.json", "not JSON"),
    (structured(json="[1]"), "structured_outputs.json", "an object"),
    (structured(json='{"a":' * 600), "structured_outputs.json", "nested more than 100 levels deep"),
    (structured(json=LONG), "structured_outputs.json", f"limit is {MOST_TEXT}"),
    (structured(regex="(a"), "structured_outputs.regex", "no regular expression"),
    (structured(regex=""), "structured_outputs.regex", "at least 1"),
    (structured(regex=LONG), "structured_outputs.regex", f"limit is {MOST_TEXT}"),
    (structured(choice=[]), "structured_outputs.choice", "at least 1"),
    (structured(choice=["a"] * (MOST_CHOICES + 1)), "structured_outputs.choice", f"limit is {MOST_CHOICES}"),
    (structured(choice=["a" * 1000] * 100), "structured_outputs.choice", f"limit is {MOST_TEXT}"),
    (structured(choice=[1]), "structured_outputs.choice[0]", "string"),
    (structured(grammar="start: nothing"), "structured_outputs.grammar", "no grammar"),
    (
        structured(grammar=f'start: "{"a" * (1 << 20)}"'[: (1 << 20) - 200]),
        "structured_outputs.grammar",
        f"limit is {MOST_TEXT}",
    ),
    ({**of_schema(), **structured(regex="a")}, "structured_outputs", "together with"),
    ({**structured(regex="a"), "ignore_eos": True}, "ignore_eos", "form of the answer"),
]


@pytest.mark.parametrize(("fields", "param", "why"), REFUSED)
def test_invalid_constraint_is_400_and_names_the_field(client, service, fields, param, why):
    client.post("/v1/chat/completions", json={**CHAT, **structured(regex="a")})  # starts the process for grammars
    service.submitted.clear()
    error = refusal_of(client.post("/v1/chat/completions", json={**CHAT, **fields}), param, why)
    assert param in error["message"]
    assert len(error["message"]) < 250
    assert error["type"] == "invalid_request_error"
    assert not service.submitted
