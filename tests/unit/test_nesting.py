"""Limit on the depth of JSON texts."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osd.nesting import MAX_DEPTH, NestingError, check_nesting, parse_json


def nested(depth: int, value: str = "1") -> str:
    """Return a JSON text with arrays and objects in turn around a value."""
    for level in range(depth):
        value = f"[{value}]" if level % 2 else f'{{"a": {value}}}'
    return value


@pytest.mark.parametrize("end", ["", "]", '"', '"\\\\', "x" * 9])
@pytest.mark.parametrize("as_bytes", [True, False])
def test_text_is_limited_in_depth(as_bytes: bool, end: str):
    for depth in (0, 1, MAX_DEPTH):
        text = nested(depth) + end
        check_nesting(text.encode() if as_bytes else text)
    for depth in (MAX_DEPTH + 1, 600, 100_000):
        text = nested(depth) + end
        with pytest.raises(NestingError, match="is nested more than 100 levels deep, which is the limit: flatten it"):
            check_nesting(text.encode() if as_bytes else text)


def test_brackets_in_strings_and_flat_lists_have_no_depth():
    check_nesting(json.dumps({"a": "[{" * 500, '"[': '\\"' + "[" * 500, "b": [[]] * 500}))
    check_nesting('"' + '\\"[' * 500)
    with pytest.raises(NestingError):
        check_nesting('"\\\\"' + "[" * 500)


@given(st.binary(max_size=300) | st.text(alphabet='[]{}"\\a', max_size=300))
def test_text_without_json_is_no_error_except_of_depth(text: bytes | str):
    with suppress(NestingError):
        check_nesting(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("[" * 100_000, "100 levels"), (nested(MAX_DEPTH + 1), "100 levels"), ("{", "Expecting"), (b"\xff", "decode")],
)
def test_parser_refuses_deep_and_invalid_texts(text: bytes | str, problem: str):
    assert parse_json(nested(MAX_DEPTH)) == json.loads(nested(MAX_DEPTH))
    with pytest.raises(ValueError, match=problem):
        parse_json(text)
