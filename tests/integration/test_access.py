"""The whole service with a file of keys: one is rotated, and operators act, while it runs."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import pytest
import yaml
from typer.testing import CliRunner

from osd.cli.app import app
from tests.command import osd, small, wait_until_it_answers
from tests.redis_servers import free_port

OPS = {"name": "ops", "key": "sk-ops-1", "may": ["administer"]}


def write(file: Path, *keys: dict[str, object]) -> None:
    file.write_text(yaml.safe_dump(list(keys)))
    file.chmod(0o600)


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_a_key_is_rotated_and_operators_act_without_a_restart(tiny_target, tmp_path, eventually):
    home, port, keys = tmp_path / "home", free_port(), tmp_path / "keys.yaml"
    write(keys, {"name": "app", "key": "sk-old-key", "tenant": "acme", "requests_per_minute": 1000}, OPS)
    with osd(home, "up", *small(tiny_target, port), "--set", f"serving.keys_file={keys}") as process:
        wait_until_it_answers(process, port)
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:

            def ask(path, secret, body=None):
                headers = {"Authorization": f"Bearer {secret}"}
                return http.get(path, headers=headers) if body is None else http.post(path, json=body, headers=headers)

            def complete(secret):
                return ask("/v1/completions", secret, {"prompt": "hello", "max_tokens": 4})

            first = complete("sk-old-key")
            assert first.status_code == 200
            assert first.headers["x-ratelimit-remaining-requests"] == "999"
            assert [ask("/metrics", secret).status_code for secret in ("sk-old-key", "sk-ops-1", "none")] == [
                403,
                200,
                401,
            ]
            write(keys, {"name": "app", "key": ["sk-old-key", "sk-new-key"], "requests_per_minute": 1000}, OPS)
            eventually(lambda: complete("sk-new-key").status_code == 200)
            assert complete("sk-old-key").status_code == 200
            write(keys, {"name": "app", "key": "sk-new-key", "requests_per_minute": 1000}, OPS)
            eventually(lambda: complete("sk-old-key").status_code == 401)
            left = int(complete("sk-new-key").headers["x-ratelimit-remaining-requests"])
            assert left < 997, "what was counted for the key stays"
            keys.write_text("- {name: app")
            eventually(
                lambda: (
                    "keys_refused" in [event["kind"] for event in ask("/dashboard/data", "sk-ops-1").json()["events"]]
                )
            )
            assert complete("sk-new-key").status_code == 200

            assert ask("/admin/drafters/pin", "sk-new-key", {}).status_code == 403
            assert ask("/admin/drafters/pin", "sk-ops-1", {}).json()["pinned"] is True
            assert ask("/admin/traces/purge", "sk-ops-1", {"request": "cmpl-1f"}).status_code == 404
    shown = CliRunner().invoke(app, ["audit", "--json"], env={"OSD_HOME": str(home)}).stdout
    assert [
        (one["who"], one["from"], one["action"], one["outcome"][:7]) for one in map(json.loads, shown.splitlines())
    ] == [
        ("key ops", "127.0.0.1", "pin", "done"),
        ("key ops", "127.0.0.1", "purge", "refused"),
    ]
