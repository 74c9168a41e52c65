"""Servers as the registrar sees them, and a router that answers what a test tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sglang_afd.config import Role
from sglang_afd.protocol.registration import (
    REGISTRATION_VERSION,
    Capacity,
    Condition,
    Decline,
    Lease,
    Leave,
    Load,
    ToRouter,
    decode_to_router,
    encode,
)
from sglang_afd.registrar.facts import Facts, Identity, Standing
from sglang_afd.registrar.registrar import Registrar
from sglang_afd.registrar.told import ToldPage

Answer = Lease | Decline | int  # a status other than 200 and 409


def silent_registrar() -> Registrar:
    """Of a server without a router that knows nothing of itself."""
    return Registrar(lambda: None, urls=(), secret=b"", told=ToldPage())


def lease_of(**changes: Any) -> Lease:
    """As the router gives them, but for `changes`."""
    fields: dict[str, Any] = {
        "version": REGISTRATION_VERSION,
        "lease_id": "router-1",
        "ttl_s": 6.0,
        "renew_s": 2.0,
        "group": "group-1",
        "epoch": 3,
        "mlp_urls": (),
        "reason": "",
        "is_draining": False,
        "may_stop": False,
    }
    return Lease(**fields | changes)


def loaded(num_running: int) -> Load:
    """The load of an attention server with so many requests."""
    return Load(
        num_running=num_running,
        num_waiting=0,
        free_kv_tokens=1000,
        tokens_per_s=0.0,
        expert_imbalance=0.0,
    )


class Server:
    """What one attention server knows of itself; tests change it."""

    def __init__(self) -> None:
        self.identity = Identity(
            server_id="attn-0",
            boot_id="boot-1",
            role=Role.ATTN,
            models=("tiny",),
            fingerprint="ab" * 32,
            num_experts=8,
            url="http://127.0.0.1:30000",
            exchange_address="",
            shard=None,
            peer_urls=(),
            capacity=Capacity(max_running_requests=4, kv_tokens=1000),
        )
        self.standing = Standing(
            condition=Condition.READY,
            reason="",
            attached=("mlp-boot",),
            lost=(),
            load=loaded(0),
        )

    def describe(self) -> Facts:
        return Facts(identity=self.identity, standing=self.standing)


class FakeRouter:
    """Takes every message in order and answers with what `answer` makes of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.messages: list[ToRouter] = []
        self.signatures: list[tuple[bytes, str]] = []  # each body, and what its header said
        self.answer: Callable[[ToRouter], Answer] = lambda message: lease_of()
        self._news = threading.Condition()

    def take(self, body: bytes, signature: str) -> Answer:
        message = decode_to_router(body)
        with self._news:
            self.messages.append(message)
            self.signatures.append((body, signature))
            self._news.notify_all()
        return 204 if isinstance(message, Leave) else self.answer(message)

    def wait_for(self, is_there: Callable[[list[ToRouter]], bool]) -> None:
        """Until what has come satisfies `is_there`; raises when it does not."""
        with self._news:
            if not self._news.wait_for(lambda: is_there(self.messages), 20):
                raise AssertionError(f"never came; what did: {self.messages}")

    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.messages]


@contextmanager
def fake_router(host: str = "127.0.0.1") -> Iterator[FakeRouter]:
    """A router on a port of its own, until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = router.take(body, self.headers.get("X-AFD-Signature", ""))
            if isinstance(answer, int):
                status, text = answer, b"" if answer == 204 else json.dumps("no").encode()
            else:
                status, text = 409 if isinstance(answer, Decline) else 200, encode(answer)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    class Listener(ThreadingHTTPServer):
        address_family = 10 if ":" in host else 2  # AF_INET6, AF_INET
        daemon_threads = True

    listener = Listener((host, 0), Handler)
    shown = f"[{host}]" if ":" in host else host
    router = FakeRouter(f"http://{shown}:{listener.server_address[1]}")
    thread = threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield router
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()
