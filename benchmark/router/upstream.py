"""A fake attention server that costs next to nothing: what a router adds is what is left.

It answers the endpoints that routers ask for when they get to know a server, short requests, and
chat requests as a stream, one write for each token. The head of a stream leaves together with the
first token, as SGLang 0.5.17 sends it. The first words of the last message say how to answer, since
some routers drop fields that they do not know: `tokens=64 pace_us=20000`.

    python benchmark/router/upstream.py [--port 0] [--early-head] [--lose-a-token]

prints its port, and ends when its standard input does.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httptools
import uvloop

MODEL = "fake"
REGISTRATION = b"/afd/v1/registration"
STARTED_S = time.time()
report_numbers = itertools.count(1)
ASKED = re.compile(rb"tokens=(\d+) pace_us=(\d+)")
SHORT_BODY = json.dumps(
    {
        "text": " one short answer",
        "output_ids": [11, 12, 13],
        "meta_info": {
            "id": "0123456789abcdef0123456789abcdef",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": 16,
            "completion_tokens": 3,
            "cached_tokens": 0,
            "e2e_latency": 0.001,
        },
    }
).encode()
MODEL_INFO = {
    "model_path": MODEL,
    "served_model_name": MODEL,
    "tokenizer_path": MODEL,
    "is_generation": True,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
}
SERVER_INFO = MODEL_INFO | {
    "version": "0.5.17",
    "disaggregation_mode": "null",
    "dp_size": 1,
    "tp_size": 1,
    "max_total_num_tokens": 1_000_000,
    "internal_states": [{}],
}
ANSWERS: dict[bytes, object] = {
    b"/health": {},
    b"/health_generate": {},
    b"/server_info": SERVER_INFO,
    b"/get_server_info": SERVER_INFO,
    b"/model_info": MODEL_INFO,
    b"/get_model_info": MODEL_INFO,
    b"/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1}]},
    b"/v1/loads": {"loads": []},
    b"/get_load": [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}],
}


def main(argv: Sequence[str]) -> int:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument(
        "--early-head", action="store_true", help="send a stream's head before its first token"
    )
    parser.add_argument(
        "--lose-a-token", action="store_true", help="of every stream, to see that it is noticed"
    )
    options = parser.parse_args(argv)
    manner = Manner(has_early_head=options.early_head, num_lost=int(options.lose_a_token))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options.port, manner))
    return 0


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How streams are answered."""

    has_early_head: bool  # the head goes out before the first token
    num_lost: int  # tokens that every stream lacks


async def _serve(port: int, manner: Manner) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(0, lambda: None if sys.stdin.buffer.raw.read(4096) else ended.set())
    server = await loop.create_server(
        lambda: Connection(loop, manner), "127.0.0.1", port, backlog=4096
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await ended.wait()
    loop.remove_reader(0)
    server.close()


def _registration(report_number: int) -> bytes:
    """What an attention server of one MLP server, which the router does not know, tells it."""
    report = {
        "seq": report_number,
        "condition": "ready",
        "reason": "",
        "attached": ["fake-mlp"],
        "lost": [],
        "load": {
            "num_running": 0,
            "num_waiting": 0,
            "free_kv_tokens": 1_000_000,
            "tokens_per_s": 0.0,
            "expert_imbalance": 0.0,
        },
        "is_draining": False,
    }
    registration = {
        "type": "register",
        "version": 1,
        "server_id": "fake",
        "boot_id": str(os.getpid()),
        "started_at_s": STARTED_S,
        "sent_at_s": time.time(),
        "role": "attn",
        "models": [MODEL],
        "fingerprint": "ab" * 32,
        "num_experts": 4,
        "url": "http://127.0.0.1:1",
        "exchange_address": "",
        "shard": None,
        "peer_urls": ["http://127.0.0.1:2"],
        "capacity": {"max_running_requests": 4096, "kv_tokens": 1_000_000},
        "group": "",
        "epoch": 0,
        "report": report,
    }
    return json.dumps(registration).encode()


def _whole(status: bytes, body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 %s\r\nserver: fake\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (
        status,
        kind,
        len(body),
        body,
    )


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    base = {"id": "0123456789abcdef0123456789abcdef", "object": "chat.completion.chunk"}
    return (
        b"data: %s\n\n"
        % json.dumps(
            base | {"created": 1, "model": MODEL, "choices": [choice], "usage": None}
        ).encode()
    )


SHORT = _whole(b"200 OK", SHORT_BODY)
NOT_FOUND = _whole(b"404 Not Found", b'{"error":{"message":"the fake has no such path"}}')
WHOLE = {path: _whole(b"200 OK", json.dumps(body).encode()) for path, body in ANSWERS.items()}
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: fake\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
TOKEN = _chunk(_event({"content": " token"}))
LAST = _chunk(_event({"content": " token"}, "length")) + _chunk(b"data: [DONE]\n\n") + _chunk(b"")
CHAT_BODY = json.dumps(
    {
        "id": "0123456789abcdef0123456789abcdef",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": " one short answer"},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 16, "completion_tokens": 3, "total_tokens": 19},
    }
).encode()


class Connection(asyncio.Protocol):
    """One connection of a router or of the load generator."""

    def __init__(self, loop: asyncio.AbstractEventLoop, manner: Manner) -> None:
        self._loop = loop
        self._manner = manner
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, _error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # a router that tries HTTP/2 first
            self._transport.abort()

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path = self._path.partition(b"?")[0]
        if path == b"/generate":
            self._transport.write(SHORT)
        elif path == b"/v1/chat/completions":
            self._chat()
        elif path == REGISTRATION:
            self._transport.write(_whole(b"200 OK", _registration(next(report_numbers))))
        else:
            self._transport.write(WHOLE.get(path, NOT_FOUND))

    def _chat(self) -> None:
        asked = ASKED.search(self._body)
        if b'"stream":true' not in self._body.replace(b" ", b"") or asked is None:
            self._transport.write(_whole(b"200 OK", CHAT_BODY))
            return
        num_tokens, pace_s = int(asked[1]) - self._manner.num_lost, int(asked[2]) / 1e6
        if self._manner.has_early_head or not pace_s:
            self._transport.write(STREAM_HEAD)
        if pace_s:
            self._started_s, self._pace_s = self._loop.time(), pace_s
            self._num_tokens, self._num_sent = num_tokens, 0
            self._wait()
        else:
            for _ in range(num_tokens - 1):
                self._transport.write(TOKEN)
            self._transport.write(LAST)

    def _wait(self) -> None:
        due_s = self._started_s + (self._num_sent + 1) * self._pace_s
        self._timer = self._loop.call_at(due_s, self._send_token)

    def _send_token(self) -> None:
        self._num_sent += 1
        data = TOKEN if self._num_sent < self._num_tokens else LAST
        if self._num_sent == 1 and not self._manner.has_early_head:
            data = STREAM_HEAD + data
        self._transport.write(data)
        if self._num_sent < self._num_tokens:
            self._wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
