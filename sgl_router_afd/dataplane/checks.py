"""Whether a request's head is one that the router takes, beyond what the parser refuses (pure).

The parser refuses bare line feeds, folded lines, NUL, a length beside a chunked body, two lengths,
a transfer coding after chunked, and spaces before a colon. What is left is refused here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sgl_router_afd.dataplane.headers import (
    AUTHORIZATION,
    FRAMING,
    HOP_BY_HOP,
    REQUEST_ID,
    Names,
    line,
    without_named,
)
from sgl_router_afd.dataplane.request import Refusal, Request

MAX_LENGTH_DIGITS = 19
SCHEME = b"http://"
HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%!$&'()*+,;=-]*)(:[0-9]*)?")
PASSED_ON = frozenset({AUTHORIZATION, REQUEST_ID})
SPECIAL = Names(HOP_BY_HOP | FRAMING | PASSED_ON)  # all others go on as they are
ONCE = frozenset({b"content-length", b"expect", b"host", b"transfer-encoding", REQUEST_ID})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may be."""

    max_headers: int
    max_header_bytes: int
    max_body_bytes: int


def examine(request: Request, version: str, limits: Limits) -> Refusal | None:
    """Fill in what follows from the head; the answer is the reason to refuse it, if there is one.

    Args:
        request: Its method, target and headers are set.
        version: HTTP version, "1.1".
        limits: Of this router.
    """
    if version == "0.9":
        return _malformed("its first line names no HTTP version")
    if version not in ("1.1", "1.0"):
        return Refusal(505, f"got HTTP/{version}; this router speaks HTTP/1.1 and HTTP/1.0")
    if len(request.headers) > limits.max_headers:
        return Refusal(
            431,
            f"the request has {len(request.headers)} header fields and the router takes "
            f"{limits.max_headers}; send fewer, or start it with a larger --max-headers",
        )
    request.is_http_10 = version == "1.0"
    return _read_headers(request, limits) or _read_target(request)


def too_large(limits: Limits) -> Refusal:
    return Refusal(
        413,
        f"the request body is larger than the {limits.max_body_bytes} bytes that this router "
        "takes; send less, or start it with a larger --max-body-bytes",
    )


def too_long_a_head(limits: Limits) -> Refusal:
    return Refusal(
        431,
        f"the request's header is larger than the {limits.max_header_bytes} bytes that this "
        "router takes; send less, or start it with a larger --max-header-bytes",
    )


def _read_headers(request: Request, limits: Limits) -> Refusal | None:
    found: dict[bytes, bytes] = {}
    lines = request.lines
    for name, value in request.headers:
        special = SPECIAL[name]
        if not special or special in PASSED_ON:
            lines.append(line(name, value))
        if not special:
            continue
        if special not in found:
            found[special] = value.strip(b" \t")
        elif special in ONCE:
            return _malformed(f"it has two {name.decode()} fields")
        else:
            found[special] += b"," + value
    refusal = _read_framing(request, found, limits)
    if refusal is not None:
        return refusal
    host = found.get(b"host")
    if (host is None and not request.is_http_10) or not HOST.fullmatch(host or b""):
        return _malformed("it needs one Host field with a host and an optional port")
    if b"connection" in found:
        request.lines = without_named(lines, found[b"connection"])
    request.request_id = found.get(REQUEST_ID, b"")
    request.authorization = found.get(AUTHORIZATION, b"")
    if request.target.startswith(SCHEME):
        return _take_authority(request, host)
    return None


def _read_framing(request: Request, found: dict[bytes, bytes], limits: Limits) -> Refusal | None:
    coding, length = found.get(b"transfer-encoding"), found.get(b"content-length")
    if coding is not None:
        if coding.lower() != b"chunked" or length is not None or request.is_http_10:
            return _malformed("its only transfer coding can be chunked, and that in HTTP/1.1")
        request.is_chunked = True
    elif length is not None:
        if not length.isdigit() or len(length) > MAX_LENGTH_DIGITS:
            return _malformed("its Content-Length is no number")
        request.content_length = int(length)
        if request.content_length > limits.max_body_bytes:
            return too_large(limits)
    expected = found.get(b"expect")
    if expected is not None:
        if expected.lower() != b"100-continue":
            return Refusal(417, "the only expectation that this router meets is 100-continue")
        request.expects_continue = not request.is_http_10
    return None


def _take_authority(request: Request, host: bytes | None) -> Refusal | None:
    authority, slash, rest = request.target[len(SCHEME) :].partition(b"/")
    if host is not None and authority.lower() != host.lower():
        return _malformed("its target names another host than its Host field")
    request.target = b"/" + rest
    return None


def _read_target(request: Request) -> Refusal | None:
    if not request.target.startswith(b"/") or b"#" in request.target:
        return _malformed("its target is not a path")
    request.path = request.target.partition(b"?")[0]
    return None


def _malformed(what: str) -> Refusal:
    return Refusal(400, f"the request cannot be served: {what}")
