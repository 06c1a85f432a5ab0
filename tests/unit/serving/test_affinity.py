from __future__ import annotations

import json
from collections import Counter

import pytest

from serving.http.affinity import _KNOWN, BLOCK, Affinity, Beginnings

SYSTEM = "You are a helpful assistant of the library in the old town. " * 6


def body(prompt="", **fields):
    return json.dumps({"prompt": prompt, **fields}).encode()


def chat(*texts, **fields):
    return json.dumps({"messages": [{"role": "user", "content": text} for text in texts], **fields}).encode()


def of(said, key=b"Bearer k"):
    return Affinity.of(said, key)


def common(one, other):
    return sum(a == b for a, b in zip(one.blocks, other.blocks, strict=False))


def test_prompts_have_as_many_blocks_in_common_as_their_beginning_is_long():
    one, other = of(body(SYSTEM + "When is it open?")), of(body(SYSTEM + "Who was the first to be there?" * 9))
    assert common(one, other) == len(SYSTEM) // BLOCK
    assert common(one, of(body("Another" + SYSTEM))) == 0
    turn = chat(SYSTEM, "When?"), chat(SYSTEM, "When?", "At nine.", "And on sundays?")
    assert common(*map(of, turn)) >= len(SYSTEM) // BLOCK


def test_other_fields_and_their_order_change_nothing_and_tools_stand_before_the_messages():
    first = json.dumps({"temperature": 0.5, "stream": True, "prompt": SYSTEM, "model": "m"}).encode()
    assert of(first) == of(body(SYSTEM))
    tool = {"type": "function", "function": {"name": "look_up", "description": "d" * BLOCK}}
    assert common(of(chat(SYSTEM, tools=[tool])), of(chat(SYSTEM))) == 0


def test_nothing_is_in_common_with_other_clients():
    assert common(of(body(SYSTEM)), of(body(SYSTEM), key=b"Bearer other")) == 0


@pytest.mark.parametrize(
    "said", [b"", b"{", b"[]", b'{"model": 3}', b'{"osd": 1}', b'\xff{"prompt": "a"}', body("short"), b"{}"]
)
def test_what_is_broken_or_short_has_no_beginning(said):
    assert of(said) == Affinity()


def test_a_domain_is_named_by_the_model_or_by_its_own_field():
    named = of(body(model="llm:code"))
    assert named.domain
    assert named == of(body(osd={"domain": "code"})) == of(body(model="llm", osd={"domain": "code"}))
    assert named != of(body(model="llm:sql"))
    assert not of(body(model="llm")).domain


def test_it_is_read_as_it_was_written_and_holds_nothing_that_anybody_wrote():
    for affinity in (Affinity(), of(body(SYSTEM, model="llm:code")), of(body(SYSTEM)), of(body(model="llm:code"))):
        assert Affinity.read(str(affinity)) == affinity
    assert set(str(of(body(SYSTEM, model="llm:code")))) <= set("0123456789abcdef.")


def test_a_long_prompt_has_no_more_blocks_than_a_header_has_room_for():
    assert len(str(of(body(SYSTEM * 1000)))) < 4096


@pytest.fixture
def beginnings():
    return Beginnings("general")


IDLE = {"a": 0, "b": 0, "c": 0}
FIRST, SECOND = of(body(SYSTEM + "one" * 99)), of(body(SYSTEM + "two" * 99))


def test_who_has_read_most_of_the_beginning_comes_first(beginnings):
    beginnings.add(SECOND, "a")
    beginnings.add(FIRST, "b")
    assert beginnings.order(FIRST, IDLE, 4)[:2] == ["b", "a"]
    assert beginnings.order(SECOND, IDLE, 4)[:2] == ["a", "b"]


def test_nobody_is_preferred_who_has_too_many_requests_more_than_another(beginnings):
    beginnings.add(FIRST, "b")
    assert beginnings.order(FIRST, {"a": 3, "b": 7, "c": 9}, 4) == ["b", "a", "c"]
    assert beginnings.order(FIRST, {"a": 3, "b": 8, "c": 9}, 4) == ["a", "b", "c"]
    assert beginnings.order(FIRST, {"a": 3, "b": 4, "c": 9}, 0)[0] == "a"


def test_of_those_that_have_read_as_much_the_idlest_comes_first(beginnings):
    for replica in "abc":
        beginnings.add(FIRST, replica)
    assert beginnings.order(FIRST, {"a": 2, "b": 1, "c": 3}, 4) == ["b", "a", "c"]


def test_an_unknown_beginning_goes_to_the_idlest(beginnings):
    beginnings.add(FIRST, "b")
    assert beginnings.order(of(body("x" * 999)), {"a": 1, "b": 1, "c": 0}, 4)[0] == "c"
    assert beginnings.order(Affinity(), {"a": 0, "b": 1, "c": 1}, 4)[0] == "a"


def test_proxies_agree_on_a_new_beginning_and_new_ones_are_spread(beginnings):
    new = [of(body(f"{number} " * 99)) for number in range(60)]
    chosen = [beginnings.order(affinity, IDLE, 4)[0] for affinity in new]
    assert chosen == [Beginnings("general").order(affinity, dict(reversed(IDLE.items())), 4)[0] for affinity in new]
    assert min(Counter(chosen).values()) > 8


def test_short_prompts_are_spread_too(beginnings):
    assert len({beginnings.order(Affinity(), IDLE, 4)[0] for _ in range(60)}) == 3


def test_a_domain_stays_where_it_was_and_the_services_own_is_everywhere(beginnings):
    code, own = of(body(model="llm:code")), of(body(model="llm:general"))
    beginnings.add(code, "b")
    beginnings.add(own, "b")
    assert {beginnings.order(code, {"a": 0, "b": 2, "c": 0}, 4)[0] for _ in range(9)} == {"b"}
    assert beginnings.order(own, {"a": 0, "b": 2, "c": 1}, 4)[0] == "a"


def test_a_beginning_comes_before_a_domain(beginnings):
    beginnings.add(of(body(model="llm:code")), "a")
    beginnings.add(FIRST, "b")
    assert beginnings.order(of(body(SYSTEM, model="llm:code")), IDLE, 4)[:2] == ["b", "a"]


def test_replicas_that_are_gone_are_nobodys_choice(beginnings):
    beginnings.add(FIRST, "gone")
    assert set(beginnings.order(FIRST, IDLE, 4)) == set(IDLE)


def test_memory_is_bounded_and_what_was_not_asked_for_longest_is_forgotten_from_its_end(beginnings):
    beginnings.add(FIRST, "a")
    count = 0
    while beginnings.knows(FIRST.blocks[-1]):
        beginnings.add(of(body(f"{count} " * 999)), "b")
        count += 1
        assert count < _KNOWN
    assert beginnings.order(FIRST, IDLE, 4)[0] == "a"  # how it begins is still known
    for number in range(count, 3 * count):
        beginnings.add(of(body(f"{number} " * 999)), "b")
    assert len(beginnings) == _KNOWN
    assert not beginnings.knows(FIRST.blocks[0])
