"""Protection of a service without a key against requests from web pages."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from serving.api.routes import create_app
from tests.unit.serving.answers import CHAT, asking, error_of


def ask(service, **headers):
    return asking(service).post("/v1/chat/completions", json=CHAT, headers=headers)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "LOCALHOST.", "[::1]:8000", "127.9.9.9"]
)
def test_loopback_service_without_key_accepts_loopback_names(service, host):
    assert ask(service, host=host).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "192.0.2.1", "[", ""])
def test_foreign_host_name_is_403(service, host):
    error = error_of(ask(service, host=host), 403)
    assert error["code"] == "host_not_allowed"
    assert "evil" not in error["message"]
    assert service.submitted == []
    assert asking(service).get("/health", headers={"host": host}).status_code == 200


def test_two_host_headers_are_403(service):
    response = asking(service).get("/v1/models", headers=[("host", "127.0.0.1"), ("host", "127.0.0.1")])
    assert error_of(response, 403)["code"] == "host_not_allowed"


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1.evil.example", "http://["])
def test_foreign_origin_is_403(service, origin):
    assert error_of(ask(service, origin=origin), 403)["code"] == "host_not_allowed"
    assert ask(service, origin="http://localhost:8000").status_code == 200


def test_configured_host_and_allowed_hosts_are_accepted(make_service):
    assert ask(make_service(host="127.0.0.2"), host="127.0.0.2").status_code == 200
    service = make_service(allowed_hosts=["llm.example.org"])
    assert ask(service, host="LLM.example.org:443", origin="https://llm.example.org").status_code == 200
    assert ask(service, host="localhost").status_code == 200
    error_of(ask(service, host="example.org"), 403)
    error_of(ask(make_service(api_key="k", allowed_hosts=["a.example"]), host="b.example"), 403)


@pytest.mark.parametrize("serving", [{"host": "::"}, {"host": "192.0.2.7"}, {"api_key": "k"}])
def test_public_address_or_key_accepts_any_host_name(make_service, serving):
    headers = {"authorization": "Bearer k", "host": "llm.example.org", "origin": "https://chat.example.org"}
    assert ask(make_service(**serving), **headers).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/json5", ""])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_body_without_json_content_type_is_415(service, path, kind):
    client = TestClient(create_app(service), base_url="http://127.0.0.1")
    response = client.post(path, content=b'{"prompt": "a"}', headers={"content-type": kind} if kind else {})
    assert error_of(response, 415)["code"] == "unsupported_media_type"
    assert service.submitted == []
    json = {"content-type": "Application/JSON; charset=utf-8"}
    assert client.post("/v1/completions", content=b'{"prompt": "a"}', headers=json).status_code == 200
