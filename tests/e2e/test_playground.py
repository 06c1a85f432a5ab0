"""The Playground in a real browser: the colours of a hundred answers are the counts of their responses."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.e2e.test_dashboard import opened, window  # noqa: F401  fixtures

ANSWERS = 100
GROUPS = {"recall": "recall", "request": "recall", "copy": "recall", "grammar": "grammar"}
WORDS = ("river", "Straße", "東京", "naïve", "x = [1, 2]", "🙂", "the the the", "a\nb", "<b>&amp;</b>", "0123456789")

# How many tokens of each colour an answer has, and what it says that it has.
_SHOWN = """answer => {
  const coloured = {};
  for (const token of answer.querySelectorAll('.token')) {
    const group = ['recall', 'drafter', 'grammar', 'target'].filter((name) => token.classList.contains(name)).join();
    coloured[group] = (coloured[group] ?? 0) + 1;
  }
  const said = [...answer.querySelectorAll('.counts [data-group]')].map((one) => [one.dataset.group, Number(one.querySelector('b').textContent.replaceAll(',', ''))]);
  return { coloured, said: Object.fromEntries(said), exact: answer.querySelector('.tokens').dataset.exact };
}"""  # noqa: E501


# Keeps what the server answers to the page's last chat, as it came.
_LISTEN = """
  const real = window.fetch;
  window.fetch = async (...asked) => {
    const response = await real(...asked);
    if (asked[0] !== '/v1/chat/completions') return response;
    const [mine, theirs] = response.body.tee();
    window.heard = new Response(mine).text();
    return new Response(theirs, response);
  };
"""


def told(body: str) -> tuple[Counter[str], dict[str, Any]]:
    """What a streamed response counts: tokens by group, and its usage."""
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    (last,) = [event for event in events if event.get("usage")]
    drafts = last["metrics"]["speculative_decoding"]
    groups: Counter[str] = Counter(target=last["usage"]["completion_tokens"] - drafts["num_accepted_draft_tokens"])
    for source, counts in drafts["sources"].items():
        groups[GROUPS.get(source, "drafter")] += counts["num_accepted_draft_tokens"]
    return +groups, last["usage"]


@pytest.mark.soak
def test_the_colours_of_a_hundred_answers_add_up_to_the_counts_of_their_responses(service, opened):  # noqa: F811
    page, seen = opened("playground", prepare=lambda page: page.add_init_script(_LISTEN)), Counter()
    page.get_by_label("Tokens at most").fill("40")
    page.get_by_label("Beside plain decoding").uncheck()
    for number in range(ANSWERS):
        page.get_by_role("button", name="New chat").click()
        page.get_by_label("Temperature").fill(("0", "1", "2")[number % 3])
        page.get_by_label("Message").fill(f"{WORDS[number % len(WORDS)]} {number // 20}")
        page.keyboard.press("Enter")
        expect(page.locator(".tokens[data-exact]")).to_have_count(1)
        shown = page.locator(".answer").evaluate(_SHOWN)
        counted, usage = told(page.evaluate("heard"))
        assert shown["coloured"] == counted, number
        assert +Counter(shown["said"]) == counted, number
        assert counted.total() == usage["completion_tokens"] > 0
        assert shown["exact"] == "true"
        seen += counted
    print(f"tokens of {ANSWERS} answers by colour: {dict(seen)}")
    assert {"recall", "target"} <= seen.keys()
