"""What a warm-up asks, of whom, and what it keeps."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from deploy import warm_up as warming
from deploy.seeding import Seeds, given_prompts, keep_asking, user_opening
from deploy.warm_store import WarmStore
from deploy.warm_up import WarmUpError, warm_up
from osd.config import EagleSettings, RecallSettings, Settings
from osd.drafting.recall.snapshot import SNAPSHOT
from osd.registry.versions import Registry
from osd.traffic import SOURCES
from osd.traffic.open_loop import client_of
from osd.traffic.prompt import HELD_OUT, Prompt, split
from tests.command import here
from tests.tiny import make_tiny, tokenizer
from tests.unit.traffic.test_prompts import USAGE, chunk, service, stream
from tests.waiting import HANG_SECONDS

GIVEN = [Prompt(str(number), "test", (f"question {number}",)) for number in range(3)]
CONFIG = {"kind": "toy"}


def session(answer, use):
    """What ``use`` of a client makes of a service that answers so."""

    async def run():
        async with service(answer) as url, client_of(url, None) as client:
            return await asyncio.wait_for(use(client), HANG_SECONDS)

    return asyncio.run(run())


async def prompt():
    return GIVEN[0]


async def chatting(body):
    return stream(chunk("yes", "stop"), USAGE)


def test_each_user_waits_for_an_answer_before_asking_again_until_the_time_is_over():
    flying, most = 0, 0

    async def answer(body):
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.02)
        flying -= 1
        assert (body["max_tokens"], body["temperature"]) == (5, 0)
        return await chatting(body)

    tally = session(answer, lambda client: keep_asking(client, prompt, 3, 0.3, 5))
    assert most == 3
    assert 3 < tally.finished == tally.sent < 60
    assert tally.tokens == 7 * tally.finished


def test_who_is_refused_again_and_again_asks_no_more():
    async def answer(body):
        return "HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"

    tally = session(answer, lambda client: keep_asking(client, prompt, 2, 20.0, 5))
    assert (tally.sent, tally.failed) == (16, 16)


def test_a_prompt_that_fails_keeps_nobody_from_the_next():
    asked = 0

    async def answer(body):
        nonlocal asked
        asked += 1
        return await chatting(body) if asked % 8 == 0 else "HTTP/1.1 400 Too long\r\nContent-Length: 0\r\n\r\n"

    tally = session(answer, lambda client: keep_asking(client, prompt, 1, 0.3, 5))
    assert tally.finished > 1
    assert tally.failed >= 7 * tally.finished


def written(texts):
    body = json.dumps({"choices": [{"text": text} for text in texts]})
    return f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"


def taken(answer, opening, count):
    async def use(client):
        given = Seeds(client, opening, GIVEN)
        return [(await given.next()).turns[0] for _ in range(count)]

    return session(answer, use)


def test_prompts_are_the_targets_own_and_given_ones_in_turns():
    asked = []

    async def answer(body):
        asked.append(body)
        return written([" own 1\n", "", "own 2"])

    found = taken(answer, [5, 6], 6)
    assert found == ["own 1", "question 0", "own 2", "question 1", "own 1", "question 2"]
    assert len(asked) == 2
    assert asked[0]["prompt"] == [5, 6]
    assert asked[0]["temperature"] == 1
    assert asked[0]["store"] is False, "how users begin is not what the target answers"


def test_where_the_target_writes_nothing_the_given_prompts_are_all_there_is():
    async def refuses(body):
        return "HTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n"

    questions = ["question 0", "question 1", "question 2", "question 0"]
    assert taken(refuses, [5, 6], 4) == questions
    assert taken(refuses, [], 4) == questions


def test_a_user_begins_where_the_chat_template_puts_the_first_message():
    tiny = tokenizer()
    assert tiny.decode(user_opening(tiny)) == "<|user|>"
    tiny.chat_template = "no place for it"
    assert user_opening(tiny) == []


def test_what_measurements_hold_out_is_no_seed(tmp_path):
    prompts = given_prompts(None)
    assert {prompt.domain for prompt in prompts} == set(SOURCES)
    for source in SOURCES.values():
        held = {prompt.turns for prompt in split(source(), HELD_OUT)[1]}
        assert held
        assert not held & {prompt.turns for prompt in prompts}
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"id": "a", "domain": "d", "messages": [{"role": "user", "content": "hi"}]}))
    assert [prompt.turns for prompt in given_prompts(str(file))] == [("hi",)]


class Service:
    """Stands for the service that warms up: its trainer says ``states``, and then that it waits."""

    def __init__(self, settings, states, versions, recalled):
        self.settings, self.states, self.versions, self.recalled = settings, states, versions, recalled
        self.url, self.trainer, self.asked = "http://nowhere", object(), []

    def ask_trainer(self, method):
        self.asked.append(method)
        state = self.states.pop(0) if self.states else "waiting"
        return {"steps": 1, "published": 0, "state": state}

    def stable(self):
        return self.versions

    @contextmanager
    def running(self):
        registry = Registry(self.settings.registry_dir)
        for number in range(self.versions):
            weights = {"w": torch.full((2,), float(number))}
            registry.publish(self.settings.domain, weights, CONFIG, {"gate": {"acceptance": 0.5}})
        yield self
        if self.recalled:
            (registry.root / self.settings.domain).mkdir(parents=True, exist_ok=True)
            (registry.root / self.settings.domain / SNAPSHOT).write_bytes(b"table")


@pytest.fixture
def scene(monkeypatch, tmp_path):
    """Runs a warm-up on a service that is not started: ``run`` takes what the service comes to."""
    target = make_tiny(tmp_path / "tiny")
    home, seen = tmp_path / "home", SimpleNamespace(service=None)
    monkeypatch.setattr(warming.time, "sleep", lambda seconds: None)

    def run(versions=3, recalled=True, states=(), finished=4, **settings):
        def embedded(own, report):
            seen.service = Service(own, list(states), versions, recalled)
            return seen.service.running()

        async def send(url, opening, given, seconds, report):
            seen.seconds, seen.opening = seconds, opening
            errors = {} if finished else {"HTTP 503": 2}
            return SimpleNamespace(finished=finished, tokens=9 * finished, errors=errors)

        monkeypatch.setattr(warming, "Embedded", embedded)
        monkeypatch.setattr(warming, "_send", send)
        given = Settings(home=home, target={"source": str(target)}, **settings)
        return warm_up(given, GIVEN, 2.0), WarmStore(home, target), seen

    return run


def test_the_version_in_service_and_the_table_are_kept(scene, tmp_path):
    warmed, store, seen = scene(states=["training", "waiting", "training"])
    assert (warmed.requests, warmed.tokens, warmed.versions) == (4, 36, 2)
    assert warmed.drafter
    assert warmed.recalled
    kept = store.drafter(CONFIG)
    assert kept.weights["w"].tolist() == [2.0, 2.0]
    assert kept.manifest["warm_up"] == {"requests": 4, "tokens": 36, "gate": {"acceptance": 0.5}}
    assert store.recall(RecallSettings(), tmp_path / "domain")
    assert (tmp_path / "domain" / SNAPSHOT).read_bytes() == b"table"
    assert not store.recall(RecallSettings(), tmp_path / "domain"), "it has one"
    assert seen.service.asked[-1] == "pause"
    assert 45 < seen.seconds <= 50, "half of two minutes, and ending takes some"
    assert tokenizer().decode(seen.opening) == "<|user|>"


def test_the_service_that_warms_up_is_alone_and_not_charged(scene, tmp_path):
    own = scene(redis_url="redis://elsewhere:1", serving={"port": 8000, "api_key": "k"})[2].service.settings
    assert own.home not in (tmp_path / "home", None)
    assert not own.home.exists(), "it is gone"
    assert own.redis_url is None
    assert own.serving.host == "127.0.0.1"
    assert own.serving.port != 8000
    assert own.serving.api_key is None
    assert (own.trainer.price, own.trainer.duty) == (0, 1)


def test_second_warm_up_takes_the_place_of_the_first(scene, tmp_path):
    scene(versions=2)
    _, store, _ = scene(versions=4)
    assert store.drafter(CONFIG).weights["w"].tolist() == [3.0, 3.0]
    assert len(list(tmp_path.glob("home/warm/*/toy/[0-9]*"))) == 1
    assert store.drafter({"kind": "toy", "layers": 2}) is None
    assert store.drafter({"kind": "other"}) is None


def test_what_was_not_learnt_is_not_kept(scene, tmp_path):
    warmed, store, _ = scene(versions=1, recalled=False, drafter=EagleSettings())
    assert not warmed.drafter
    assert not warmed.recalled
    assert store.drafter(CONFIG) is None
    assert not store.recall(RecallSettings(), tmp_path / "domain")


def test_without_an_answer_nothing_is_kept_and_the_reason_is_told(scene, tmp_path):
    with pytest.raises(WarmUpError, match="no prompt was answered: HTTP 503"):
        scene(finished=0)
    assert not (tmp_path / "home" / "warm").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl is neither a file nor one of unittest, stdlib, pydoc"),
        (["--set", "drafter.kind=none"], "drafter.kind none learns nothing"),
        (["--minutes", "0"], "greater than or equal to 1"),
    ],
)
def test_what_cannot_warm_up_is_one_sentence(tmp_path, arguments, sentence):
    result = here("drafters", "warm-up", *arguments, home=tmp_path)
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())
