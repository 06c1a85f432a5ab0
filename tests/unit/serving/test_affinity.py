from __future__ import annotations

import json
from collections import Counter

import pytest

from serving.http.affinity import _KNOWN, BLOCK, Affinity, PrefixIndex

SYSTEM = "You are a helpful assistant of the library in the old town. " * 6


def body(prompt="", **fields):
    return json.dumps({"prompt": prompt, **fields}).encode()


def chat(*texts, **fields):
    return json.dumps({"messages": [{"role": "user", "content": text} for text in texts], **fields}).encode()


def of(content, key=b"Bearer k"):
    return Affinity.of(content, key)


def count_common_blocks(first, second):
    return sum(a == b for a, b in zip(first.blocks, second.blocks, strict=False))


def test_prompts_share_the_blocks_of_their_common_prefix():
    first, second = of(body(SYSTEM + "When is it open?")), of(body(SYSTEM + "Who was the first to be there?" * 9))
    assert count_common_blocks(first, second) == len(SYSTEM) // BLOCK
    assert count_common_blocks(first, of(body("Another" + SYSTEM))) == 0
    turn = chat(SYSTEM, "When?"), chat(SYSTEM, "When?", "At nine.", "And on sundays?")
    assert count_common_blocks(*map(of, turn)) >= len(SYSTEM) // BLOCK


@pytest.mark.parametrize("field", ["messages", "x"])
def test_deep_body_has_no_affinity(field):
    assert of(f'{{"{field}": {"[" * 5000}{"]" * 5000}}}'.encode()) == Affinity()


def test_blocks_depend_on_tools_messages_and_prompt_only():
    first = json.dumps({"temperature": 0.5, "stream": True, "prompt": SYSTEM, "model": "m"}).encode()
    assert of(first) == of(body(SYSTEM))
    tool = {"type": "function", "function": {"name": "look_up", "description": "d" * BLOCK}}
    assert count_common_blocks(of(chat(SYSTEM, tools=[tool])), of(chat(SYSTEM))) == 0


def test_different_clients_share_no_blocks():
    assert count_common_blocks(of(body(SYSTEM)), of(body(SYSTEM), key=b"Bearer other")) == 0


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"model": 3}', b'{"osd": 1}', b'\xff{"prompt": "a"}', body("short"), b"{}"]
)
def test_invalid_or_short_body_gives_empty_affinity(content):
    assert of(content) == Affinity()


def test_domain_comes_from_model_or_osd_field():
    named = of(body(model="llm:code"))
    assert named.domain
    assert named == of(body(osd={"domain": "code"})) == of(body(model="llm", osd={"domain": "code"}))
    assert named != of(body(model="llm:sql"))
    assert not of(body(model="llm")).domain


def test_affinity_text_round_trips_and_contains_only_hashes():
    for affinity in (Affinity(), of(body(SYSTEM, model="llm:code")), of(body(SYSTEM)), of(body(model="llm:code"))):
        assert Affinity.read(str(affinity)) == affinity
    assert set(str(of(body(SYSTEM, model="llm:code")))) <= set("0123456789abcdef.")


def test_affinity_of_a_long_prompt_fits_a_header():
    assert len(str(of(body(SYSTEM * 1000)))) < 4096


@pytest.fixture
def prefixes():
    return PrefixIndex("general")


IDLE = {"a": 0, "b": 0, "c": 0}
FIRST, SECOND = of(body(SYSTEM + "one" * 99)), of(body(SYSTEM + "two" * 99))


def test_replica_with_most_common_blocks_comes_first(prefixes):
    prefixes.add(SECOND, "a")
    prefixes.add(FIRST, "b")
    assert prefixes.order(FIRST, IDLE, 4)[:2] == ["b", "a"]
    assert prefixes.order(SECOND, IDLE, 4)[:2] == ["a", "b"]


def test_overloaded_replica_is_not_preferred(prefixes):
    prefixes.add(FIRST, "b")
    assert prefixes.order(FIRST, {"a": 3, "b": 7, "c": 9}, 4) == ["b", "a", "c"]
    assert prefixes.order(FIRST, {"a": 3, "b": 8, "c": 9}, 4) == ["a", "b", "c"]
    assert prefixes.order(FIRST, {"a": 3, "b": 4, "c": 9}, 0)[0] == "a"


def test_equal_prefixes_are_ordered_by_load(prefixes):
    for replica in "abc":
        prefixes.add(FIRST, replica)
    assert prefixes.order(FIRST, {"a": 2, "b": 1, "c": 3}, 4) == ["b", "a", "c"]


def test_unknown_prefix_goes_to_the_least_loaded_replica(prefixes):
    prefixes.add(FIRST, "b")
    assert prefixes.order(of(body("x" * 999)), {"a": 1, "b": 1, "c": 0}, 4)[0] == "c"
    assert prefixes.order(Affinity(), {"a": 0, "b": 1, "c": 1}, 4)[0] == "a"


def test_new_prefixes_are_spread_and_proxies_agree(prefixes):
    new = [of(body(f"{number} " * 99)) for number in range(60)]
    chosen = [prefixes.order(affinity, IDLE, 4)[0] for affinity in new]
    assert chosen == [PrefixIndex("general").order(affinity, dict(reversed(IDLE.items())), 4)[0] for affinity in new]
    assert min(Counter(chosen).values()) > 8


def test_short_prompts_are_spread(prefixes):
    assert len({prefixes.order(Affinity(), IDLE, 4)[0] for _ in range(60)}) == 3


def test_domain_stays_on_its_replica_except_the_default_domain(prefixes):
    code, general = of(body(model="llm:code")), of(body(model="llm:general"))
    prefixes.add(code, "b")
    prefixes.add(general, "b")
    assert {prefixes.order(code, {"a": 0, "b": 2, "c": 0}, 4)[0] for _ in range(9)} == {"b"}
    assert prefixes.order(general, {"a": 0, "b": 2, "c": 1}, 4)[0] == "a"


def test_prefix_outweighs_domain(prefixes):
    prefixes.add(of(body(model="llm:code")), "a")
    prefixes.add(FIRST, "b")
    assert prefixes.order(of(body(SYSTEM, model="llm:code")), IDLE, 4)[:2] == ["b", "a"]


def test_removed_replica_is_never_chosen(prefixes):
    prefixes.add(FIRST, "gone")
    assert set(prefixes.order(FIRST, IDLE, 4)) == set(IDLE)


def test_oldest_prefix_is_evicted_from_its_end(prefixes):
    def prefers_its_replica(block):
        return prefixes.order(Affinity(blocks=(block,)), {"a": 1, "b": 0, "c": 0}, 4)[0] == "a"

    prefixes.add(FIRST, "a")
    count = 0
    while prefers_its_replica(FIRST.blocks[-1]):
        prefixes.add(of(body(f"{count} " * 999)), "b")
        count += 1
        assert count < _KNOWN
    assert prefixes.order(FIRST, IDLE, 4)[0] == "a"  # the first blocks are still known
    for number in range(count, 3 * count):
        prefixes.add(of(body(f"{number} " * 999)), "b")
    assert len(prefixes) == _KNOWN
    assert not prefers_its_replica(FIRST.blocks[0])
