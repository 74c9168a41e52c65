"""Which HTTP headers a relay passes on (pure)."""

from __future__ import annotations

from multidict import CIMultiDict, CIMultiDictProxy

# Source: RFC 9110 section 7.6.1, and RFC 2616 section 13.5.1 for the two Proxy-Auth ones.
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# The body is read whole before it is sent on, so its length is known and 100-continue is done.
SET_BY_THE_CLIENT_LIBRARY = frozenset({"host", "content-length", "expect"})

Headers = CIMultiDict[str] | CIMultiDictProxy[str]


def request_headers(received: Headers) -> CIMultiDict[str]:
    """The headers to send to a server for those that a client sent."""
    return _without(received, SET_BY_THE_CLIENT_LIBRARY)


def response_headers(received: Headers) -> CIMultiDict[str]:
    """The headers to send to a client for those that a server sent."""
    return _without(received, frozenset())


def _without(received: Headers, more: frozenset[str]) -> CIMultiDict[str]:
    named = {
        token.strip().lower()
        for value in received.getall("connection", [])
        for token in value.split(",")
    }
    dropped = HOP_BY_HOP | more | named
    return CIMultiDict(
        (name, value) for name, value in received.items() if name.lower() not in dropped
    )
