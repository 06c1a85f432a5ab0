"""The dashboard in a real browser."""

from __future__ import annotations

import os
import shutil
from contextlib import closing

import pytest
from playwright.sync_api import expect, sync_playwright

from osd.registry.events import Events
from tests.e2e.test_swaps import shake

_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

expect.set_options(timeout=15_000)

# Share of the canvas that something was drawn on.
_INK = """canvas => {
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  let ink = 0;
  for (let i = 3; i < data.length; i += 4) ink += data[i] > 0;
  return 4 * ink / data.length;
}"""


@pytest.fixture(scope="module")
def browser():
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("there is no chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=_ARGUMENTS)
        yield browser
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_dashboard_shows_the_loop(service, browser, eventually, tmp_path, scheme):
    before = service.versions()[0]
    for seed in range(3):
        # Hot, so that a drafter of random weights has something accepted.
        assert service.complete(max_tokens=60, ignore_eos=True, temperature=2, seed=seed).status_code == 200
    number = service.publish(shake)
    service.point_at(number)
    eventually(lambda: service.versions() == [number] * 2)
    for seed in range(3):
        # Hot, so that a drafter of random weights has something accepted.
        assert service.complete(max_tokens=60, ignore_eos=True, temperature=2, seed=seed).status_code == 200
    page = browser.new_page(color_scheme=scheme, viewport={"width": 1360, "height": 1500})
    problems = []
    page.on("console", lambda message: message.type == "error" and problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    foreign = []
    page.on("request", lambda request: request.url.startswith(service.url) or foreign.append(request.url))
    page.goto(f"{service.url}/dashboard")
    expect(page.locator("#status")).to_have_text("live")
    expect(page.locator("#model")).to_have_text("tiny")
    for chart in ("acceptance", "length", "speed"):
        mark = page.locator(f'#chart-{chart} .swap[data-version="{number}"]')
        expect(mark).to_have_count(1)
        expect(mark).to_have_text(f"v{number}")
        assert page.locator(f"#chart-{chart} canvas").evaluate(_INK) > 0.01
    expect(page.locator("#now-version")).to_have_text(f"v{number}")
    row = page.locator(f'#versions tr[data-version="{number}"]')
    expect(row).to_contain_text("in service")
    expect(row).to_contain_text("61.0 %")
    expect(row).to_contain_text("321")
    expect(page.locator(f'#versions tr[data-version="{before}"]')).to_contain_text("earlier")
    expect(page.locator("#versions tbody tr")).to_have_count(len(service.registry.list(service.settings.domain)))
    expect(page.locator("#positions .bar")).not_to_have_count(0)
    expect(page.locator("#sources .bar")).not_to_have_count(0)
    shares = page.locator("#sources .bar b").all_inner_texts()
    assert 99 <= sum(float(text.split(" %")[0]) for text in shares) <= 101
    expect(page.locator("#events li").first).to_contain_text(f"v{number} is in service, before it v{before}")
    expect(page.locator("#replicas dt")).to_have_count(2)
    speed = page.locator("#now-speed").inner_text()
    assert float(speed) >= 0
    picture = os.environ.get("SCREENSHOTS", str(tmp_path))
    page.screenshot(path=f"{picture}/dashboard-{scheme}.png", full_page=True)
    page.set_viewport_size({"width": 420, "height": 900})
    page.wait_for_function("document.documentElement.scrollWidth <= 420")
    page.screenshot(path=f"{picture}/dashboard-{scheme}-narrow.png", full_page=True)
    page.close()
    assert problems == []
    assert foreign == []


def test_a_canary_is_shown_beside_the_stable_version_and_events_are_sentences(service, browser, eventually):
    stable = service.versions()[0]
    number = service.publish()
    service.point_at(stable, number, 0.25)
    told = [
        (
            "canary",
            number,
            {"parent": stable, "share": 0.25},
            f"v{number} passed the gate and serves 25 % of requests beside",
        ),
        ("promoted", number, {"parent": stable, "reason": "0.3 -> 0.4"}, f"takes the place of v{stable}: 0.3 -> 0.4"),
        (
            "rolled_back",
            stable,
            {"previous": number, "reason": "it fell"},
            f"Back to v{stable} from v{number}: it fell",
        ),
        ("pinned", stable, {}, f"v{stable} stays in service until it is unpinned"),
        ("unpinned", stable, {}, f"move on from v{stable}"),
        ("drift", stable, {"before": 0.5, "now": 0.31, "source": "general"}, "fell from 50.0 % to about 31.0 %"),
    ]
    with closing(Events(service.redis.url)) as events:
        for kind, version, figures, _ in told:
            events.add(kind, service.settings.domain, version, **figures)
    eventually(lambda: [replica["canary"] for replica in service.data()["replicas"]] == [number] * 2)
    page = browser.new_page()
    page.goto(f"{service.url}/dashboard")
    expect(page.locator("#note-version")).to_contain_text(f"v{number} on trial for 25 % of requests")
    expect(page.locator(f'#versions tr[data-version="{number}"]')).to_contain_text("canary, 25 %")
    expect(page.locator(f'#versions tr[data-version="{stable}"]')).to_contain_text("in service")
    expect(page.locator("#replicas dd").first).to_contain_text(f"v{stable} and v{number}")
    for _, _, _, sentence in told:
        expect(page.locator("#events")).to_contain_text(sentence)
    page.close()
    service.point_at(stable)
    eventually(lambda: [replica["canary"] for replica in service.data()["replicas"]] == [None] * 2)


def test_the_page_asks_for_the_key_and_keeps_it_for_its_tab(service, browser):
    page = browser.new_page()

    def guard(route):
        if route.request.headers.get("authorization") == "Bearer right":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "key", "type": "", "param": None, "code": None}})

    page.route("**/dashboard/data*", guard)
    page.goto(f"{service.url}/dashboard")
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Open dashboard").click()
    expect(page.get_by_role("alert")).to_be_visible()
    page.get_by_label("API key").fill("right")
    page.get_by_role("button", name="Open dashboard").click()
    expect(page.locator("#status")).to_have_text("live")
    expect(page.locator("#login")).to_be_hidden()
    page.reload()
    expect(page.locator("#status")).to_have_text("live")
    page.close()


def test_the_dashboard_goes_on_when_the_server_is_gone_for_a_moment(service, browser):
    page = browser.new_page()
    page.goto(f"{service.url}/dashboard")
    expect(page.locator("#status")).to_have_text("live")
    page.route("**/dashboard/data*", lambda route: route.abort())
    expect(page.locator("#status")).to_contain_text("trying again")
    page.unroute("**/dashboard/data*")
    expect(page.locator("#status")).to_have_text("live")
    page.close()
