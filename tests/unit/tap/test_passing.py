"""Which headers go further than one connection."""

from __future__ import annotations

import pytest

from osd.tap.upstream import AddressError, Upstream, passing


def test_headers_of_the_connection_stay_and_all_others_pass_in_order():
    given = [
        (b"X-One", b"1"),
        (b"Connection", b"close, X-Named"),
        (b"x-named", b"2"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Set-Cookie", b"a"),
        (b"Set-Cookie", b"b"),
        (b"Keep-Alive", b"3"),
        (b"Upgrade", b"h2c"),
        (b"TE", b"trailers"),
        (b"Date", b"now"),
    ]
    assert passing(given) == [(b"X-One", b"1"), (b"Set-Cookie", b"a"), (b"Set-Cookie", b"b"), (b"Date", b"now")]
    assert passing([(b"Host", b"a"), (b"b", b"c")], frozenset({b"host"})) == [(b"b", b"c")]


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://a", "http://", "http://a?b=c", "http://me@a"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(AddressError):
        Upstream(url)


def test_the_address_may_be_that_of_the_api():
    assert Upstream("http://a:1/v1/").url == Upstream("http://a:1").url == "http://a:1"
