"""Which version a rollout gives a request."""

from __future__ import annotations

import math

import pytest

from osd.learning.replay import is_held_out
from osd.registry.pointer import Rollout

IDS = [f"cmpl-{i:032x}-0" for i in range(20_000)]


def test_without_a_canary_every_request_gets_the_stable_version():
    assert {Rollout(4, None, 0.5, 1.0).version_for(name) for name in IDS[:500]} == {4}


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.5, 1.0])
def test_the_canary_gets_its_share_of_requests(share):
    got = sum(Rollout(4, 5, share, 1.0).version_for(name) == 5 for name in IDS)
    assert abs(got - share * len(IDS)) <= 4 * math.sqrt(len(IDS) * share * (1 - share))


def test_a_request_gets_the_same_version_everywhere_and_keeps_it_while_the_share_grows():
    small, large = ({n for n in IDS if Rollout(4, 5, share, 1.0).version_for(n) == 5} for share in (0.1, 0.4))
    assert small < large
    # Worked out once: another hash or salt would send requests elsewhere than replicas of another build do.
    assert [Rollout(1, 2, 0.5, 1.0).version_for(name) for name in ("a", "b", "c", "d", "e", "f")] == [2, 2, 2, 1, 1, 1]


def test_what_the_canary_serves_does_not_depend_on_what_is_held_out():
    held_out = [name for name in IDS if is_held_out(name, 0.3)]
    got = sum(Rollout(4, 5, 0.3, 1.0).version_for(name) == 5 for name in held_out)
    assert abs(got - 0.3 * len(held_out)) <= 4 * math.sqrt(len(held_out) * 0.3 * 0.7)
