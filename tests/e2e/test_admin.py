"""Administration over HTTP, through Ray Serve's proxy."""

from __future__ import annotations

from collections.abc import Callable

from osd.admin.audit import AuditLog
from tests.e2e.conftest import ADMIN_KEY, Service


def test_an_operator_pins_a_domain_and_lets_it_go(service: Service, eventually: Callable[..., None]) -> None:
    def ask(action: str, key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return service.http.post(f"/admin/drafters/{action}", json={}, headers=headers).status_code

    assert [ask("pin", key) for key in ("wrong", ADMIN_KEY)] == [401, 200]
    eventually(lambda: service.data()["pinned"])
    assert [ask("unpin", ADMIN_KEY) for _ in range(2)] == [200, 409]
    eventually(lambda: not service.data()["pinned"])
    assert [(one["who"], one["from"], one["action"]) for one in AuditLog(service.settings.home_dir).last(3)] == [
        ("key serving.admin_key", "127.0.0.1", action) for action in ("pin", "unpin", "unpin")
    ]
