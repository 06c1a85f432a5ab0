"""Streamed text: certain, complete, and ended before a stop string."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from osd.engine.text import TextStream
from osd.engine.thinking import Thinking, ThinkingMarks
from tests.tiny import spaced_tokenizer, thinking_tokenizer, tokenizer

TOKENIZER = tokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def stream(ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """Return the pieces of text, one per token, and whether a stop string ended them."""
    text, pieces = TextStream(TOKENIZER, stop), []
    for token in ids:
        if text.push(token):
            text.close()
            return [*pieces, text.take(last=True)], True
        pieces.append(text.take(last=False))
    return [*pieces, text.take(last=True)], False


@pytest.mark.parametrize(("ids", "stop", "pieces"), [
    (ids_of("aé€😀b"), (), ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]),
    (ids_of("a€")[:-1], (), ["a", "", "", "\ufffd"]),
    (ids_of("xENx"), ("END",), ["x", "", "", "ENx", ""]),
    (ids_of("xEN"), ("END",), ["x", "", "", "EN"]),
    ([256, *ids_of("a"), 257, *ids_of("b"), 257], (), ["", "a", "", "b", "", ""]),
], ids=["whole characters", "unfinished at the end", "no stop string", "the beginning of one", "special"])  # fmt: skip
def test_text_is_held_until_it_is_certain(ids: list[int], stop: tuple[str, ...], pieces: list[str]) -> None:
    assert stream(ids, stop) == (pieces, False)


@pytest.mark.parametrize(("text", "stop", "shown"), [
    ("one END two", ("END",), "one "), ("one END", ("END",), "one "), ("ENENEND", ("END",), "ENEN"),
    ("aab", ("aac", "ab"), "a"), ("a€b", ("€",), "a"), ("both A and B", ("B", "A"), "both "),
    ("abcd", ("cd", "bcd"), "a"), ("END", ("END",), ""),
])  # fmt: skip
def test_text_ends_before_a_stop_string_across_tokens(text: str, stop: tuple[str, ...], shown: str) -> None:
    pieces, stopped = stream(ids_of(text), stop)
    assert stopped
    assert "".join(pieces) == shown


@given(st.lists(st.integers(0, 258), max_size=40))
def test_pieces_of_any_tokens_join_to_their_text(ids: list[int]) -> None:
    assert "".join(stream(ids)[0]) == TOKENIZER.decode(ids, skip_special_tokens=True)


def decoded_tokenizer() -> PreTrainedTokenizerFast:
    """Return ``tokenizer`` with an equal decoder of another type, whose tokens are decoded together."""
    other = tokenizer()
    other.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    return other


OTHER = decoded_tokenizer()
BYTES = [*ids_of("aé€😀"), 128, 140, 160, 180, 188, 200, 220, 256, 300]


@given(st.lists(st.sampled_from(BYTES), max_size=6), st.lists(st.sampled_from(BYTES), max_size=40))
def test_bytes_of_tokens_give_the_text_of_the_decoder(prompt: list[int], ids: list[int]) -> None:
    texts = [TextStream(each, (), prompt) for each in (TOKENIZER, OTHER)]
    for token in ids:
        for text in texts:
            text.push(token)
        first, second = (text.take(last=False) for text in texts)
        assert first == second
    first, second = (text.take(last=True) for text in texts)
    assert first == second


@given(st.text("abé€", max_size=30), st.lists(st.text("abé€", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    pieces, stopped = stream(ids_of(text), tuple(stop))
    ends = [text.find(s) + len(s) for s in stop if s in text]
    assert stopped == bool(ends)
    goal = text
    if ends:  # the first complete stop string counts, and of several the earliest
        seen = text[: min(ends)]
        goal = seen[: min(seen.find(s) for s in stop if s in seen)]
    assert "".join(pieces) == goal
    for count in range(len(pieces)):
        assert goal.startswith("".join(pieces[:count])), "text that was shown is never taken back"


def test_stop_search_reads_each_character_a_few_times() -> None:
    reads = []

    class Counted(str):
        def __getitem__(self, place: Any) -> str:
            reads.append(place)
            return super().__getitem__(place)

    stop = Counted("a" * 1023 + "b")
    stream(ids_of("a" * 400), (stop,))
    assert len(reads) <= 4 * (len(stop) + 400)


SPACED = spaced_tokenizer()


def continued(prompt: list[str], answer: list[str], stop: tuple[str, ...] = ()) -> list[str]:
    """Return the pieces of an answer that continues a prompt, with a tokenizer that drops the first space of a text."""
    text = TextStream(SPACED, stop, SPACED.convert_tokens_to_ids(prompt))
    pieces: list[str] = []
    for token in SPACED.convert_tokens_to_ids(answer):
        stopped = text.push(token)
        pieces.append(text.take(last=stopped))
        if stopped:
            text.close()
            return pieces
    return [*pieces, text.take(last=True)]


@pytest.mark.parametrize(("prompt", "answer", "pieces"), [
    (["▁The", "▁sky"], ["▁is", "▁blue"], [" is", " blue", ""]),
    (["▁The", "▁sky"] * 9, ["▁▁", "▁blue", "ly"], ["  ", " blue", "ly", ""]),
    ([], ["▁is", "▁blue"], ["is", " blue", ""]),
    (["<s>"], ["▁is", "▁blue"], ["is", " blue", ""]),
    (["▁sky"], ["<0xF0>", "<0x9F>", "<0xA5>", "<0x9D>", "▁is"], ["", "", "", "🥝", " is", ""]),
    (["▁sky", "<0xF0>", "<0x9F>"], ["<0xA5>", "<0x9D>", "▁is"], ["", "", "\ufffd\ufffd is", ""]),
])  # fmt: skip
def test_text_continues_the_text_of_its_prompt(prompt: list[str], answer: list[str], pieces: list[str]) -> None:
    assert continued(prompt, answer) == pieces


def test_stop_string_begins_after_the_prompt() -> None:
    assert "".join(continued(["▁sky"], ["▁is", "▁blue", "ly"], (" is blue",))) == ""
    assert "".join(continued(["▁sky"], ["▁is", "▁blue", "ly"], ("sky is",))) == " is bluely"


THINKING = Thinking(ThinkingMarks("<think>", "</think>"))
TOKENIZERS = {"letters": TOKENIZER, "added": thinking_tokenizer(False), "special": thinking_tokenizer(True)}


@pytest.mark.parametrize(("kind", "begin", "end"), [("letters", 7, 8), ("added", 1, 1), ("special", 1, 1)])
def test_text_shows_marks_of_thinking_of_any_kind(kind: str, begin: int, end: int) -> None:
    fast = TOKENIZERS[kind]
    text, phases, pieces = TextStream(fast, (), (), THINKING), [], []
    for token in [256, *fast.encode("<think>why</think>42", add_special_tokens=False), 258]:
        text.push(token)
        phases.append(text.phase)
        pieces.append(text.take(last=False))
    assert "".join(pieces) == "<think>why</think>42"
    assert phases == ["answer"] * begin + ["thinking"] * (3 + end) + ["answer"] * 4


def test_special_marks_are_hidden_without_thinking() -> None:
    fast = TOKENIZERS["special"]
    text = TextStream(fast, ())
    for token in fast.encode("<think>why</think>42", add_special_tokens=False):
        text.push(token)
    assert (text.take(last=True), text.phase) == ("why42", "answer")


def test_thinking_that_the_prompt_begins_lasts_to_its_mark() -> None:
    text = TextStream(TOKENIZERS["special"], (), (), Thinking(THINKING.marks, begun=True))
    phases = [text.phase]
    for token in TOKENIZERS["special"].encode("why</think>42<think>", add_special_tokens=False):
        text.push(token)
        phases.append(text.phase)
    assert phases == ["thinking"] * 4 + ["answer"] * 4
