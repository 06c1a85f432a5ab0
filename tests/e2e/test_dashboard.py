"""Dashboard in a real browser: five pages, with and without data, in both themes, on a desktop and a phone."""

from __future__ import annotations

import importlib.resources
import itertools
import json
import os
import re
from contextlib import closing

import pytest
from playwright.sync_api import expect

from osd.registry.events import Events
from osd.registry.pointer import Pointer
from tests.e2e.conftest import ADMIN_KEY
from tests.e2e.test_swaps import shake

PAGES = ("overview", "learning", "traffic", "versions", "playground")
_DRAWN = {"overview": ("acceptance", "speed", "length"), "traffic": ("token",)}
"""Charts that have data after one request."""
DESK, PHONE = {"width": 1360, "height": 900}, {"width": 390, "height": 844}

expect.set_options(timeout=60_000)

# Returns the share of the canvas that is not empty.
_INK = """canvas => {
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  let ink = 0;
  for (let i = 3; i < data.length; i += 4) ink += data[i] > 0;
  return 4 * ink / data.length;
}"""

# Returns the elements outside the screen that cannot be reached by scrolling within a box.
_CUT_OFF = """() => [...document.querySelectorAll('body *')].filter(element => {
  const { left, right, width } = element.getBoundingClientRect();
  const scrolls = element.closest('.scroll, .events, .u-wrap, .plot, .sprite, .hidden, .skip, svg');
  return width > 0 && !scrolls && (left < -1 || right > innerWidth + 1);
}).map(element => element.outerHTML.slice(0, 120))"""

_AXE = importlib.resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()


@pytest.fixture(scope="module")
def window(browser):
    """Browser page that all tests share, because a new page takes most of a second."""
    window = browser.new_page(reduced_motion="reduce")
    yield window
    window.close()


@pytest.fixture
def opened(service, window):
    """Function that opens a page; afterwards the page must have no errors and no requests to other servers."""
    problems, foreign, listening = [], [], []
    handlers = {
        "console": lambda message: message.type == "error" and problems.append(message.text),
        "pageerror": lambda error: problems.append(str(error)),
        "request": lambda request: request.url.startswith(service.url) or foreign.append(request.url),
    }

    def open_page(name="overview", viewport=DESK, scheme="light", quiet=True, prepare=lambda page: None):
        window.set_viewport_size(viewport)
        window.emulate_media(color_scheme=scheme)
        for event in handlers if quiet else ("pageerror", "request"):
            window.on(event, handlers[event])
            listening.append(event)
        prepare(window)
        window.goto(f"{service.url}/dashboard#{name}")
        expect(window.locator("#nav a[aria-current]")).to_have_text(name.capitalize())
        return window

    yield open_page
    if listening:
        window.evaluate("sessionStorage.clear(), localStorage.clear()")
    for event in listening:
        window.remove_listener(event, handlers[event])
    window.unroute_all(behavior="ignoreErrors")
    window.goto("about:blank")  # end all activity of this page
    assert problems == []
    assert foreign == []


@pytest.fixture(scope="module")
def drafted(service):
    """Service with drafts; at a high temperature the target accepts tokens of a drafter with random weights."""
    for seed in range(4):
        assert service.complete(max_tokens=60, ignore_eos=True, temperature=2, seed=seed).status_code == 200
    return service


def go(page, name):
    page.locator(f'#nav a[href="#{name}"]').click()
    expect(page.locator("#title")).to_have_text(name.capitalize())


def soon(page, selector, text):
    """Wait for a text in an element, and check each frame; ``expect`` checks once a second after a while."""
    contains = "([selector, text]) => document.querySelector(selector)?.textContent.includes(text)"
    page.wait_for_function(contains, arg=[selector, text], timeout=60_000)


def row(number):
    return f'#versions tr[data-key="{number}"]'


def faults(page, *rules):
    """Return the serious accessibility errors that axe-core finds, by these rules or by all rules."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(_AXE)
    options = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
    violations = page.evaluate("options => axe.run(options)", options)["violations"]
    return [
        (violation["id"], node["html"][:160], node["failureSummary"])
        for violation in violations
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


def picture(page, name):
    if folder := os.environ.get("SCREENSHOTS"):
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=f"{folder}/{name}.png", full_page=True)


def send(page, data):
    """Replace every event of the stream by ``data``."""
    body = f"event: snapshot\nid: 900-0\ndata: {json.dumps(data)}\n\n"
    page.route(
        "**/dashboard/stream*", lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body)
    )


def unused(service, **state):
    """Return the data of a service without requests and versions, with changes to its ``state``."""
    now = service.data()
    now.pop("history")
    now |= {"events": [], "steps": [], "funds": [], "versions": [], "training": {}}
    now |= {"domains": [now["domain"]]}
    now |= {"totals": dict.fromkeys(now["totals"], 0), "recall": {"tables": {}, "orders": []}, "stable": None}
    bins = {"width": 4, "time": [], "gauges": {}, "counts": {}, "swaps": []}
    return {"time": now["time"], "bins": bins, "state": {**now, **state}}


TRAINER = {"needed": True, "silence": 1.0, "min_records": 12}
SPEEDUP = {"estimate": 1.86, "low": 1.84, "high": 1.88, "price": 0.004, "guarded": 0, "trials": 80}
REJECTED = {"kind": "rejected", "stage": "load", "domain": "general", "version": 7, "reason": "its hash is wrong"}


def healthy(service, **state):
    """Return the data of a service that has run for ten minutes without a problem, with changes to its ``state``."""
    data = unused(service)
    started = {**data["state"]["model"], "created": int(data["time"]) - 600}
    data["state"] |= {"model": started, "trainer": TRAINER, "measures": True, "speedup": SPEEDUP, **state}
    return data


def test_pages_show_data_without_accessibility_errors(drafted, opened):
    page = opened()
    expect(page.locator("#status")).to_have_text("live")
    expect(page.locator("#model")).to_have_text("tiny")
    soon(page, "#now-acceptance", "%")
    expect(page.locator("#note-speedup")).to_contain_text("it needs growth.governed=true")
    for by in ("source", "version", "domain"):
        page.get_by_role("button", name=by).click()
        expect(page.locator("#breakdown .bar").first).to_contain_text(" of ")
    expect(page.locator("#positions .bar")).not_to_have_count(0)
    go(page, "learning")
    expect(page.locator("#effects")).to_have_count(1)
    expect(page.locator("#now-fund")).to_be_visible()
    go(page, "traffic")
    expect(page.locator("#replicas tbody tr")).to_have_count(2)
    expect(page.locator("#now-first")).to_contain_text("s")
    go(page, "versions")
    newest = drafted.registry.list(drafted.settings.domain)[-12:]
    for version in newest:
        expect(page.locator(row(version.number))).to_have_count(1)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for name in PAGES:
            go(page, name)
            for chart in _DRAWN.get(name, ()):
                expect(page.locator(f"#chart-{chart} canvas")).to_have_count(1)
                assert page.locator(f"#chart-{chart} canvas").evaluate(_INK) > 0.01
            picture(page, f"{name}-{scheme}")
            rules = () if scheme == "light" else ("color-contrast",)  # the other rules do not depend on the theme
            assert faults(page, *rules) == [], (name, scheme)
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(PHONE)  # sizes do not depend on the theme
    for name in PAGES:
        go(page, name)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], name
        assert page.evaluate(_CUT_OFF) == [], name
        picture(page, f"{name}-light-phone")


def test_pages_without_data_show_empty_states(service, opened):
    page = opened(viewport=PHONE, prepare=lambda page: send(page, unused(service, replicas=[])))
    expect(page.locator("#status")).to_have_text("live")
    expect(page.locator("#problems")).to_contain_text("No replica has reported")
    expect(page.locator("#note-speedup")).to_contain_text("growth.governed")
    expect(page.locator("#phases")).to_be_hidden()
    for name in PAGES:
        go(page, name)
        shown = page.locator(".page:not([hidden])")
        if name != "overview":
            expect(page.locator("#notices")).to_contain_text("No replica has reported")
        if name not in ("versions", "playground"):
            expect(shown.locator(".plot .empty").first).to_be_visible()
            assert shown.locator("canvas").count() == 0
        if name == "versions":
            expect(page.locator("#versions")).to_be_hidden()
            expect(shown).to_contain_text("No drafter version is published yet.")
            expect(shown).to_contain_text("Set trainer.extra_domains")
        assert page.evaluate(_CUT_OFF) == []
        assert not re.search("undefined|NaN|null", page.inner_text("body"))
        picture(page, f"{name}-empty")
    assert faults(page, "color-contrast", "label") == []


def test_small_samples_are_shrunk_and_faint(service, opened):
    """Five accepted draft tokens do not look like 100 % after 400 draft tokens with 10 % accepted."""

    def few(page):
        data = unused(service)
        now = int(data["time"]) // 4 * 4
        counts = {"drafted": [400, 5], "accepted": [40, 5], "rounds": [100, 1]}
        counts |= {"source_drafted|recall": [0, 5], "source_accepted|recall": [0, 5]}
        counts |= {"phase_drafted|thinking": [300, 0], "phase_accepted|thinking": [30, 0]}
        counts |= {"phase_drafted|answer": [100, 5], "phase_rounds|answer": [20, 1], "phase_rounds|thinking": [80, 0]}
        data["bins"] |= {"time": [now - 8, now - 4], "gauges": {"running": [1, 1], "waiting": [0, 0]}, "counts": counts}
        send(page, data)

    page = opened(prepare=few)
    legend = page.locator("figure", has_text="Acceptance rate").locator(".legend")
    expect(legend).to_contain_text("5 drafted")
    shown = float(re.search(r"([\d.]+) %", legend.inner_text())[1])
    assert 10 < shown < 40
    bar = page.locator('#breakdown .bar[data-name="recall"]')
    expect(bar).to_contain_text("5 of 5")
    expect(bar).to_have_class(re.compile("few"))
    assert bar.locator(".whisker").evaluate("whisker => parseFloat(whisker.style.left)") < 60
    expect(page.locator('#phases .bar[data-name="thinking"]')).to_contain_text("30 of 300, 0.38 accepted per step")
    expect(page.locator('#phases .bar[data-name="answer"]')).to_contain_text("0 of 105, 0.00 accepted per step")
    picture(page, "overview-phases")


def trained(service, rows, **account):
    """Return data of a service whose training has a measured gain.

    Args:
        service: the service.
        rows: (seconds ago, cost, certain savings) of the fund, in core seconds.
        account: changes to the account.
    """
    data = healthy(service)
    effect = {"number": 4, "before": 3, "log": 0.091, "width": 0.012, "trials": 40}
    fund = {"begins": True, "fund": 9.0, "needed": 15.0, "certain": rows[-1][2], "saved": 55.0, "effects": [effect]}
    fund |= {"trial": None, "over_recall": None, "log": 0.091, "width": 0.012, "paid_back": None, **account}
    report = {"cpu_seconds": 53.0, "slowed_seconds": 6.0, "beside_seconds": 0.0, "account": fund}
    report |= dict.fromkeys(("steps", "records", "trained", "held_out", "passed", "rejected", "drifts"), 3)
    report |= dict.fromkeys(("replay_records", "replay_tokens", "replay_bytes", "positions"), 3)
    funds = [[data["time"] - ago, 9.0, 15.0, cost, 55.0, certain] for ago, cost, certain in rows]
    data["state"] |= {"training": {data["state"]["domain"]: report}, "funds": funds}
    return data


def test_overview_says_whether_training_pays(service, opened):
    rows = [(300, 59.0, 30.0), (0, 59.0, 40.0)]
    page = opened(prepare=lambda page: send(page, trained(service, rows)))
    expect(page.locator("#now-speedup")).to_have_text("1.86\u00d7")
    expect(page.locator("#note-speedup")).to_contain_text("the speed of plain decoding at the same load, measured.")
    expect(page.locator("#note-speedup")).to_contain_text("95 % interval: 1.84 to 1.88\u00d7. Measuring costs 0.4 %")
    answers = [
        "59 s of core time, 6.0 s of it while requests ran",
        "55 s of core time, 40 s of it with certainty",
        "+9.5 % speed over v3, measured. 95 % interval: +8.2 % to +10.8 %",
        "in about 9.5 min at the savings and costs of the last 5.0 min",
    ]
    expect(page.locator("#answer-cost dd")).to_have_text(answers)
    expect(page.locator("#problems")).to_have_text("No problem found.")
    titles = page.locator(".summary h2").all_inner_texts()
    assert titles == ["How much faster?", "Does training pay?", "What runs, and what is tried?", "Is anything wrong?"]
    for viewport in (DESK, PHONE):
        page.set_viewport_size(viewport)
        bottom = page.locator("#answer-cost").evaluate("card => card.getBoundingClientRect().bottom")
        assert bottom < viewport["height"], "both answers stand on the first screen"
        assert page.evaluate(_CUT_OFF) == []
        picture(page, f"overview-pays-{viewport['width']}")
    assert faults(page, "color-contrast", "dlitem", "definition-list") == []


@pytest.mark.parametrize(
    ("rows", "account", "payback"),
    [
        ([(300, 59.0, 39.99), (0, 59.0, 40.0)], {}, "not within a day"),
        ([(300, 40.0, 39.0), (0, 59.0, 40.0)], {}, "not within a day"),
        ([(0, 59.0, 40.0)], {}, "not known yet"),
        ([(0, 59.0, 60.0)], {"paid_back": 1_795_577_751.0}, "reached"),
    ],
    ids=["slow", "costs grow", "one row", "reached"],
)
def test_payback_beyond_a_day_is_no_figure(service, opened, rows, account, payback):
    page = opened(prepare=lambda page: send(page, trained(service, rows, **account)))
    expect(page.locator("#now-payback")).to_have_text(payback)


@pytest.mark.parametrize(
    ("trainer", "training", "shown"),
    [
        (TRAINER, {"state": "waiting", "detail": "5 of 12 records to start with"}, "waiting 5 of 12 records"),
        (TRAINER, {"state": "training", "detail": ""}, "training on captured requests"),
        (TRAINER | {"silence": 75.2}, {"state": "training", "detail": ""}, "the trainer does not report"),
        (TRAINER | {"needed": False}, {}, "none nothing is trained"),
    ],
    ids=["waits", "trains", "silent", "not needed"],
)
def test_overview_says_why_the_trainer_waits(service, opened, trainer, training, shown):
    data = trained(service, [(0, 59.0, 40.0)])
    data["state"]["trainer"] = trainer
    data["state"]["training"][data["state"]["domain"]] |= training
    page = opened(prepare=lambda page: send(page, data))
    expect(page.locator("#answer-versions dd").last).to_contain_text(shown)


def test_overview_says_that_the_trained_drafter_rests(service, opened):
    effect = {"number": 4, "before": 0, "log": -0.03, "width": 0.01, "trials": 40, "resting": 1}
    data = trained(service, [(0, 59.0, 40.0)], effects=[], over_recall=effect, log=-0.03, width=0.01)
    page = opened(prepare=lambda page: send(page, data))
    expect(page.locator("#answer-versions dd").first).to_contain_text(
        "it rests in 1 replica, because no gain over recall alone is measured"
    )
    expect(page.locator("#answer-cost dd").nth(2)).to_have_text(
        "\u22123.0 % speed over recall alone, measured. 95 % interval: \u22123.9 % to \u22122.0 %"
    )


def test_fall_of_acceptance_is_marked_and_explained(service, opened):
    data = healthy(service)
    now = int(data["time"]) // 4 * 4
    times = list(range(now - 800, now, 4))
    accepted = [50 if now - time > 400 else 30 for time in times]
    counts = {"drafted": [100] * len(times), "accepted": accepted, "rounds": [25] * len(times)}
    data["bins"] |= {"time": times, "gauges": {}, "counts": counts, "swaps": [[now - 200, 5]]}
    fall = {"kind": "drift", "time": now - 380, "version": 4, "source": "recall", "before": 0.5, "now": 0.31}
    swap = {"kind": "swapped", "time": now - 200, "version": 5, "previous": 4}
    data["state"]["events"] = [{"domain": data["state"]["domain"], **event} for event in (fall, swap)]
    page = opened(prepare=lambda page: send(page, data))
    reason = "The acceptance rate of recall with v4 fell from 50.0 % to about 31.0 %"
    for kind, text, title in (("drift", "drift", reason), ("swap", "v5", "v5 is in service")):
        name = page.locator(f"#chart-acceptance .mark.{kind} span")
        expect(name).to_have_text(text)
        expect(name).to_have_attribute("title", title)
    events = page.locator("#events li")
    expect(events.nth(0)).to_contain_text("v5 is in service and replaces v4")
    expect(events.nth(1)).to_contain_text(reason)
    picture(page, "overview-fall")


def busy_hour(service):
    """Return data of an hour with thirty swaps, a gap, and many versions and domains."""
    data = unused(service)
    now = int(data["time"]) // 15 * 15
    times = list(range(now - 3600, now, 15))
    busy = [0 if 1200 < now - time < 2400 else 1 for time in times]
    data["bins"] |= {"width": 15, "time": times, "gauges": {"running": busy, "waiting": busy}}
    counts = {name: [per * n for n in busy] for name, per in (("drafted", 400), ("accepted", 200), ("rounds", 100))}
    domains = [f"acme-{number}.contract-review-and-summaries-of-them" for number in range(14)]
    counts |= {f"version_drafted|{domain}|{n}": [n + 1] * len(times) for n, domain in enumerate(domains)}
    data["bins"] |= {"counts": counts, "swaps": [[now - 3500 + 115 * number, number] for number in range(30)]}
    live, took = {"rounds": 9, "drafted": 9, "accepted": 3}, {"speedup": None, "problem": None}
    versions = [{"number": n, "manifest": {}, "live": live, "in_service": n == 3, **took} for n in range(1, 41)]
    events = [{"time": now - 3 * 86400, "kind": "promoted", "domain": "general", "version": 3, "parent": 2}]
    data["state"] |= {"versions": versions, "stable": 3, "events": events}
    return data


# Returns whether a line of this colour crosses a column of the canvas.
_CROSSED = """([canvas, share]) => {
  const { data } = canvas.getContext('2d').getImageData(Math.round(share * canvas.width), 0, 1, canvas.height);
  for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 99 && data[i] < 60 && data[i + 1] > 80 && data[i + 1] < 130) return true;
  return false;
}"""  # noqa: E501


def test_busy_hour_stays_readable(service, opened):
    page = opened(prepare=lambda page: send(page, busy_hour(service)))
    page.locator('[data-seconds="3600"]').click()
    page.get_by_role("button", name="domain").click()
    names = page.locator("#breakdown .label")
    expect(names).to_have_count(12)
    assert names.evaluate_all("all => all.filter((label) => label.scrollWidth > label.clientWidth).length") == 0
    expect(page.locator("#breakdown")).to_contain_text("and 2 more")
    expect(page.locator("#chart-acceptance .mark")).to_have_count(30)
    boxes = page.locator("#chart-acceptance .mark span:not(.hidden)").evaluate_all(
        "all => all.map((mark) => mark.getBoundingClientRect()).map(({ left, right, bottom }) => [left, right, bottom])"
    )
    boxes.sort()
    assert len(boxes) >= 6
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(boxes)), "names do not overlap"
    canvas = page.locator("#chart-acceptance canvas")
    assert boxes[0][2] <= canvas.evaluate(
        "canvas => canvas.closest('.u-wrap').querySelector('.u-over').getBoundingClientRect().top"
    )
    crossed = [canvas.evaluate(f"canvas => ({_CROSSED})([canvas, {share}])") for share in (0.3, 0.54, 0.85)]
    assert crossed == [True, False, True], "no line is drawn over the gap"
    expect(page.locator("#events time")).to_have_text(re.compile(r"^\d\d \w{3}, \d\d:\d\d$"))
    picture(page, "overview-many")
    go(page, "versions")
    expect(page.locator("#versions tbody tr")).to_have_count(13)  # the newest twelve, and the version in service
    expect(page.locator(row(3))).to_contain_text("in service")
    page.get_by_role("button", name="Show all 40").click()
    expect(page.locator("#versions tbody tr")).to_have_count(40)


def test_swap_appears_on_the_open_page(drafted, opened, eventually):
    page = opened()
    expect(page.locator("#status")).to_have_text("live")
    before = drafted.versions()[0]
    number = drafted.publish(shake)
    expect(page.locator("#now-version")).to_have_text(f"v{before}")
    drafted.point_at(number)
    soon(page, "#now-version", f"v{number}")
    expect(page.locator("#now-version")).to_have_text(f"v{number}")
    for chart in ("acceptance", "length", "speed"):
        mark = page.locator(f'#chart-{chart} .mark.swap[data-mark="v{number}"]')
        expect(mark).to_have_count(1)
    expect(page.locator("#events li").first).to_contain_text(f"v{number} is in service and replaces v{before}")
    eventually(lambda: drafted.versions() == [number] * 2)


def test_canary_and_events_are_shown(drafted, opened, eventually):
    service = drafted  # the chart of acceptance has marks where it has data
    stable = service.versions()[0]
    number = service.publish()
    service.point_at(stable, number, 0.25)
    events = [
        ("canary", number, {"parent": stable, "share": 0.25}, f"v{number} passed the gate and is on trial"),
        ("promoted", number, {"parent": stable, "reason": "0.3 -> 0.4"}, f"replaces v{stable}: 0.3 -> 0.4"),
        (
            "rolled_back",
            stable,
            {"previous": number, "reason": "it fell"},
            f"Rolled back from v{number} to v{stable}: it fell",
        ),
        ("pinned", stable, {}, f"v{stable} stays in service until it is unpinned"),
        ("unpinned", stable, {}, f"may replace v{stable} again"),
        ("drift", stable, {"before": 0.5, "now": 0.31, "source": "general"}, "fell from 50.0 % to about 31.0 %"),
    ]
    with closing(Events(service.redis.url)) as stream:
        for kind, version, figures, _ in events:
            stream.add(kind, service.settings.domain, version, **figures)
    eventually(lambda: [replica["canary"] for replica in service.data()["replicas"]] == [number] * 2)
    page = opened()
    expect(page.locator("#now-trial")).to_have_text(f"v{number}")
    expect(page.locator("#note-trial")).to_contain_text(f"on trial in 25 % of the steps against v{stable} since ")
    for _, _, _, sentence in events:
        expect(page.locator("#events")).to_contain_text(sentence)
    expect(page.locator(f'#chart-acceptance .mark.canary[data-mark="canary v{number}"]')).to_have_count(1)
    expect(page.locator("#chart-acceptance .mark.drift")).to_have_count(1)
    go(page, "versions")
    expect(page.locator(f'#versions tr[data-key="{number}"]')).to_contain_text("canary, 25 %")
    expect(page.locator(f'#versions tr[data-key="{stable}"]')).to_contain_text("in service")
    go(page, "traffic")
    expect(page.locator("#replicas tbody tr").first).to_contain_text(f"v{stable} and v{number}")
    go(page, "learning")
    expect(page.locator("#verdicts tbody tr").first).to_contain_text("drift")
    service.point_at(stable)
    eventually(lambda: [replica["canary"] for replica in service.data()["replicas"]] == [None] * 2)


def test_operator_rolls_back_and_pins_a_version(service, opened, eventually):
    old = service.versions()[0]
    new = service.publish()
    service.point_at(new)
    page = opened(quiet=False)  # the browser logs the refused key as an error
    soon(page, "#now-version", f"v{new}")
    page.get_by_role("link", name="Roll back or pin a version").click()
    soon(page, row(new), "in service")
    for number in (old, new):
        page.get_by_label(f"Compare v{number}", exact=True).check()
    expect(page.locator("#comparison")).to_contain_text("Held-out acceptance")
    expect(page.locator("#comparison thead")).to_contain_text(f"v{old}")
    page.get_by_label("Operator's key").fill("wrong")
    page.get_by_role("button", name="Use key").click()
    expect(page.locator("#result")).to_contain_text("key")
    expect(page.locator("#do-rollback")).to_be_hidden()
    page.get_by_label("Operator's key").fill(ADMIN_KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#result")).to_have_text("The key is accepted.")
    assert faults(page) == []
    picture(page, "versions-operator")
    page.locator("#version").select_option(str(old))
    page.locator("#do-rollback").click()
    expect(page.get_by_role("dialog")).to_contain_text(f"v{old} will replace v{new} and draft for every request.")
    picture(page, "versions-question")
    page.keyboard.press("Escape")
    with Pointer(service.redis.url, service.settings.registry_dir) as pointer:
        assert pointer.get(service.settings.domain).stable == new
    page.locator("#do-rollback").click()
    page.locator("#confirm").click()
    expect(page.locator("#result")).to_contain_text(f"Done: v{old} is in service, and replaces v{new}.")
    soon(page, row(old), "in service")
    expect(page.locator(row(new))).to_contain_text("set aside")
    go(page, "overview")
    expect(page.locator("#now-version")).to_have_text(f"v{old}")
    expect(page.locator("#events li").first).to_contain_text(f"v{old}")
    go(page, "versions")
    page.locator("#do-pin").click()
    page.locator("#confirm").click()
    soon(page, row(old), "pinned")
    eventually(lambda: service.versions() == [old] * 2)
    page.locator("#do-unpin").click()
    page.locator("#confirm").click()
    expect(page.locator("#result")).to_contain_text("Done")
    expect(page.locator("#do-promote")).to_be_disabled()
    assert page.evaluate("[Object.values(sessionStorage), Object.values(localStorage)]") == [[ADMIN_KEY], []]
    page.get_by_role("button", name="Forget key").click()
    expect(page.locator("#do-rollback")).to_be_hidden()
    assert page.evaluate("Object.values(sessionStorage)") == []


def test_operator_changes_only_the_selected_domain(service, opened):
    domain, default = "acme." + "very-long-name-" * 3 + "sql", service.versions()[0]
    numbers = [service.publish(domain=domain) for _ in range(3)]
    service.point_at(numbers[1], numbers[2], 0.25, domain=domain)
    page = opened("versions")
    page.evaluate("key => sessionStorage.setItem('osd-admin-key', key)", ADMIN_KEY)
    page.get_by_label(f"Compare v{default}", exact=True).check()
    page.get_by_label("Domain").select_option(domain)
    expect(page.locator("#versions tbody tr")).to_have_count(3)
    expect(page.locator(row(numbers[2]))).to_contain_text("canary, 25 %")
    for number in numbers[:2]:
        page.get_by_label(f"Compare v{number}", exact=True).check()
    expect(page.locator("#comparison thead")).to_contain_text(f"v{numbers[0]}v{numbers[1]}")
    expect(page.locator("#version")).to_have_value(str(numbers[0]))

    def act(action):
        page.locator(f"#do-{action}").click()
        expect(page.get_by_role("dialog")).to_contain_text(f" of {domain}")
        page.locator("#confirm").click()
        expect(page.locator("#result")).to_contain_text(f" of {domain} is in service")
        return page.locator("#result").inner_text()

    assert f"Done: v{numbers[2]} of {domain} is in service, and replaces v{numbers[1]}." in act("promote")
    expect(page.locator("#do-promote")).to_be_disabled()
    assert f"v{numbers[0]} of" in act("rollback")
    assert "pinned" in act("pin")
    soon(page, row(numbers[0]), "in service")
    expect(page.locator(row(numbers[0]))).to_contain_text("pinned")
    assert faults(page, "color-contrast", "label", "select-name") == []
    picture(page, "versions-domain")
    page.set_viewport_size(PHONE)
    assert page.evaluate(_CUT_OFF) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    picture(page, "versions-domain-phone")
    page.get_by_label("Domain").select_option(service.settings.domain)
    expect(page.locator(row(default))).to_contain_text("in service")
    expect(page.locator("#do-unpin")).to_be_disabled()
    data, listed = service.data(), service.http.get("/dashboard/versions", params={"domain": domain}).json()
    assert (data["stable"], data["pinned"]) == (default, False)
    assert (listed["stable"], listed["canary"], listed["pinned"]) == (numbers[0], None, True)
    service.delete_pointer(domain)
    page.get_by_label("Domain").select_option(domain)
    expect(page.locator(row(numbers[0]))).to_contain_text("earlier")
    expect(page.locator("#do-pin")).to_be_disabled()


def test_chat_shows_token_sources_and_plain_decoding(drafted, opened):
    page = opened("playground")
    page.get_by_label("Max tokens").fill("40")
    exact = page.locator('.tokens[data-exact="true"]')
    for turn in (1, 2):
        page.get_by_label("Message").fill("hello")
        page.keyboard.press("Enter")
        expect(exact).to_have_count(2 * turn)
        expect(page.locator(".verdict").nth(turn - 1)).to_contain_text("the speed of plain decoding")
        if turn == 1:
            page.get_by_role("button", name="New chat").click()
            page.get_by_label("Message").fill("hello")
            page.keyboard.press("Enter")
            expect(exact).to_have_count(2)
    expect(page.locator(".turn")).to_have_count(2)
    fast, plain = page.locator(".answer").nth(0), page.locator(".answer").nth(1)
    assert fast.locator(".token:not(.target)").count() > 0, "recall drafts from the first answer"
    assert plain.locator(".token:not(.target)").count() == 0
    for answer in (fast, plain):
        shown = sum(int(count) for count in answer.locator(".counts b").all_inner_texts())
        assert shown == answer.locator(".token").count() == 40
        assert "tokens/s" in answer.locator(".speed").inner_text()
    assert fast.locator(".tokens").inner_text() == plain.locator(".tokens").inner_text()
    fast.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tooltip")).to_contain_text("Probability under the target")
    expect(page.get_by_role("tooltip").locator("li")).to_have_count(5)
    assert faults(page) == []
    picture(page, "playground-chat")
    page.keyboard.press("Escape")
    expect(page.get_by_role("tooltip")).to_be_hidden()
    page.set_viewport_size(PHONE)
    assert page.evaluate(_CUT_OFF) == []
    picture(page, "playground-chat-phone")


def test_refused_chat_shows_the_error(service, opened):
    page = opened("playground", quiet=False)
    page.get_by_label("Max tokens").fill("2000")
    page.get_by_label("Message").fill("hello")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert").filter(has_text="context")).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_page_asks_for_a_key_and_keeps_it(service, opened):
    def guard(route):
        if route.request.headers.get("authorization") == "Bearer right":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "key", "type": "", "param": None, "code": None}})

    page = opened(quiet=False, prepare=lambda page: page.route("**/dashboard/stream*", guard))
    page.get_by_label("API key", exact=True).fill("wrong")
    page.get_by_role("button", name="Open dashboard").click()
    expect(page.get_by_role("alert")).to_be_visible()
    page.get_by_label("API key", exact=True).fill("right")
    page.get_by_role("button", name="Open dashboard").click()
    expect(page.locator("#status")).to_have_text("live")
    expect(page.locator("#login")).to_be_hidden()
    page.reload()
    expect(page.locator("#status")).to_have_text("live")


def test_page_resumes_the_stream_after_an_outage(service, opened):
    page = opened(quiet=False)
    expect(page.locator("#status")).to_have_text("live")
    page.route("**/dashboard/stream*", lambda route: route.abort())
    page.evaluate("dispatchEvent(new Event('offline')), document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.locator("#status")).to_contain_text("trying again")
    expect(page.locator("#notices")).to_contain_text("The server does not answer. The page shows data of")
    picture(page, "overview-gone")
    page.unroute("**/dashboard/stream*")
    with page.expect_request(lambda request: "last-event-id" in request.headers) as resumed:
        expect(page.locator("#status")).to_have_text("live")
    assert re.fullmatch(r"900-\d+", resumed.value.headers["last-event-id"])
    expect(page.locator("#notices")).to_be_empty()


@pytest.mark.parametrize(
    ("state", "figure", "note"),
    [
        ({"drafter": "none"}, "Off", "This service has no drafter"),
        ({"answers": False}, "Not measured", "A server that is only watched"),
        ({"engine": "vllm"}, "Not measured", "vLLM does not switch its drafts off"),
        ({"measures": True}, "Not measured yet", "needs some minutes of traffic"),
        ({"measures": True, "minutes_to_speedup": 3.2}, "Not measured yet", "needs about 4 more minutes of traffic"),
    ],
    ids=["no drafter", "watched", "vLLM", "no trial", "some trials"],
)
def test_speedup_says_why_it_is_not_measured(service, opened, state, figure, note):
    page = opened(prepare=lambda page: send(page, unused(service, **state)))
    expect(page.locator("#now-speedup")).to_have_text(figure)
    expect(page.locator("#note-speedup")).to_contain_text(note)
    plays = not {"answers", "engine"} & state.keys()
    expect(page.locator('#nav a[href="#playground"]')).to_be_visible(visible=plays)


@pytest.mark.parametrize(
    ("state", "problem", "action"),
    [
        ({"stream": {"redis": False, "capacity": 512, "domains": {}}}, "Redis does not answer", "check redis_url"),
        ({"expected_replicas": 3}, "2 of 3 replicas report", "check the memory"),
        ({"trainer": TRAINER | {"silence": None}}, "No trainer runs for the domain", "Start the service again"),
        ({"trainer": TRAINER | {"silence": 75.2}}, "The trainer has been silent for 75 s", "read the log"),
        ({"events": [REJECTED]}, "A replica rejected v7 at", "its hash is wrong. The version before stays in service"),
        ({"speedup": SPEEDUP | {"guarded": 1}}, "Drafting is off in 1 replica", "returns by itself"),
        ({}, "Traces dropped in the last 5 minutes: 7", "capture.bytes_per_second"),
    ],
    ids=["Redis", "replicas", "no trainer", "silent trainer", "rejected version", "guard", "dropped traces"],
)
def test_problem_is_named_with_what_to_do(service, opened, state, problem, action):
    data = healthy(service, **state)
    if not state:
        times = [int(data["time"]) - 8, int(data["time"]) - 4]
        data["bins"] |= {"time": times, "gauges": {}, "counts": {"traces_dropped": [3, 4]}}
    for event in data["state"]["events"]:
        event["time"] = data["time"] - 60
    page = opened(prepare=lambda page: send(page, data))
    expect(page.locator("#problems li")).to_have_count(1)
    expect(page.locator("#problems li")).to_contain_text(problem)
    expect(page.locator("#problems li")).to_contain_text(action)


def test_theme_follows_the_switch_and_is_kept(service, opened):
    page = opened(scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_label("Colours").select_option("dark")
    assert page.evaluate(ground) != light
    page.reload()
    assert page.evaluate(ground) != light
    page.get_by_label("Colours").select_option("light")
    assert page.evaluate(ground) == light


def test_keyboard_reaches_every_page(service, opened):
    page = opened()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the page")).to_be_focused()
    for name in PAGES:
        page.locator(f'#nav a[href="#{name}"]').focus()
        page.keyboard.press("Enter")
        expect(page.locator("#title")).to_have_text(name.capitalize())
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
