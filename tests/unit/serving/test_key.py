from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from serving.api.routes import create_app
from tests.unit.serving.answers import CHAT, error_of

PATHS = ["/v1/models", "/metrics", "/dashboard", "/dashboard/data", "/v1/nothing"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Basic right", "right", "Bearer", "Bearer rightright", "Bearer ä"]
)
def test_without_the_key_every_path_but_health_is_401(make_service, path, header):
    client = TestClient(create_app(make_service(api_key="right")))
    headers = {} if header is None else {"Authorization": header.encode()}
    response = client.get(path, headers=headers)
    assert response.status_code == 401
    if path != "/dashboard":  # its 401 is the page that asks for the key
        assert error_of(response, 401)["code"] == "invalid_api_key"
    assert client.get("/health").status_code == 200


def test_with_the_key_everything_answers(make_service):
    client = TestClient(create_app(make_service(api_key="right")), headers={"Authorization": "Bearer right"})
    for path in PATHS[:-1]:
        assert client.get(path).status_code == 200
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
