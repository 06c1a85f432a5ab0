"""HTTP application around vLLM: its paths, keys, limits, and tenants, with a small application in vLLM's place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from fastapi import FastAPI, Request, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from osd.config import Settings
from osd.vllm.middleware import PRIVATE
from serving.vllm import clients
from serving.vllm.application import create_app
from serving.vllm.service import VllmService
from tests.unit.serving.answers import error_of
from tests.unit.serving.browser import Browser, answered, until
from tests.unit.serving.scripted import ScriptedService

KEYS = [
    {"name": "plain", "key": "key-plain-1"},
    {"name": "acme", "key": "key-acme-11", "tenant": "acme"},
    {"name": "watcher", "key": "key-watch-1", "may": ["watch"]},
    {"name": "limited", "key": "key-limit-1", "tokens_per_minute": 10},
    {"name": "urgent", "key": "key-urgent-1", "priority": -5},
]


class Service(ScriptedService):
    """Service around vLLM."""

    check_health = VllmService.check_health

    def __init__(self, settings: Settings, engine: Engine) -> None:
        super().__init__(settings)
        self._engine = engine

    async def metrics(self) -> dict[str, str]:
        return {"metrics": "of all replicas"}


class Engine:
    """Engine whose requests have three prompt tokens and two outputs of two tokens each."""

    def __init__(self) -> None:
        self.prompts: list[Any] = []
        self.priorities: list[int] = []
        self.is_dead = False

    async def check_health(self) -> None:
        if self.is_dead:
            raise RuntimeError("EngineCore encountered an issue")

    async def generate(self, prompt: Any, params: Any, request_id: str, *, priority: int = 0) -> Any:
        self.prompts.append(prompt)
        self.priorities.append(priority)
        for _ in range(2):
            yield SimpleNamespace(prompt_token_ids=[1, 2, 3], outputs=[SimpleNamespace(index=0, token_ids=[4, 5])])


class World:
    """Application around vLLM, and what reached vLLM."""

    def __init__(self, settings: Settings, has_priorities: bool = True) -> None:
        self.engine = Engine()
        self.service = Service(settings, self.engine)
        self.seen: list[tuple[bytes, bool]] = []
        vllm = FastAPI()
        vllm.post("/v1/completions")(self.complete)
        vllm.post("/scale_elastic_ep")(lambda: {})
        vllm.post("/v1/load_lora_adapter")(lambda: {})
        vllm.get("/metrics")(lambda: "of one replica")
        vllm.websocket("/v1/realtime")(self.talk)
        self.has_started = False
        vllm.router.on_startup.append(lambda: setattr(self, "has_started", True))
        clients.attach(self.engine, self.service.access.budgets, has_priorities)
        self.app = create_app(self.service, vllm)
        self.client = TestClient(self.app, base_url="http://127.0.0.1", raise_server_exceptions=False)

    async def complete(self, request: Request) -> dict[str, Any]:
        self.seen.append((await request.body(), request.scope["state"].get(PRIVATE)))
        params = SimpleNamespace(output_kind=SimpleNamespace(name="DELTA"))
        prompt = {"type": "token", "prompt_token_ids": [1, 2, 3], **dict(request.query_params)}
        priority = int(request.query_params.get("priority", 0))
        answers = self.engine.generate(prompt, params, "r", priority=priority)
        return {"outputs": len([output async for output in answers])}

    async def talk(self, websocket: WebSocket) -> None:
        await websocket.accept()

    def post(self, path: str = "/v1/completions", key: str = "", **options: Any) -> Any:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return self.client.post(path, headers=headers, **{"json": {}, **options})


@pytest.fixture
def make_world(tmp_path: Path) -> Callable[..., World]:
    return lambda **serving: World(Settings(home=tmp_path, serving=serving))


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump(KEYS))
    file.chmod(0o600)
    return file


@pytest.fixture
def keyed(make_world: Callable[..., World], keys_file: Path) -> World:
    return make_world(keys_file=keys_file)


def test_requests_reach_vllm_with_their_body(make_world):
    world = make_world()
    assert world.post(json={"prompt": "hi"}).json() == {"outputs": 2}
    assert world.seen == [(b'{"prompt":"hi"}', False)]


def test_lifespan_is_that_of_vllm(make_world):
    world = make_world()
    with world.client:
        assert world.has_started


def test_metrics_and_health_are_those_of_the_service(make_world):
    world = make_world()
    assert world.client.get("/metrics").json() == {"metrics": "of all replicas"}
    assert world.client.get("/health").json() == {"status": "ok"}
    world.engine.is_dead = True
    message = "This replica cannot decode: vLLM's engine has ended."
    assert error_of(world.client.get("/health"), 503)["message"] == message


@pytest.mark.parametrize("path", ["/scale_elastic_ep", "/v1/load_lora_adapter", "/collective_rpc"])
def test_paths_that_administer_vllm_do_not_exist(make_world, path):
    error_of(make_world().post(path), 404)


def test_websockets_are_closed(make_world):
    world = make_world()
    with pytest.raises(WebSocketDisconnect), world.client.websocket_connect("/v1/realtime"):
        pass


def test_keys_open_vllm_and_the_service(keyed):
    assert error_of(keyed.post(), 401)["code"] == "invalid_api_key"
    assert keyed.post(key="key-plain-1").status_code == 200
    error_of(keyed.post(key="key-watch-1"), 403)
    error_of(keyed.client.get("/metrics", headers={"authorization": "Bearer key-plain-1"}), 403)
    assert keyed.client.get("/metrics", headers={"authorization": "Bearer key-watch-1"}).status_code == 200
    error_of(keyed.post("/admin/drafters/rollback", key="key-plain-1"), 403)


def test_requests_of_a_tenant_are_private(keyed):
    keyed.post(key="key-acme-11", json={"store": True})
    keyed.post(key="key-plain-1", json={"store": True})
    assert [is_private for _, is_private in keyed.seen] == [True, False]


def test_clients_do_not_share_cached_prompts(keyed):
    for key in ("key-plain-1", "key-acme-11", "key-plain-1"):
        keyed.post(key=key)
    first, tenant, again = (prompt["cache_salt"] for prompt in keyed.engine.prompts)
    assert first == again
    assert first != tenant
    keyed.post("/v1/completions?cache_salt=mine", key="key-plain-1")
    assert keyed.engine.prompts[-1]["cache_salt"] == f"{first}mine"


def test_prompts_without_a_key_keep_their_cache(make_world):
    world = make_world()
    world.post()
    assert "cache_salt" not in world.engine.prompts[0]


def test_priority_of_a_key_is_added_to_that_of_a_request(keyed):
    keyed.post(key="key-urgent-1")
    for key in ("key-urgent-1", "key-plain-1"):
        keyed.post("/v1/completions?priority=7", key=key)
    assert keyed.engine.priorities == [-5, 2, 7]


def test_client_with_a_key_cannot_pass_other_requests(keyed):
    for priority in (-9, 5000):
        keyed.post(f"/v1/completions?priority={priority}", key="key-plain-1")
    assert keyed.engine.priorities == [0, 1000]


def test_request_without_a_key_keeps_its_priority(make_world):
    world = make_world()
    world.post("/v1/completions?priority=-3")
    assert world.engine.priorities == [-3]


def test_priority_that_vllm_ignores_is_logged_once(keys_file, tmp_path, caplog):
    world = World(Settings(home=tmp_path, serving={"keys_file": keys_file}), has_priorities=False)
    for key in ("key-plain-1", "key-urgent-1", "key-urgent-1"):
        world.post(key=key)
    logged = [record.message for record in caplog.records if "priority" in record.message]
    assert logged == [
        "the priority of key urgent has no effect: add --scheduling-policy priority to engine.vllm.args, or remove it"
    ]


def test_tokens_of_a_limited_key_are_charged(keyed):
    assert keyed.post(key="key-limit-1").headers["x-ratelimit-limit-tokens"] == "10"
    assert keyed.post(key="key-limit-1").headers["x-ratelimit-remaining-tokens"] == "3"  # 3 and 4 tokens were used
    error = error_of(keyed.post(key="key-limit-1"), 429)
    assert "10 tokens a minute" in error["message"]


def test_large_and_slow_bodies_are_refused(make_world):
    world = make_world(max_body_bytes=2000)
    assert error_of(world.post(content=b"x" * 2001), 413)["message"] == "The body is larger than 2000 bytes."
    assert world.post(content=b"x" * 2000).status_code == 200
    assert len(world.seen) == 1


async def test_requests_above_the_queue_get_429(make_world):
    world = make_world(max_queue=2)
    running = [Browser(world.app, "/v1/completions", {}, whole=False) for _ in range(2)]
    await until(lambda: all(browser.incoming.empty() for browser in running))
    assert (await answered(world.app, "/v1/completions", {})).status == 429
    for browser in running:
        browser.incoming.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        await until(browser.task.done)
    assert [browser.status for browser in running] == [200, 200]
    assert (await answered(world.app, "/v1/completions", {})).status == 200
