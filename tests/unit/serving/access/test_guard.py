"""Rights of keys over HTTP, and reloading of the key file."""

from __future__ import annotations

import os

import pytest
import yaml
from starlette.testclient import TestClient

from osd.config import ConfigError, Settings
from serving.access import keys_file
from serving.access.keys import Key, client_of
from serving.api.routes import create_app
from tests.unit.serving.answers import CHAT, asking, error_of

KEYS = {
    "writer": {"key": "sk-writer-1"},
    "watcher": {"key": "sk-watcher-1", "may": ["watch"]},
    "ops": {"key": "sk-ops-1", "may": ["administer"]},
    "acme": {"key": "sk-acme-1", "tenant": "acme"},
    "acme-too": {"key": "sk-acme-2", "tenant": "acme"},
    "blue": {"key": "sk-blue-1", "tenant": "blue"},
}


@pytest.fixture
def keys(tmp_path, monkeypatch):
    """Function that writes the key file; the next request reads it."""
    monkeypatch.setattr(keys_file, "POLL_SECONDS", 0.0)
    file = tmp_path / "keys.yaml"
    version = iter(range(1, 100))

    def write(keys):
        text = keys if isinstance(keys, str) else yaml.safe_dump([{"name": name, **key} for name, key in keys.items()])
        file.write_text(text)
        file.chmod(0o600)
        os.utime(file, (0, next(version)))
        return file

    return write


@pytest.fixture
def service(keys, make_service):
    return make_service(keys_file=keys(KEYS))


def with_key(service, secret):
    return TestClient(create_app(service), headers={"Authorization": f"Bearer {secret}"})


def chat(service, secret, **body):
    return with_key(service, secret).post("/v1/chat/completions", json={**CHAT, **body})


@pytest.mark.parametrize(("path", "allowed"), [
    ("/v1/models", {"writer", "acme"}), ("/metrics", {"watcher", "ops"}), ("/dashboard/data", {"watcher", "ops"}),
    ("/dashboard/versions", {"watcher", "ops"}), ("/dashboard", {"watcher", "ops"}),
    ("/health", {"writer", "watcher", "ops", "acme"}), ("/admin/nothing", {"ops"}),
])  # fmt: skip
def test_key_opens_only_the_paths_of_its_rights(service, path, allowed):
    for name in ("writer", "watcher", "ops", "acme"):
        response = with_key(service, KEYS[name]["key"]).get(path)
        if name in allowed:
            assert response.status_code in (200, 404)
        elif path == "/dashboard":
            assert response.status_code == 401
        else:
            assert error_of(response, 403)["code"] == "forbidden"
    if path != "/health":
        assert with_key(service, "wrong").get(path).status_code == 401


def test_dashboard_stream_needs_the_watch_right(service):
    assert error_of(with_key(service, "sk-writer-1").get("/dashboard/stream"), 403)["code"] == "forbidden"


def test_invalid_key_file_at_startup_raises_config_error(keys, make_service):
    with pytest.raises(ConfigError, match=r"keys\[0\].name"):
        make_service(keys_file=keys("- {}"))


def test_changed_key_file_replaces_the_keys(service, keys):
    assert chat(service, "sk-writer-1").status_code == 200
    keys({"writer": {"key": ["sk-writer-1", "sk-writer-2"]}})
    assert [chat(service, f"sk-writer-{number}").status_code for number in (1, 2)] == [200, 200]
    keys({"writer": {"key": "sk-writer-2"}})
    assert [chat(service, f"sk-writer-{number}").status_code for number in (1, 2)] == [401, 200]
    assert len({request.client for request in service.submitted}) == 1, "a rotated key is the same client"
    assert service.refused == []


def test_invalid_changed_file_keeps_keys_and_is_reported_once(service, keys, caplog):
    keys("- {name: writer, key: [")
    for _ in range(3):
        assert chat(service, "sk-writer-1").status_code == 200
    keys({"other": {"key": "sk-other-1"}})
    assert chat(service, "sk-writer-1").status_code == 401
    assert chat(service, "sk-other-1").status_code == 200
    (reason,) = service.refused
    assert "is not YAML" in reason
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


def test_new_replica_has_the_last_valid_keys_of_an_invalid_file(keys, make_service, caplog):
    make_service(keys_file=keys(KEYS))
    file = keys("- {name: broken, key: short}")
    started = make_service(keys_file=file)
    assert chat(started, "sk-writer-1").status_code == 200
    assert chat(started, "sk-writer-2").status_code == 401
    assert with_key(started, "sk-ops-1").get("/metrics").status_code == 200
    assert "started with the last valid keys, the file is invalid" in caplog.text
    assert "keys[0].key" in started.refused[0]
    copy = started.settings.home_dir / "valid_keys.json"
    assert copy.stat().st_mode & 0o777 == 0o600
    assert b"sk-" not in copy.read_bytes()
    keys({"writer": {"key": "sk-writer-2"}})
    assert chat(started, "sk-writer-2").status_code == 200
    keys("broken")
    assert chat(make_service(keys_file=file), "sk-writer-1").status_code == 401, "the copy follows valid changes"
    copy.write_text("broken")
    with pytest.raises(ConfigError, match="must be a list"):
        make_service(keys_file=file)


def test_keys_of_another_file_are_not_used(keys, make_service, tmp_path):
    make_service(keys_file=keys(KEYS))
    with pytest.raises(ConfigError, match="cannot be read"):
        make_service(keys_file=tmp_path / "another.yaml")


def test_key_named_like_a_tenant_is_another_client():
    tenant = Key("any", (), frozenset(), tenant="acme")
    assert client_of(tenant, None) == client_of(Key("other", (), frozenset(), tenant="acme"), None)
    clients = [client_of(Key("acme", (), frozenset()), None), client_of(None, b"acme"), client_of(None, None)]
    assert len({client_of(tenant, None), *clients}) == 4


def test_deleted_key_file_keeps_the_keys(service, keys):
    keys(KEYS).unlink()
    assert chat(service, "sk-writer-1").status_code == 200
    assert len(service.refused) == 1


def test_request_has_the_tenant_and_client_of_its_key(service):
    for secret in ("sk-writer-1", "sk-acme-1", "sk-acme-2", "sk-blue-1"):
        assert chat(service, secret, osd={"domain": "code"}).status_code == 200
    writer, acme, acme_too, blue = service.submitted
    assert [(request.tenant, request.domain) for request in service.submitted] == [
        ("", "code"),
        ("acme", "code"),
        ("acme", "code"),
        ("blue", "code"),
    ]
    assert acme.client == acme_too.client
    assert len({writer.client, acme.client, blue.client}) == 3


@pytest.mark.parametrize("secret", ["sk-writer-1", "sk-acme-1"])
def test_request_cannot_name_the_domain_of_a_tenant(service, secret):
    assert error_of(chat(service, secret, osd={"domain": "blue.code"}), 400)["param"] == "osd.domain"
    assert service.submitted == []


def test_api_key_generates_and_admin_key_administers(make_service):
    service = make_service(api_key="sk-user", admin_key="sk-admin")
    for path, user, admin in (("/v1/models", 200, 403), ("/metrics", 200, 200), ("/admin/nothing", 403, 404)):
        assert with_key(service, "sk-user").get(path).status_code == user
        assert with_key(service, "sk-admin").get(path).status_code == admin
        assert with_key(service, "wrong").get(path).status_code == 401


def test_admin_paths_are_403_without_an_admin_key(make_service):
    for service in (make_service(), make_service(api_key="sk-user")):
        message = error_of(asking(service, headers={"Authorization": "Bearer sk-user"}).get("/admin/drafters"), 403)[
            "message"
        ]
        assert "serving.admin_key" in message
    assert asking(make_service(admin_key="sk-admin")).get("/v1/models").status_code == 200
    assert asking(make_service(admin_key="sk-admin")).get("/admin/drafters").status_code == 401


async def test_keyring_polls_the_file_once_a_second(tmp_path, monkeypatch):
    file, now = tmp_path / "keys.yaml", [100.0]
    monkeypatch.setattr(keys_file.time, "monotonic", lambda: now[0])

    def write(secret):
        file.write_text(yaml.safe_dump([{"name": secret[3:], "key": secret}]))
        file.chmod(0o600)

    write("sk-first-1")
    ring = keys_file.Keyring(Settings(serving={"keys_file": file}).serving, lambda reason: None, file.with_name("copy"))
    for begun, secret in ((100.0, "sk-second-22"), (101.0, "sk-third-333")):
        write(secret)
        for later, name in ((0.999, None), (1.0, secret[3:])):
            now[0] = begun + later
            key = await ring.find(secret.encode())
            assert (key and key.name) == name
    assert ring.free == frozenset()
    assert not ring.has_administrator


READ = ["/v1/models", "/metrics", "/dashboard", "/dashboard/data", "/dashboard/versions"]


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Basic right", "right", "Bearer", "Bearer rightright", "Bearer ä"]
)
def test_every_path_but_health_is_401_without_a_valid_key(make_service, header):
    client = TestClient(create_app(make_service(api_key="right")))
    headers = {} if header is None else {"Authorization": header.encode()}
    for path in (*READ, "/dashboard/stream", "/v1/nothing"):
        response = client.get(path, headers=headers)
        if path == "/dashboard":
            assert response.status_code == 401, "with a login page"
        else:
            assert error_of(response, 401)["code"] == "invalid_api_key"
    assert client.get("/health").status_code == 200


def test_valid_key_opens_api_and_dashboard_offers_login(make_service):
    service = make_service(api_key="right")
    client = with_key(service, "right")
    assert [client.get(path).status_code for path in READ] == [200] * 5
    assert chat(service, "right").status_code == 200
    for path in ("/dashboard", "/"):
        login = asking(service).get(path)
        assert login.status_code == 401
        assert 'id="login"' in login.text
    assert asking(service).get("/dashboard/app.js").status_code == 200
