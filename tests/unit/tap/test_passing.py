"""Forwarded headers and addresses of the upstream."""

from __future__ import annotations

import pytest

from osd.tap.upstream import AddressError, Upstream, end_to_end_headers


def test_connection_headers_are_removed_and_the_order_is_kept():
    headers = [
        (b"X-One", b"1"), (b"Connection", b"close, X-Named"), (b"x-named", b"2"), (b"Transfer-Encoding", b"chunked"),
        (b"Set-Cookie", b"a"), (b"Set-Cookie", b"b"), (b"Keep-Alive", b"3"), (b"Upgrade", b"h2c"), (b"TE", b"trailers"),
        (b"Date", b"now"),
    ]  # fmt: skip
    assert end_to_end_headers(headers) == [
        (b"X-One", b"1"),
        (b"Set-Cookie", b"a"),
        (b"Set-Cookie", b"b"),
        (b"Date", b"now"),
    ]
    assert end_to_end_headers([(b"Host", b"a"), (b"b", b"c")], frozenset({b"host"})) == [(b"b", b"c")]


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://a", "http://", "http://a?b=c", "http://me@a"])
def test_upstream_with_an_invalid_address_is_refused(url):
    with pytest.raises(AddressError):
        Upstream(url)


def test_upstream_address_may_end_with_v1():
    assert Upstream("http://a:1/v1/").url == Upstream("http://a:1").url == "http://a:1"
