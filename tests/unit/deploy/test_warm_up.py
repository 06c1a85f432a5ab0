"""Warm-up: its requests, and its stored result."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from deploy import warm_up as warming
from deploy.seeding import Seeds, keep_asking, load_prompts, user_opening
from deploy.warm_store import WarmStore
from deploy.warm_up import WarmUpError, warm_up
from osd.cli.exit_codes import FAILURE
from osd.config import EagleSettings, RecallSettings, Settings
from osd.drafting.recall.snapshot import SNAPSHOT
from osd.registry.local_storage import LocalStorage
from osd.registry.object_storage import storage_of
from osd.registry.versions import Registry
from osd.sealed import seal
from osd.traffic import SOURCES
from osd.traffic.open_loop import client_of
from osd.traffic.prompt import HELD_OUT, Prompt, split
from tests.command import run_cli
from tests.tiny import tokenizer
from tests.unit.traffic.test_prompts import USAGE, chunk, service, stream
from tests.waiting import HANG_SECONDS

PROMPTS = [Prompt(str(number), "test", (f"question {number}",)) for number in range(3)]
CONFIG = {"kind": "toy"}


def session(answer, use):
    """Return the result of ``use`` with a client of a service that answers with ``answer``."""

    async def run():
        async with service(answer) as url, client_of(url, None) as client:
            return await asyncio.wait_for(use(client), HANG_SECONDS)

    return asyncio.run(run())


async def prompt():
    return PROMPTS[0]


async def chatting(body):
    return stream(chunk("yes", "stop"), USAGE)


def test_keep_asking_users_wait_for_each_answer():
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


def test_keep_asking_stops_after_repeated_failures():
    async def answer(body):
        return "HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"

    tally = session(answer, lambda client: keep_asking(client, prompt, 2, 20.0, 5))
    assert (tally.sent, tally.failed) == (16, 16)


def test_keep_asking_continues_after_a_failed_prompt():
    received = 0

    async def answer(body):
        nonlocal received
        received += 1
        return await chatting(body) if received % 8 == 0 else "HTTP/1.1 400 Too long\r\nContent-Length: 0\r\n\r\n"

    tally = session(answer, lambda client: keep_asking(client, prompt, 1, 0.3, 5))
    assert tally.finished > 1
    assert tally.failed >= 7 * tally.finished


def written(texts):
    body = json.dumps({"choices": [{"text": text} for text in texts]})
    return f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"


def taken(answer, opening, count):
    async def use(client):
        seeds = Seeds(client, opening, PROMPTS)
        return [(await seeds.next()).turns[0] for _ in range(count)]

    return session(answer, use)


def test_seeds_alternate_written_and_load_prompts():
    bodies = []

    async def answer(body):
        bodies.append(body)
        return written([" own 1\n", "", "own 2"])

    prompts = taken(answer, [5, 6], 6)
    assert prompts == ["own 1", "question 0", "own 2", "question 1", "own 1", "question 2"]
    assert len(bodies) == 2
    assert bodies[0]["prompt"] == [5, 6]
    assert bodies[0]["temperature"] == 1
    assert bodies[0]["store"] is False, "written prompts are not answers to learn from"


def test_seeds_without_written_prompts_are_the_loaded_ones():
    async def refuses(body):
        return "HTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n"

    questions = ["question 0", "question 1", "question 2", "question 0"]
    assert taken(refuses, [5, 6], 4) == questions
    assert taken(refuses, [], 4) == questions


def test_user_opening_ends_before_the_first_message():
    tiny = tokenizer()
    assert tiny.decode(user_opening(tiny)) == "<|user|>"
    tiny.chat_template = "no place for it"
    assert user_opening(tiny) == []


def test_loaded_prompts_exclude_held_out_prompts(tmp_path):
    prompts = load_prompts(None)
    assert {prompt.domain for prompt in prompts} == set(SOURCES)
    for source in SOURCES.values():
        held_out = {prompt.turns for prompt in split(source(), HELD_OUT)[1]}
        assert held_out
        assert not held_out & {prompt.turns for prompt in prompts}
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"id": "a", "domain": "d", "messages": [{"role": "user", "content": "hi"}]}))
    assert [prompt.turns for prompt in load_prompts(str(file))] == [("hi",)]


STARTING_POLLS = 20


class Service:
    """Replacement of the service that warms up; its trainer starts, reports ``states``, then that it waits."""

    def __init__(self, settings, states, versions, recalled):
        self.settings, self.states, self.versions, self.recalled = settings, states, versions, recalled
        self.url, self.trainer, self.methods = "http://nowhere", object(), []

    def ask_trainer(self, method):
        self.methods.append(method)
        starts = len(self.methods) <= STARTING_POLLS
        state = "waiting" if starts or not self.states else self.states.pop(0)
        return {"steps": 1, "published": 0, "records": 0 if starts else 4, "refused": 0, "state": state}

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
def scene(monkeypatch, tmp_path, tiny_target):
    """Return a function that runs a warm-up on a replacement service with the given results."""
    home, seen = tmp_path / "home", SimpleNamespace(service=None)
    monkeypatch.setattr(warming.time, "sleep", lambda seconds: None)

    def run(versions=3, recalled=True, states=(), finished=4, **settings):
        def embedded(temporary, report):
            seen.service = Service(temporary, list(states), versions, recalled)
            return seen.service.running()

        async def send(url, opening, prompts, seconds, report):
            seen.seconds, seen.opening = seconds, opening
            errors = {} if finished else {"HTTP 503": 2}
            return SimpleNamespace(finished=finished, tokens=9 * finished, errors=errors)

        monkeypatch.setattr(warming, "Embedded", embedded)
        monkeypatch.setattr(warming, "_send", send)
        changed = Settings(home=home, target={"source": str(tiny_target)}, **settings)
        return warm_up(changed, PROMPTS, 2.0), WarmStore(home, tiny_target), seen

    return run


def test_warm_up_stores_the_drafter_and_the_table(scene, tmp_path):
    warmed, store, seen = scene(states=["training", "waiting", "training"])
    assert (warmed.requests, warmed.tokens, warmed.versions) == (4, 36, 2)
    assert warmed.drafter
    assert warmed.recalled
    kept = store.drafter(CONFIG)
    assert kept.weights["w"].tolist() == [2.0, 2.0]
    assert kept.manifest["warm_up"] == {"requests": 4, "tokens": 36, "gate": {"acceptance": 0.5}}
    assert store.recall(RecallSettings(), tmp_path / "domain")
    assert (tmp_path / "domain" / SNAPSHOT).read_bytes() == b"table"
    assert not store.recall(RecallSettings(), tmp_path / "domain"), "the folder has a table already"
    assert seen.service.states == [], "a trainer that starts is not one without work"
    assert seen.service.methods[-1] == "pause"
    assert 45 < seen.seconds <= 50, "half of two minutes, minus the time to stop"
    assert tokenizer().decode(seen.opening) == "<|user|>"


def test_warm_up_service_is_private_and_trains_for_free(scene, tmp_path):
    (tmp_path / "secret").write_text("k")
    temporary = scene(
        redis_url="redis://elsewhere:1",
        redis={"password_file": tmp_path / "secret"},
        registry={"url": "s3://versions/of-users"},
        serving={"port": 8000, "api_key": "k", "api_key_file": tmp_path / "secret", "max_replicas": 4},
    )[2].service.settings
    assert temporary.home not in (tmp_path / "home", None)
    assert not temporary.home.exists(), "it is deleted"
    assert temporary.redis_url is None
    assert temporary.serving.host == "127.0.0.1"
    assert temporary.serving.port != 8000
    opened, url = seal(temporary, "redis://:own@127.0.0.1:1/0").open()
    assert (opened.serving.api_key, opened.serving.replica_limit) == (None, 1)
    assert url == "redis://:own@127.0.0.1:1/0"
    assert isinstance(storage_of(temporary), LocalStorage)
    assert (temporary.trainer.price, temporary.trainer.duty) == (0, 1)


def test_second_warm_up_replaces_the_first(scene, tmp_path):
    scene(versions=2)
    _, store, _ = scene(versions=4)
    assert store.drafter(CONFIG).weights["w"].tolist() == [3.0, 3.0]
    assert len(list(tmp_path.glob("home/warm/*/toy/[0-9]*"))) == 1
    assert store.drafter({"kind": "toy", "layers": 2}) is None
    assert store.drafter({"kind": "other"}) is None


def test_warm_up_without_learning_stores_nothing(scene, tmp_path):
    warmed, store, _ = scene(versions=1, recalled=False, drafter=EagleSettings())
    assert not warmed.drafter
    assert not warmed.recalled
    assert store.drafter(CONFIG) is None
    assert not store.recall(RecallSettings(), tmp_path / "domain")


def test_warm_up_without_answers_raises_and_stores_nothing(scene, tmp_path):
    with pytest.raises(WarmUpError, match="no prompt was answered: HTTP 503") as failed:
        scene(finished=0)
    assert failed.value.code == FAILURE
    assert not (tmp_path / "home" / "warm").exists()


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--prompts", "nowhere.jsonl"], "nowhere.jsonl is neither a file nor one of unittest, stdlib, pydoc"),
    (["--set", "drafter.kind=none"], "drafter.kind none learns nothing"),
    (["--minutes", "0"], "greater than or equal to 1"),
])  # fmt: skip
def test_warm_up_with_unsuitable_settings_fails_in_one_sentence(tmp_path, arguments, sentence):
    result = run_cli("drafters", "warm-up", *arguments, home=tmp_path)
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())
