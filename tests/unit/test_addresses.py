"""Clients of a service on this machine follow no proxy variables."""

from __future__ import annotations

import pytest

from osd.addresses import url_of, uses_proxies


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000", "http://localhost:1/v1", "http://[::1]:8000", "HTTP://127.9.9.9"]
)
def test_loopback_is_reached_directly(url: str) -> None:
    assert not uses_proxies(url)


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "https://api.example.org/v1", "http://localhost.example.org"])
def test_other_hosts_are_reached_as_the_environment_says(url: str) -> None:
    assert uses_proxies(url)


@pytest.mark.parametrize(
    ("host", "url"),
    [("localhost", "http://localhost:80"), ("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80")],  # noqa: S104
)
def test_url_of_a_host_reaches_it_from_this_machine(host: str, url: str) -> None:
    assert url_of(host, 80) == url
