from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from router_api import ServedApi, serving
from router_servers import OTHER, attn, mlp


class AttentionServer:
    """Answers GET /v1/models as SGLang does."""

    def __init__(self, body: bytes, status: int = 200) -> None:
        self.seen: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.seen.append(self.headers["Authorization"])
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever, args=(0.01,))

    @contextmanager
    def running(self) -> Iterator[AttentionServer]:
        self._thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


def card(name: str) -> bytes:
    return (
        b'{"object":"list","data":[{"id":"%b","object":"model","created":7,"owned_by":"sglang",'
        b'"root":"%b","parent":null,"max_model_len":4096,"new":1}]}'
        % (name.encode(), name.encode())
    )


def join(api: ServedApi, tiny_url: str, big_url: str) -> None:
    one, two = mlp("mlp-0"), mlp("mlp-x", fingerprint=OTHER)
    api.join(
        one,
        two,
        attn("attn-0", url=tiny_url).attach(one),
        attn("attn-x", url=big_url, fingerprint=OTHER, models=("big",)).attach(two),
    )


def test_models_of_all_groups_are_in_one_list_as_their_servers_tell_them() -> None:
    with (
        AttentionServer(card("tiny")).running() as tiny,
        AttentionServer(card("big")).running() as big,
        serving(api_key="sk-1") as api,
    ):
        join(api, tiny.url, big.url)
        reply = api.ask("GET", "/v1/models", headers={"Authorization": "Bearer sk-1"})

    data = reply.json["data"]
    assert reply.json["object"] == "list"
    assert [(one["id"], one["max_model_len"], one["created"]) for one in data] == [
        ("tiny", 4096, 7),
        ("big", 4096, 7),
    ]
    assert tiny.seen == big.seen == ["Bearer sk-1"]


def test_a_model_whose_server_does_not_tell_is_listed_by_its_name() -> None:
    with (
        AttentionServer(b"no json").running() as tiny,
        AttentionServer(b"{}", 500).running() as big,
        serving() as api,
    ):
        join(api, tiny.url, big.url)
        data = api.ask("GET", "/v1/models").json["data"]

    assert [(one["id"], one["max_model_len"]) for one in data] == [("tiny", None), ("big", None)]


def test_a_router_without_servers_has_no_models() -> None:
    with serving() as api:
        reply = api.ask("GET", "/v1/models")

    assert reply.json == {"object": "list", "data": []}
