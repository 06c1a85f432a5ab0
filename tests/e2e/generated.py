"""Generators of requests: valid and damaged bodies from the schemas, and invalid or incomplete HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from pydantic.json_schema import models_json_schema

from serving.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

MAX_TOKENS, MAX_FORM_TOKENS = 4, 40
"""Largest number of tokens of a free answer and of an answer with a form, so that thousands of answers take little
time.
"""

PATHS = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def _operation(schema: dict[str, Any]) -> dict[str, Any]:
    return {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}}


_REFERENCES, _MODELS = models_json_schema([(model, "validation") for model in PATHS.values()])
_SCHEMA = schemathesis.openapi.from_dict(
    {
        "openapi": "3.1.0",
        "info": {"title": "schemas of the request models", "version": "1"},
        "paths": {path: _operation(_REFERENCES[model, "validation"]) for path, model in PATHS.items()},
        **_MODELS,
    }
)
BODIES = {path: _SCHEMA[path]["POST"].as_strategy() for path in PATHS}

HUGE = [2**31, -(2**63), 2**64, 10**30, 1e-320, 1e308, -1e308, float("nan"), float("inf"), -0.0]
TEXTS = st.text(max_size=20) | st.sampled_from(["\x00", "\u202e\u0301", "😀" * 50, "</s>", "<s>", "a" * 900])
STRANGE = TEXTS | st.sampled_from(["", "\ud800", "a" * 3000])
NUMBERS = st.integers(-3, 300) | st.floats(-3, 3) | st.sampled_from(HUGE)
SCALARS = st.none() | st.booleans() | NUMBERS | STRANGE
NONSENSE = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRANGE, inner, max_size=4), max_leaves=8
)


TOKENS = st.lists(st.integers(0, 258), min_size=1, max_size=20)


@st.composite
def nested_json(draw: st.DrawFn) -> str:
    """Draw a JSON text, which may be nested deep, incomplete, or no JSON."""
    how = draw(st.sampled_from(["flat", "flat", "deep", "open", "text"]))
    if how == "flat":
        return json.dumps(draw(NONSENSE))
    if how == "text":
        return draw(TEXTS)
    depth = draw(st.sampled_from([3, 90, 99, 100, 101, 200, 600, 980, 5000]))
    begin, end = draw(st.sampled_from([("[", "]"), ('{"a":', "}"), ('[{"a\\u0022":', "}]")]))
    return begin * depth + draw(st.sampled_from(["1", '"\\ud800"', "null"])) + end * depth * (how == "deep")


def _pieces(inner: SearchStrategy[str]) -> SearchStrategy[str]:
    bounds = st.sampled_from(["*", "+", "?", "{3}", "{0,200}", "{20,}", "{0,5000}"])
    return (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.lists(inner, min_size=2, max_size=16).map(lambda parts: f"({'|'.join(parts)})")
        | st.tuples(inner, bounds).map(lambda parts: f"({parts[0]}){parts[1]}")
    )


LETTERS = st.sampled_from(["a", "b", "X", " ", ".", "[a-z]", "[^a]", "[a-zA-Z ,.]*", "\\d", "\\w+", "é", "😀"])
INVALID_REGEXES = TEXTS.filter(bool) | st.sampled_from(["(a", "a{9,1}", "(?=a)", "(" * 600])
REGEXES = st.one_of([st.recursive(LETTERS, _pieces, max_leaves=16)] * 3 + [INVALID_REGEXES])
"""Regular expressions, most of them valid, some with many states."""

LEAF_SCHEMAS = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "maxLength": 5000},
        {"type": "string", "pattern": "^([a-z]*a[a-z]{40})+$"},
        {"type": "integer", "minimum": -9, "maximum": 900},
        {"type": "number", "multipleOf": 0.01},
        {"type": ["boolean", "null"]},
        {"enum": ["yes", 1, None]},
        {"const": {"a": [1]}},
        {"$ref": "#"},
        {"not": {}},
        {},
    ]
)
NAMES = st.sampled_from(["a", "b", "long name", "é", '"'])
SCHEMAS = st.recursive(
    LEAF_SCHEMAS,
    lambda inner: (
        st.builds(lambda items, size: {"type": "array", "items": items, "maxItems": size}, inner, st.integers(0, 99))
        | st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=4))
        | st.builds(lambda parts: {"allOf": parts}, st.lists(inner, min_size=1, max_size=3))
        | st.builds(
            lambda properties, closed: {"type": "object", "properties": properties, "additionalProperties": closed},
            st.dictionaries(NAMES, inner, max_size=4),
            st.booleans(),
        )
    ),
    max_leaves=12,
)
"""Schemas, most of them valid."""


@st.composite
def grammars(draw: st.DrawFn) -> str:
    """Draw a grammar in Lark's syntax; rules may be ambiguous, endless or unknown."""
    names = ["start", "x", "y"]
    part = st.sampled_from(['"a"', '"(" x ")"', "/[ab]+/", "x", "y", "x x", "start start", "y?", "x*", "unknown"])
    alternatives = st.lists(st.lists(part, min_size=1, max_size=3).map(" ".join), min_size=1, max_size=4)
    return "\n".join(f"{name}: {' | '.join(draw(alternatives))}" for name in names)


FORMS: dict[str, SearchStrategy[Any]] = {
    "json": SCHEMAS | SCHEMAS.map(json.dumps) | nested_json(),
    "regex": REGEXES,
    "choice": st.lists(TEXTS, min_size=1, max_size=30),
    "grammar": grammars(),
}
"""Values of the fields of ``structured_outputs``."""

CALLS = st.fixed_dictionaries(
    {
        "id": TEXTS,
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": st.sampled_from(["f", "g"]), "arguments": nested_json()}),
    }
)
TURNS = st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS}) | st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXTS, "tool_calls": st.lists(CALLS, min_size=1, max_size=2)}
)
TOOLS = st.builds(
    lambda schemas: [
        {"type": "function", "function": {"name": f"f{number}", "parameters": {"properties": {"a": schema}}}}
        for number, schema in enumerate(schemas)
    ],
    st.lists(SCHEMAS, min_size=1, max_size=3),
)
VALID: dict[str, SearchStrategy[Any]] = {
    "prompt": TEXTS.filter(bool) | st.lists(TEXTS.filter(bool), min_size=1, max_size=3) | TOKENS,
    "tokens": TOKENS,
    "messages": st.lists(TURNS, min_size=1, max_size=3),
    "tools": TOOLS,
    "tool_choice": st.sampled_from(["auto", "required", "none"]),
    "logit_bias": st.dictionaries(st.integers(0, 258).map(str), st.floats(-100, 100), max_size=4),
    "stop": TEXTS.filter(bool) | st.lists(TEXTS.filter(bool), max_size=4),
    "n": st.integers(1, 6),
    "timeout": st.floats(0.001, 100),
    "reasoning_effort": st.sampled_from([None, "none"]),
    "chat_template_kwargs": st.none() | st.just({}),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}])
    | SCHEMAS.map(lambda schema: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}),
    "structured_outputs": st.one_of([value.map(lambda form, kind=kind: {kind: form}) for kind, value in FORMS.items()]),
}
"""Valid values of fields that the schema describes incompletely."""


@st.composite
def _objects(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """Draw a body with the required fields of a path's schema and a few optional fields."""
    body = draw(BODIES[path]).body
    optional = draw(st.lists(st.sampled_from(sorted(body)), max_size=3)) if body else []
    names = [name for name, field in PATHS[path].model_fields.items() if name in optional or field.is_required()]
    return {name: draw(st.just(body[name]) | VALID.get(name, st.nothing())) for name in names}


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@st.composite
def bodies(draw: st.DrawFn, path: str) -> bytes:
    """Draw a body for a path: valid, with one error, or arbitrary."""
    kinds = ["valid"] * 5 + ["form"] * 3 + ["damaged", "damaged", "unknown", "deep", "cut", "nonsense"]
    how = draw(st.sampled_from(kinds))
    if how == "nonsense":
        return draw(st.binary(max_size=60) | NONSENSE.map(_json))
    fields = sorted(PATHS[path].model_fields)
    body = draw(_objects(path))
    body.pop("model", None)
    if path == "/tokenize" and not {"prompt", "messages"} & set(body):
        body["prompt"] = draw(TEXTS)
    if how == "damaged":
        body[draw(st.sampled_from(fields))] = draw(NONSENSE)
    elif how == "form" and "structured_outputs" in fields:
        field = draw(st.sampled_from(["structured_outputs", "response_format", *(["tools"] * ("tools" in fields))]))
        text = "prompt" if "prompt" in fields else "messages"
        body = {text: draw(VALID[text]), field: draw(VALID[field]), "stream": draw(st.booleans())}
        if field == "tools":
            body["tool_choice"] = "required"
    elif how == "unknown":
        body[draw(STRANGE | st.sampled_from(["tools", "functions", "echo", "metadata"]))] = draw(NONSENSE)
    elif how == "deep":
        body[draw(st.sampled_from(fields))] = _nested(draw(st.integers(5, 900)))
    if "max_tokens" in fields and how == "form":
        body["max_tokens"] = MAX_FORM_TOKENS
    elif "max_tokens" in fields:
        for name in ("max_tokens", "max_completion_tokens"):
            value = body.get(name)
            if type(value) is int and value > MAX_TOKENS:
                body[name] = MAX_TOKENS
        if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
            body["max_tokens"] = MAX_TOKENS
    data = _json(body)
    return data[: draw(st.integers(0, len(data)))] if how == "cut" else data


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@dataclass(frozen=True)
class Sent:
    """Bytes for a connection, and its end: the client closes it, closes its sending side, or waits for answers."""

    data: bytes
    end: Literal["leave", "half", "wait"]


HEADERS = st.dictionaries(
    st.sampled_from(
        ["content-type", "host", "origin", "authorization", "x-request-id", "accept", "expect", "upgrade", "cookie"]
    ).map(str.encode)
    | st.from_regex(rb"[a-z-]{1,12}", fullmatch=True).filter(lambda name: name not in _FRAMING),
    st.binary(max_size=30).filter(lambda value: not set(value) & {0, 10, 13})
    | st.sampled_from([b"application/json", b"127.0.0.1", b"9" * 5000, b"Bearer right", b"100-continue"]),
    max_size=4,
)
_FRAMING = (b"connection", b"content-length", b"transfer-encoding", b"upgrade", b"trailer", b"te")


def _head(line: bytes, headers: dict[bytes, bytes]) -> bytes:
    return line + b"".join(b"\r\n" + name + b": " + value for name, value in headers.items()) + b"\r\n\r\n"


@st.composite
def whole(draw: st.DrawFn) -> Sent:
    """Draw a request that is valid HTTP, which the service must answer."""
    path = draw(st.sampled_from(sorted(PATHS)))
    method = draw(st.sampled_from([b"POST"] * 30 + [b"GET", b"PUT", b"DELETE", b"OPTIONS", b"HEAD"]))
    body = draw(bodies(path))
    headers = {b"host": b"127.0.0.1", b"content-type": b"application/json"}
    headers |= draw(st.just({}) | st.just({}) | HEADERS)
    chunked = draw(st.booleans())
    headers[b"transfer-encoding" if chunked else b"content-length"] = b"chunked" if chunked else b"%d" % len(body)
    if chunked:
        cut = draw(st.integers(0, len(body)))
        parts = [part for part in (body[:cut], body[cut:]) if part]
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    line = method + b" " + path.encode() + draw(st.sampled_from([b"", b"?x=%00%ff", b"/"])) + b" HTTP/1.1"
    return Sent(_head(line, {**headers, b"connection": b"close"}) + body, "wait")


BROKEN_LINES = [
    b"GET", b"GET /", b"GET  / HTTP/1.1", b"GET / HTTP/3.7", b"G\x00T / HTTP/1.1", b"GET /\xff\xfe HTTP/1.1",
    b"GET /health?a=\x80 HTTP/1.1", b"CONNECT a:1 HTTP/1.1", b"\xff\xfe\xfd / HTTP/1.1", b"GET http://[ HTTP/1.1",
    b"PRI * HTTP/2.0",
]  # fmt: skip
BROKEN_HEADERS = [
    b"no colon", b": empty", b"a b: c", b"a\x00: c", b"a: \x00", b"content-length: -1", b"content-length: 1x",
    b"content-length: 99999999999999999999999", b"content-length: 1\r\ncontent-length: 2",
    b"content-length: 3\r\ntransfer-encoding: chunked", b"transfer-encoding: nonsense", b"a: " + b"b" * 100_000,
    b"\r\n".join(b"h%d: %s" % (number, b"v" * 40) for number in range(3000)),
]  # fmt: skip
BROKEN_CHUNKS = [b"zz\r\n", b"-1\r\n", b"fffffffffffffffffff\r\n", b"3\r\nabcdef", b"1;" + b"x" * 70_000, b"\r\n\r\n"]
POST = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
PROMPT = b'{"prompt": "a", "max_tokens": 2}'
COMPLETE = POST + b"content-length: %d\r\n\r\n" % len(PROMPT) + PROMPT


@st.composite
def broken(draw: st.DrawFn) -> Sent:
    """Draw invalid HTTP, several requests at once, or an incomplete request."""
    how = draw(st.sampled_from(["line", "header", "chunks", "length", "pipeline", "cut", "bytes"]))
    end = draw(st.sampled_from(["leave", "half"]))
    match how:
        case "line":
            data = draw(st.sampled_from(BROKEN_LINES)) + b"\r\nhost: 127.0.0.1\r\n\r\n"
        case "header":
            data = b"GET /health HTTP/1.1\r\n" + draw(st.sampled_from(BROKEN_HEADERS)) + b"\r\n\r\n"
        case "chunks":
            data = POST + b"transfer-encoding: chunked\r\n\r\n" + draw(st.sampled_from(BROKEN_CHUNKS))
        case "length":
            wrong = len(PROMPT) + draw(st.integers(-20, 500))
            data = POST + b"content-length: %d\r\n\r\n" % wrong + PROMPT
        case "pipeline":
            data = COMPLETE * draw(st.integers(2, 20)) + draw(st.binary(max_size=20))
        case "cut":
            data = COMPLETE[: draw(st.integers(0, len(COMPLETE)))]
        case _:
            data = draw(st.binary(min_size=1, max_size=200))
    return Sent(data, end)


def for_each_request(count: int, use: Callable[[Sent], None]) -> None:
    """Call ``use`` with ``count`` requests, the same in each run and most of them whole."""

    @settings(
        max_examples=count, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(sent=st.one_of([whole()] * 4 + [broken()]))
    def run(sent: Sent) -> None:
        use(sent)

    run()
