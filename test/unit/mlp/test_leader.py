from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from sglang_afd.errors import PeerLost
from sglang_afd.mlp.leader import find_leader


@contextmanager
def answering(info: object) -> Iterator[str]:
    """An HTTP server that says `info`, whatever it is asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(info).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def group(*boot_ids: str, port: int = 7000) -> dict[str, object]:
    return {
        "role": "mlp",
        "group": [
            {"rank": rank, "boot_id": boot_id, "exchange_address": f"tcp://0.0.0.0:{port + rank}"}
            for rank, boot_id in enumerate(boot_ids)
        ],
    }


def test_the_leader_is_the_one_whose_group_has_this_rank() -> None:
    with (
        answering({"role": "mlp", "state": "spare"}) as spare,
        answering(group("main", port=6000)) as lonely,
        answering(group("successor", "mine")) as leader,
    ):
        assert find_leader([spare, lonely, leader], "mine") == "tcp://127.0.0.1:7000"


def test_where_no_group_has_this_rank_every_address_is_named() -> None:
    loading = {"group": [{"rank": 1, "boot_id": "mine", "exchange_address": "ipc:///run/1"}]}
    with answering(loading) as url, answering([1]) as other, pytest.raises(PeerLost) as caught:
        find_leader([url, other], "mine")

    assert f"{url} does not serve as rank 0 of a group with this rank yet" in str(caught.value)
    assert f"{other}/server_info is not an MLP server's answer" in str(caught.value)


def test_the_environments_proxy_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setattr(urllib.request, "_opener", None)  # it remembers the environment

    with answering(group("main", "mine")) as url:
        assert find_leader([url], "mine") == "tcp://127.0.0.1:7000"
