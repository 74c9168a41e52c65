"""Requests and responses for relay tests, as bytes, by name.

`{case}` in a request's target is replaced by its name, by which the fake server finds it again.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

from raw_http import chunk, post
from raw_server import DONE, SSE_HEAD, event, whole

ODD_JSON = (
    '{ "prompt" :"h\\u00e9 \u00e9",\n\t"afd_hint":[1, 2.50e1,{}], "n":1.0, "n":2 }  '.encode()
)
EVERY_BYTE = bytes(range(256))
FIVE_MB = random.Random(5).randbytes(5 << 20)
PACKED = zlib.compress(b"x" * 100_000)[:-1] + b"\xff"


def chunked(target: str, *pieces: bytes, fields: str = "", end: bytes = b"0\r\n\r\n") -> bytes:
    """A request whose body is sent in these pieces, each framed by itself."""
    head = f"POST {target} HTTP/1.1\r\nHost: router\r\nTransfer-Encoding: chunked\r\n{fields}\r\n"
    return head.encode("latin-1") + b"".join(chunk(piece) for piece in pieces) + end


def line(text: str) -> bytes:
    """A request without a body: its first line."""
    return f"{text} HTTP/1.1\r\nHost: router\r\n\r\n".encode("latin-1")


def _with(fields: str) -> bytes:
    return post("/generate?case={case}", ODD_JSON, fields)


def _target(target: str) -> bytes:
    return post(target + "&case={case}", b"{}")


def _body(body: bytes, fields: str = "") -> bytes:
    return post("/generate?case={case}", body, fields)


def _chunked(*pieces: bytes, fields: str = "", end: bytes = b"0\r\n\r\n") -> bytes:
    return chunked("/generate?case={case}", *pieces, fields=fields, end=end)


JSON = "Content-Type: application/json\r\n"
PASSED_ON: dict[str, bytes] = {
    "generate": _with(JSON),
    "chat": post("/v1/chat/completions?case={case}", ODD_JSON, JSON),
    "completions": post("/v1/completions?case={case}", ODD_JSON, JSON),
    "messages": post("/v1/messages?case={case}", ODD_JSON, JSON),
    "count_tokens": post("/v1/messages/count_tokens?case={case}", ODD_JSON, JSON),
    "score": post("/v1/score?case={case}", ODD_JSON, JSON),
    "tokenize": post("/tokenize?case={case}", ODD_JSON, JSON),
    "detokenize": post("/v1/detokenize?case={case}", ODD_JSON, JSON),
    "models": line("GET /v1/models?case={case}"),
    "one_model": line("GET /v1/models/%6D?case={case}"),
    "responses": post("/v1/responses?case={case}", b'{"input": "a", "store": true}', JSON),
    "a_response_to_none": post("/v1/responses?case={case}", b'{"previous_response_id": null}'),
    "invocations": post("/invocations?case={case}", ODD_JSON, JSON),
    "vertex_generate": post("/vertex_generate?case={case}", ODD_JSON, JSON),
    "ollama_chat": post("/api/chat?case={case}", ODD_JSON, JSON),
    "ollama_generate": post("/api/generate?case={case}", ODD_JSON, JSON),
    "ollama_show": post("/api/show?case={case}", ODD_JSON, JSON),
    "ollama_tags": line("GET /api/tags?case={case}"),
    "a_model_by_name": _body(b'{"text": "a", "model": "m"}'),
    "a_model_in_escapes": _body(b'{"\\u006dodel": "\\u006D"}'),
    "the_last_of_two_models": _body(b'{"model": "x", "model": "m"}'),
    "a_model_deep_inside": _body(b'{"a": {"model": "x"}, "b": [{"model": "y"}]}'),
    "a_model_that_is_no_text": _body(b'{"model": 5}'),
    "a_default_model": _body(b'{"model": "default"}'),
    "a_model_beside_nan": _body(b'{"model": "m", "temperature": NaN}'),
    "a_model_behind_5_mb": _body(b'{"text": "' + b"x" * (5 << 20) + b'", "model": "m"}'),
    "a_model_before_5_mb_chunked": _chunked(
        b'{"mod', b'el":"m","text": "', *[b"y" * 70_001] * 75, b'"}'
    ),
    "model_info": line("GET /model_info?case={case}"),
    "get_model_info": line("GET /get_model_info?case={case}"),
    "empty_body": _body(b""),
    "no_body_and_no_length": line("POST /generate?case={case}"),
    "every_byte": _body(EVERY_BYTE),
    "a_request_as_the_body": _body(post("/generate", b"{}") * 3),
    "line_ends_as_the_body": _body(b"\r\n\r\n0\r\n\r\n"),
    "one_byte": _body(b"\x00"),
    "broken_utf_8": _body(b'{"text": "\xff\xfe\xc3"}'),
    "broken_json": _body(b'{"text": ', JSON),
    "packed_and_broken": _body(PACKED, "Content-Encoding: deflate\r\n"),
    "64_kib": _body(EVERY_BYTE * 256),
    "64_kib_and_one": _body(EVERY_BYTE * 256 + b"x"),
    "5_mb": _body(FIVE_MB),
    "5_mb_chunked": _chunked(*(FIVE_MB[at : at + 70_001] for at in range(0, 5 << 20, 70_001))),
    "one_chunk": _chunked(ODD_JSON),
    "many_small_chunks": _chunked(*(bytes([byte]) for byte in EVERY_BYTE)),
    "chunks_that_end_in_line_ends": _chunked(b"a\r\n", b"\r\n", b"0\r\n\r\n"),
    "an_empty_chunked_body": _chunked(),
    "chunk_extensions": _chunked(end=b'2;a=b;c="d e"\r\n{}\r\n0;last\r\n\r\n'),
    "a_chunk_size_in_capitals": _chunked(end=b"1A\r\n" + b"x" * 26 + b"\r\n0\r\n\r\n"),
    "a_chunk_size_with_zeros": _chunked(end=b"0002\r\n{}\r\n0000\r\n\r\n"),
    "chunked_and_packed": _chunked(PACKED, fields="Content-Encoding: deflate\r\n"),
    "x_fields": _with("X-Tenant: t 1\r\nx-afd-group: g\r\nX-SMG-Routing-Key: k\r\n"),
    "trace_fields": _with(
        "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\n"
        "tracestate: a=1,b=2\r\nbaggage: k=v;p\r\n"
    ),
    "a_request_id": _with("X-Request-Id: from the client\r\n"),
    "authorization": _with("Authorization: Bearer a.b-c_d==\r\n"),
    "cookies": _with("Cookie: a=1; b=2\r\nCookie: c=3\r\n"),
    "a_field_twice": _with("X-A: 1\r\nX-B: 2\r\nX-A: 3\r\nx-a: 1\r\n"),
    "an_empty_field": _with("X-Empty:\r\nX-Blank:   \r\n"),
    "spaces_around_a_value": _with("X-A:  \t a \t b\t \r\nX-B:b\r\n"),
    "a_long_field": _with(f"X-Long: {'l' * 4000}\r\n"),
    "sixty_fields": _with("".join(f"X-N{number}: {number}\r\n" for number in range(60))),
    "spelling_of_names": _with("x-lOwEr: 1\r\nX-UPPER: 2\r\nX_Under: 3\r\n"),
    "odd_names": _with("!#$%&'*+-.^_`|~: 1\r\n123: 2\r\n"),
    "bytes_above_127": _with("X-L: \xe9\xff \xc3\xa9\r\n"),
    "odd_values": _with('X-V: a:b;c,"d\\" e"=[f]{g}<h>|\\^`\r\n'),
    "an_odd_type": _with("Content-Type: application/x-odd; a=b; a=c\r\n"),
    "accept_fields": _with(
        "Accept: text/event-stream\r\nAccept: */*;q=0.1\r\nAccept-Encoding: br;q=0, zstd\r\n"
        "Accept-Language: de\r\n"
    ),
    "a_user_agent": _with("User-Agent: odd/1 (x; y)\r\n"),
    "proxy_fields": _with(
        "Via: 1.1 a\r\nX-Forwarded-For: 1.2.3.4\r\nForwarded: for=1.2.3.4\r\n"
        "X-Forwarded-Proto: https\r\n"
    ),
    "conditional_fields": _with('If-None-Match: "a"\r\nRange: bytes=0-1\r\nPriority: u=1, i\r\n'),
    "fields_of_the_hop": _with(
        "Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nTE: trailers\r\nKeep-Alive: timeout=5\r\n"
        "Proxy-Connection: keep-alive\r\n"
    ),
    "an_upgrade_that_is_declined": _with("Connection: Upgrade\r\nUpgrade: websocket\r\n"),
    "an_upgrade_to_http_2_that_is_declined": _with(
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    ),
    "http_1_0": b"POST /generate?case={case} HTTP/1.0\r\nContent-Length: 2\r\nX-A: 1\r\n\r\n{}",
    "http_1_0_kept": (
        b"POST /generate?case={case} HTTP/1.0\r\nHost: router\r\nConnection: keep-alive\r\n"
        b"Content-Length: 2\r\n\r\n{}"
    ),
    "expect_100": _with("Expect: 100-continue\r\n"),
    "a_query_with_escapes": _target("/generate?a=%2Fb%2f&c=d+e%20f&g=%C3%A9"),
    "a_query_with_broken_escapes": _target("/generate?a=%zz&b=%&c=%e9"),
    "a_query_with_odd_signs": _target('/generate?a[]=1&b={"x"}&c=d|e\\f^`<>'),
    "a_query_with_questions": _target("/generate??a=b?c&&d=&=e"),
    "a_long_query": _target("/generate?a=" + "q" * 4000),
    "a_host_with_a_port": (
        b"POST /generate?case={case} HTTP/1.1\r\nHost: Router.Example:80\r\n"
        b"Content-Length: 2\r\n\r\n{}"
    ),
}


def of_case(name: str) -> bytes:
    """A request of `PASSED_ON` with its name in its target."""
    return PASSED_ON[name].replace(b"{case}", name.encode(), 1)


@dataclass(frozen=True)
class Scripted:
    """A response: the pieces in which it is written, and whether the connection ends after it."""

    pieces: tuple[bytes, ...]
    ends: bool = False


def _answer(*pieces: bytes, ends: bool = False) -> Scripted:
    return Scripted(pieces, ends)


def _status(status: str, fields: str = "", body: bytes = b"{}") -> Scripted:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{fields}\r\n"
    return _answer(head.encode("latin-1") + body)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ANSWERS: dict[str, Scripted] = {
    "a_length": _answer(whole(b'{"text": "a"}')),
    "an_empty_body": _answer(whole(b"")),
    "every_byte": _answer(whole(EVERY_BYTE * 4)),
    "1_mb": _answer(whole(FIVE_MB[: 1 << 20])),
    "cut_in_odd_places": _answer(
        b"HTTP/1.",
        b"1 200 O",
        b"K\r\nContent-Le",
        b"ngth: 1",
        b"0\r",
        b"\n\r",
        b"\n01",
        b"23456789",
    ),
    "no_reason": _answer(b"HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\n{}"),
    "an_odd_reason": _status("200 Slow (d) \xe9 Down"),
    "created": _status("201 Created", "Location: /x\r\n"),
    "no_content": _answer(b"HTTP/1.1 204 No Content\r\nX-A: 1\r\n\r\n"),
    "not_modified": _answer(
        b'HTTP/1.1 304 Not Modified\r\nETag: "a"\r\nContent-Length: 100\r\n\r\n'
    ),
    "moved": _status("307 Temporary Redirect", "Location: http://elsewhere.invalid/\r\n"),
    "bad_request": _status("400 Bad Request", body=b'{"error": {"message": "too long"}}'),
    "unauthorized": _status("401 Unauthorized", "WWW-Authenticate: Bearer\r\n"),
    "unprocessable": _status("422 Unprocessable Entity"),
    "too_many": _status("429 Too Many Requests", "Retry-After: 7\r\n"),
    "an_error": _status("500 Internal Server Error"),
    "an_unknown_status": _status("499 Odd"),
    "fields_twice": _status("200 OK", "Set-Cookie: a=1\r\nX-A: 1\r\nSet-Cookie: b=2\r\n"),
    "spelling_of_names": _status("200 OK", "x-lOwEr: 1\r\nX-UPPER: 2\r\nx-request-id: r\r\n"),
    "odd_values": _status("200 OK", 'X-V: a:b;c,"d" \xe9\xff\r\nX-Empty:\r\nX-S:s\r\n'),
    "server_and_date": _status("200 OK", "Server: sglang\r\nDate: never\r\nVia: 1.1 a\r\n"),
    "a_long_field": _status("200 OK", f"X-Long: {'l' * 7000}\r\n"),
    "sixty_fields": _status("200 OK", "".join(f"X-N{n}: {n}\r\n" for n in range(60))),
    "a_packed_body": _status("200 OK", "Content-Encoding: gzip\r\n", PACKED),
    "fields_of_the_hop": _status(
        "200 OK", "Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=9\r\n"
    ),
    "chunks": _answer(
        CHUNKED + chunk(b"a\r\n") + chunk(EVERY_BYTE), chunk(b"0\r\n\r\n"), chunk(b"")
    ),
    "one_byte_chunks": _answer(CHUNKED + b"".join(chunk(b"x") for _ in range(300)) + chunk(b"")),
    "chunk_extensions": _answer(CHUNKED + b"2;a=b\r\n{}\r\n0;c\r\n\r\n"),
    "trailers": _answer(CHUNKED + chunk(b"{}") + b"0\r\nX-Trailer: 1\r\n\r\n"),
    "an_empty_chunked_body": _answer(CHUNKED + chunk(b"")),
    "events": _answer(SSE_HEAD, event("1"), event("2"), DONE),
    "events_at_once": _answer(SSE_HEAD + event("1") + event("2") + DONE),
    "an_event_in_pieces": _answer(SSE_HEAD, chunk(b"da"), chunk(b"ta: 1\n"), chunk(b"\n"), DONE),
    "events_until_the_end": _answer(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n",
        b"data: 1\n\n",
        b"data: [DONE]\n\n",
        ends=True,
    ),
    "a_body_until_the_end": _answer(b"HTTP/1.1 200 OK\r\nX-A: 1\r\n\r\n{", b"}", ends=True),
    "http_1_0": _answer(b"HTTP/1.0 200 OK\r\nX-A: 1\r\n\r\n{}", ends=True),
    "http_1_0_with_a_length": _answer(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}", ends=True),
    "closed_after": _answer(
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}", ends=True
    ),
    "a_100_first": _answer(b"HTTP/1.1 100 Continue\r\n\r\n", whole(b"{}")),
    "early_hints_first": _answer(
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + whole(b'{"a": 1}')
    ),
}


@dataclass(frozen=True)
class Refused:
    """Bytes that must not reach a server.

    `statuses` are the answers that a client may get to the first request; an empty one says that
    the connection may as well end without an answer.
    """

    data: bytes
    statuses: tuple[int, ...] = (400,)
    ends_early: bool = False  # the client closes its side after the bytes
    stays_open: bool = False  # the bytes were one whole request, so that another may follow


def _head(fields: bytes, body: bytes = b"", target: bytes = b"/generate?case=bad") -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: router\r\n%s\r\n%s" % (target, fields, body)


TE = b"Transfer-Encoding: chunked\r\n"
SMUGGLED = b"GET /generate?case=bad HTTP/1.1\r\nHost: router\r\n\r\n"
END = b"0\r\n\r\n"


def _chunk_body(body: bytes) -> bytes:
    return _head(TE, body)


def _first(text: bytes) -> bytes:
    return text + b"\r\nHost: router\r\nContent-Length: 2\r\n\r\n{}"


SILENT = (400, 0)  # a refusal, or the end of the connection
REFUSED: dict[str, Refused] = {
    # Two readers may see two different ends of the body.
    "length_and_chunks": Refused(_head(b"Content-Length: 5\r\n" + TE, END + SMUGGLED)),
    "chunks_and_length": Refused(_head(TE + b"Content-Length: 5\r\n", END + SMUGGLED)),
    "two_lengths": Refused(_head(b"Content-Length: 2\r\nContent-Length: 3\r\n", b"{}x")),
    "two_lengths_in_one": Refused(_head(b"Content-Length: 2, 3\r\n", b"{}x")),
    "the_same_length_in_one": Refused(_head(b"Content-Length: 2, 2\r\n", b"{}")),
    "a_signed_length": Refused(_head(b"Content-Length: +2\r\n", b"{}")),
    "a_negative_length": Refused(_head(b"Content-Length: -2\r\n", b"{}")),
    "a_length_in_hex": Refused(_head(b"Content-Length: 0x2\r\n", b"{}")),
    "a_length_with_a_space": Refused(_head(b"Content-Length: 0 2\r\n", b"{}")),
    "a_length_with_a_tail": Refused(_head(b"Content-Length: 2;\r\n", b"{}")),
    "an_empty_length": Refused(_head(b"Content-Length:\r\n", b"{}")),
    "a_length_over_64_bits": Refused(
        _head(b"Content-Length: 18446744073709551618\r\n", b"{}"), (400, 413)
    ),
    "a_length_of_5000_digits": Refused(
        _head(b"Content-Length: " + b"0" * 4999 + b"2\r\n", b"{}"), (400, 413, 431)
    ),
    "an_unknown_coding": Refused(_head(b"Transfer-Encoding: xchunked\r\n", END), (400, 501)),
    "identity": Refused(_head(b"Transfer-Encoding: identity\r\n", SMUGGLED), (400, 501)),
    "chunked_then_identity": Refused(
        _head(b"Transfer-Encoding: chunked, identity\r\n", END + SMUGGLED), (400, 501)
    ),
    "gzip_then_chunked": Refused(_head(b"Transfer-Encoding: gzip, chunked\r\n", END), (400, 501)),
    "chunked_twice": Refused(_head(TE + TE, END + SMUGGLED)),
    "chunked_in_quotes": Refused(_head(b'Transfer-Encoding: "chunked"\r\n', END), (400, 501)),
    "chunked_after_a_tab_of_another_kind": Refused(
        _head(b"Transfer-Encoding: \x0bchunked\r\n", END + SMUGGLED), (400, 501)
    ),
    "a_space_before_the_colon": Refused(_head(b"Transfer-Encoding : chunked\r\n", END + SMUGGLED)),
    "a_space_before_the_colon_of_a_length": Refused(_head(b"Content-Length : 2\r\n", b"{}")),
    "a_folded_coding": Refused(_head(b"Transfer-Encoding:\r\n chunked\r\n", END + SMUGGLED)),
    "a_folded_field": Refused(_head(b"X-A: 1\r\n 2\r\nContent-Length: 2\r\n", b"{}")),
    "chunks_under_http_1_0": Refused(
        b"POST /generate?case=bad HTTP/1.0\r\nHost: router\r\n" + TE + b"\r\n" + END + SMUGGLED
    ),
    # Bytes that end a line for some readers only.
    "a_bare_line_feed": Refused(_head(b"X-A: 1\nContent-Length: 2\r\n", b"{}")),
    "a_bare_carriage_return": Refused(_head(b"X-A: 1\rX-B: 2\r\nContent-Length: 2\r\n", b"{}")),
    "line_feeds_alone": Refused(
        b"POST /generate?case=bad HTTP/1.1\nHost: router\nContent-Length: 2\n\n{}"
    ),
    "a_nul_in_a_value": Refused(_head(b"X-A: 1\x002\r\nContent-Length: 2\r\n", b"{}")),
    "a_nul_in_a_name": Refused(_head(b"X-\x00A: 1\r\nContent-Length: 2\r\n", b"{}")),
    "a_control_sign_in_a_value": Refused(_head(b"X-A: 1\x012\r\nContent-Length: 2\r\n", b"{}")),
    "a_space_in_a_name": Refused(_head(b"X A: 1\r\nContent-Length: 2\r\n", b"{}")),
    "a_name_with_a_bracket": Refused(_head(b"X(A): 1\r\nContent-Length: 2\r\n", b"{}")),
    "a_name_above_127": Refused(_head(b"X-\xe9: 1\r\nContent-Length: 2\r\n", b"{}")),
    "a_line_without_a_colon": Refused(_head(b"garbage\r\nContent-Length: 2\r\n", b"{}")),
    "a_field_without_a_name": Refused(_head(b": 1\r\nContent-Length: 2\r\n", b"{}")),
    # Chunks.
    "a_chunk_size_of_letters": Refused(_chunk_body(b"zz\r\n{}\r\n" + END)),
    "a_negative_chunk_size": Refused(_chunk_body(b"-2\r\n{}\r\n" + END)),
    "a_chunk_size_with_0x": Refused(_chunk_body(b"0x2\r\n{}\r\n" + END)),
    "a_chunk_size_over_64_bits": Refused(_chunk_body(b"f" * 17 + b"\r\n{}\r\n" + END), (400, 413)),
    "an_empty_chunk_size": Refused(_chunk_body(b"\r\n{}\r\n" + END)),
    "a_chunk_size_after_a_space": Refused(_chunk_body(b" 2\r\n{}\r\n" + END)),
    "a_chunk_longer_than_its_size": Refused(_chunk_body(b"2\r\n{}x\r\n" + END)),
    "a_chunk_that_ends_in_a_line_feed": Refused(_chunk_body(b"2\r\n{}\n" + END)),
    "a_chunk_size_that_ends_in_a_line_feed": Refused(_chunk_body(b"2\n{}\r\n" + END)),
    "a_chunk_extension_with_a_line_feed": Refused(_chunk_body(b"2;a\nb\r\n{}\r\n" + END)),
    "a_chunk_extension_with_a_nul": Refused(_chunk_body(b"2;a\x00b\r\n{}\r\n" + END)),
    "a_malformed_trailer": Refused(_chunk_body(b"2\r\n{}\r\n0\r\nno colon\r\n\r\n")),
    # First lines.
    "no_version": Refused(_first(b"POST /generate?case=bad"), (400, 505)),
    "http_2": Refused(_first(b"POST /generate?case=bad HTTP/2.0"), (400, 505)),
    "http_9_9": Refused(_first(b"POST /generate?case=bad HTTP/9.9"), (400, 505)),
    "http_0_9": Refused(_first(b"POST /generate?case=bad HTTP/0.9"), (400, 505)),
    "a_version_with_a_tail": Refused(_first(b"POST /generate?case=bad HTTP/1.1x")),
    "a_version_of_another_protocol": Refused(_first(b"POST /generate?case=bad SHTP/1.1")),
    "a_method_in_small_letters": Refused(_first(b"post /generate?case=bad HTTP/1.1"), (400, 405)),
    "an_unknown_method": Refused(_first(b"FROB /generate?case=bad HTTP/1.1"), (400, 405, 501)),
    "a_space_in_the_target": Refused(_first(b"POST /generate?case=bad x HTTP/1.1")),
    "a_control_sign_in_the_target": Refused(_first(b"POST /generate?case=bad\x01 HTTP/1.1")),
    "a_nul_in_the_target": Refused(_first(b"POST /generate?case=bad\x00 HTTP/1.1")),
    "no_target": Refused(_first(b"POST HTTP/1.1")),
    "a_target_without_a_slash": Refused(_first(b"POST generate?case=bad HTTP/1.1"), (400, 404)),
    "a_tunnel": Refused(_first(b"CONNECT generate:443 HTTP/1.1"), (400, 404, 405, 501)),
    "a_star": Refused(_first(b"OPTIONS * HTTP/1.1"), (400, 404, 405)),
    "an_upgrade_to_http_2": Refused(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 405, 505, 0)),
    "a_tls_hello": Refused(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"r" * 100, SILENT),
    "garbage": Refused(random.Random(6).randbytes(400), SILENT),
    "no_host": Refused(b"POST /generate?case=bad HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"),
    "two_hosts": Refused(_head(b"Host: other\r\nContent-Length: 2\r\n", b"{}")),
    "a_host_that_is_none": Refused(
        b"POST /generate?case=bad HTTP/1.1\r\nHost: a b/c@d\r\nContent-Length: 2\r\n\r\n{}"
    ),
    # Too much.
    "a_field_of_100_kb": Refused(
        _head(b"X-A: " + b"a" * 100_000 + b"\r\nContent-Length: 2\r\n", b"{}"), (400, 431)
    ),
    "a_name_of_100_kb": Refused(
        _head(b"X-" + b"a" * 100_000 + b": 1\r\nContent-Length: 2\r\n", b"{}"), (400, 431)
    ),
    "ten_thousand_fields": Refused(
        _head(b"X-A: 1\r\n" * 10_000 + b"Content-Length: 2\r\n", b"{}"), (400, 431)
    ),
    "a_target_of_100_kb": Refused(
        _head(b"Content-Length: 2\r\n", b"{}", b"/generate?case=bad&" + b"a" * 100_000),
        (400, 414, 431),
    ),
    "trailers_of_4_mb": Refused(
        _chunk_body(b"2\r\n{}\r\n0\r\n" + b"X-A: 1\r\n" * 500_000 + b"\r\n"), (400, 413, 431)
    ),
    "a_chunk_extension_of_4_mb": Refused(
        _chunk_body(b"2;" + b"a" * 4_000_000 + b"\r\n{}\r\n" + END), (400, 413, 431)
    ),
    "a_length_over_the_limit": Refused(_head(b"Content-Length: 999999999999\r\n", b"{}"), (413,)),
    # Cut.
    "half_a_first_line": Refused(b"POST /generate?case=bad HT", SILENT, ends_early=True),
    "half_a_head": Refused(
        b"POST /generate?case=bad HTTP/1.1\r\nHost: rou", SILENT, ends_early=True
    ),
    "half_a_body": Refused(_head(b"Content-Length: 20\r\n", b"{}"), SILENT, ends_early=True),
    "half_a_chunk": Refused(_chunk_body(b"20\r\n{}"), SILENT, ends_early=True),
    "no_last_chunk": Refused(_chunk_body(b"2\r\n{}\r\n"), SILENT, ends_early=True),
    "a_large_body_that_turns_bad": Refused(
        _chunk_body(chunk(FIVE_MB[: 3 << 20]) + b"zz\r\n{}\r\n" + END)
    ),
    "a_large_body_that_is_cut": Refused(
        _head(b"Content-Length: 5242880\r\n", FIVE_MB[: 3 << 20]), SILENT, ends_early=True
    ),
    # Well-formed, and not for a server.
    "an_unknown_path": Refused(post("/flush_cache?case=bad"), (404,)),
    "no_path": Refused(post("/?case=bad"), (404, 405)),
    "a_path_through_another": Refused(post("/generate/../flush_cache?case=bad"), (400, 404)),
    "a_path_with_two_slashes": Refused(post("//generate?case=bad"), (400, 404)),
    "a_path_with_an_escaped_slash": Refused(post("/v1%2Fcompletions?case=bad"), (400, 404)),
    "a_path_of_the_servers_own": Refused(post("/afd/v1/status?case=bad"), (404, 405)),
    "a_method_of_another_endpoint": Refused(line("GET /generate?case=bad"), (405,)),
    "a_deletion": Refused(line("DELETE /v1/models?case=bad"), (405,)),
    "an_embedding": Refused(post("/v1/embeddings?case=bad"), stays_open=True),
    "a_speech": Refused(post("/v1/audio/transcriptions?case=bad"), stays_open=True),
    "a_classification": Refused(post("/classify?case=bad"), stays_open=True),
    "an_earlier_response": Refused(line("GET /v1/responses/resp_1?case=bad"), (404,)),
    "a_cancelled_response": Refused(post("/v1/responses/resp_1/cancel?case=bad"), (404,)),
    "a_response_to_an_earlier_one": Refused(
        post("/v1/responses?case=bad", b'{"previous_response_id": "resp_1"}'), stays_open=True
    ),
    "a_response_in_the_background": Refused(
        post("/v1/responses?case=bad", b'{"background": true}'), stays_open=True
    ),
    "an_unknown_model": Refused(post("/generate?case=bad", b'{"model": "x"}'), (404,)),
    "an_unknown_model_in_utf_16": Refused(
        post("/generate?case=bad", '{"model": "x"}'.encode("utf-16")), (404,)
    ),
    "an_unknown_model_beside_nan": Refused(
        post("/generate?case=bad", b'{"a": NaN, "model": "x"}'), (404,)
    ),
    "an_unknown_model_behind_another": Refused(
        post("/generate?case=bad", b'{"model": "m", "model": "x"}'), (404,)
    ),
    "an_unknown_model_in_a_path": Refused(line("GET /v1/models/x?case=bad"), (404,)),
    "an_unknown_model_behind_5_mb": Refused(
        post("/generate?case=bad", b'{"text": "' + b"x" * (5 << 20) + b'", "model": "x"}'), (404,)
    ),
    "two_models_around_5_mb": Refused(
        post(
            "/generate?case=bad",
            b'{"model": "m", "text": "' + b"x" * (5 << 20) + b'", "model": "n"}',
        )
    ),
    "another_expectation": Refused(
        _head(b"Expect: 200-ok\r\nContent-Length: 2\r\n", b"{}"), (417,)
    ),
}
