"""The life of one request: let in, given to a server, answered.

In order: `start` - `on_admitted` - `choose` - `send` - `on_answer`, as often as bytes arrive -
`_finish`. Everything else is what can go wrong: no server is ready (`_wait_or_give_up`), a server
refuses the connection (`on_not_connected`) or breaks off (`on_server_lost`), the client leaves
(`on_client_lost`), the router declines (`refuse`).
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import unquote

from sgl_router_afd.control.prefix import PREFIX_BYTES, prefix_key
from sgl_router_afd.control.prefix import SEARCH_BYTES as PREFIX_SEARCH_BYTES
from sgl_router_afd.dataplane import counters
from sgl_router_afd.dataplane.answer import SERVER_SENT_EVENTS
from sgl_router_afd.dataplane.judge import (
    judge_body,
    judge_key,
    judge_path,
    no_model,
    unknown_model,
)
from sgl_router_afd.dataplane.request import Refusal
from sgl_router_afd.endpoints import MODEL, Target, find
from sgl_router_afd.replies import error_event

if TYPE_CHECKING:
    from sgl_router_afd.dataplane.answer import Answer
    from sgl_router_afd.dataplane.body import Said
    from sgl_router_afd.dataplane.client import ClientConnection
    from sgl_router_afd.dataplane.relay import Relay
    from sgl_router_afd.dataplane.request import Request
    from sgl_router_afd.dataplane.server import Server
    from sgl_router_afd.dataplane.servers import Route
    from sgl_router_afd.dataplane.upstream import UpstreamConnection

logger = logging.getLogger(__name__)

MAX_REPLAYS = 3  # of one request, which may be what its servers die of
NOT_REACHED = "those that serve cannot be reached"


class Exchange:
    """One request of one client, from its head to the last byte of its answer."""

    __slots__ = (
        "_answer",
        "_client",
        "_connection",
        "_failure",
        "_has_begun",
        "_held_until_s",
        "_is_admitted",
        "_is_framed",
        "_is_over",
        "_is_own",
        "_keeps_client",
        "_key",
        "_model",
        "_num_replays",
        "_relay",
        "_sent_s",
        "_server",
        "_tried",
        "is_sending",
        "request",
    )

    def __init__(self, relay: Relay, client: ClientConnection, request: Request) -> None:
        self.request = request
        self.is_sending = False  # a server gets the pieces of the body as they arrive
        self._relay = relay
        self._client = client
        self._server: Server | None = None  # which has it in flight
        self._connection: UpstreamConnection | None = None
        self._tried: set[int] = set()
        self._key = b""  # of the beginning of its prompt, for the policy
        self._num_replays = 0
        self._failure = ""  # what the last server that had it did wrong
        self._model: str | None = None  # that its body names
        self._held_until_s = 0.0
        self._sent_s = 0.0  # when its server had all of it, by loop time
        self._is_admitted = False
        self._has_begun = False  # the client has the head of the answer
        self._is_framed = False
        self._keeps_client = False
        self._answer: Answer | None = None
        self._is_own = False  # the control process answers it
        self._is_over = False

    def start(self) -> None:
        """Decide whose request it is."""
        request, relay = self.request, self._relay
        endpoint = find(request.path)
        refusal = judge_path(request.path, request.method, endpoint)
        target = Target.NOBODY if endpoint is None else endpoint.target
        if refusal is None and target is not Target.CONTROL:
            refusal = judge_key(relay.config.api_key, request.authorization)
        if refusal is None and target is Target.SERVER:
            said = request.said()
            self._model = said.name
            refusal = judge_body(request.path, said)
        if refusal is not None:
            self.turn_down(refusal)
        elif target is Target.CONTROL or (
            target is Target.MODELS and not relay.servers.is_one_model_served
        ):
            self._is_own = True
            self._give_to(relay.control)
        elif relay.is_draining:
            self.refuse(503, "this router is shutting down; send the request to another")
        else:
            if target is Target.MODEL:
                self._model = unquote(request.path[len(MODEL) :])
            elif relay.is_sticky:
                self._key = prefix_key(request.beginning(PREFIX_SEARCH_BYTES + PREFIX_BYTES))
            relay.admission.admit(self)

    def hear(self, said: Said) -> Refusal | None:
        """More of a body that is being sent was read; the answer is the reason to stop."""
        refusal = judge_body(self.request.path, said)
        if refusal is not None or said.name == self._model or self._is_own:
            return refusal
        if said.name is not None and self._model is None:
            servers = self._relay.servers
            if servers.route(said.name).is_of_nobody:
                return unknown_model(said.name, servers.models)
            self._model = said.name
        return None

    def on_admitted(self) -> None:
        self._is_admitted = True
        self._relay.budget.earn()
        self.choose()

    def choose(self) -> None:
        """Give the request to the server whose turn it is."""
        route = self._route()
        server = self._relay.servers.pick(route, key=self._key, excluding=self._tried)
        if server is None:
            self._wait_or_give_up(route)
        else:
            self._tried.add(server.slot)
            self._give_to(server)

    def send(self, connection: UpstreamConnection) -> None:
        """Write the request to a server, with as much of its body as is there."""
        request, server = self.request, self._server
        assert server is not None, "a connection belongs to a server"
        self._connection = connection
        connection.begin(self)
        self._sent_s = self._relay.loop.time()
        head = request.head_for(server.host)
        body = b"".join(request.pieces)
        if request.is_whole:
            connection.write(head + request.framed(body) + request.end_of_body)
        else:
            self.is_sending = True
            request.pieces.clear()
            connection.write(head + request.framed(body))
            self._client.steer_reading()

    def on_answer(self, answer: Answer, body: bytes) -> None:
        """Pass on what a server sent; its head waits for the first byte behind it."""
        if self._has_begun:
            data = b""
        elif body or answer.is_end:
            data = self._begin(answer)
        else:
            return
        if body:
            data += b"%x\r\n%b\r\n" % (len(body), body) if self._is_framed else body
            self._relay.counters.add_chunk(len(body))
        if not answer.is_end:
            self._client.write(data)
            return
        if self._is_framed:
            data += b"0\r\n\r\n"
        self._leave_server(counters.SERVED)
        self._release()  # before the client can know, and send its next request
        self._client.write(data)
        self._finish(keeps_client=self._keeps_client and self.request.is_whole)

    # The body of a request that is too large to wait for.

    def send_body(self, piece: bytes) -> None:
        if self._connection is not None:
            self._connection.write(self.request.framed(piece))

    def end_body(self) -> None:
        if self._connection is not None:
            self._sent_s = self._relay.loop.time()
            self._connection.write(self.request.end_of_body)

    # Back-pressure: whoever reads slowly slows down whoever sends.

    def on_server_full(self, is_full: bool) -> None:
        self._client.is_server_full = is_full
        self._client.steer_reading()

    def on_client_full(self, is_full: bool) -> None:
        if self._connection is not None:
            if is_full:
                self._connection.pause_reading()
            else:
                self._connection.resume_reading()

    # What can go wrong.

    def on_connected(self, server: Server, connection: UpstreamConnection) -> None:
        if self._is_over or server is not self._server or self._connection is not None:
            server.put_idle(connection)  # the request went elsewhere meanwhile
        else:
            self.send(connection)

    def on_not_connected(self, server: Server, reason: str) -> None:
        """Nothing was sent, so another server may be asked."""
        if self._is_over or server is not self._server or self._connection is not None:
            return
        self._leave_server(counters.FAILED)
        if self._is_own:
            self.refuse(502, f"the router's control process cannot be reached ({reason})")
        else:
            self._failure = f"attention server {server.url} refused the connection ({reason})"
            self._relay.report_unreachable(server, reason)
            self.choose()

    def on_server_lost(self, connection: UpstreamConnection, what: str) -> None:
        """The server broke off: start anew elsewhere, or tell the client."""
        server = self._server
        assert server is not None, "a connection belongs to a server"
        self._connection = None
        name = "the control process" if self._is_own else f"attention server {server.url}"
        self._failure = f"{name} {what}"
        if not self._has_begun and connection.was_closed_before and self._is_kept():
            server.connect(self)  # it never saw the request; idle connections may be closed
            return
        if not self._is_own:
            self._relay.report_broken(server, what)
        if self._has_begun:
            self._break_off()
        else:
            self._leave_server(counters.FAILED)
            self._replay_or_give_up()

    def on_server_degraded(self, server: Server) -> None:
        """Its server is in trouble: start anew elsewhere, or stay if there is nowhere."""
        if server is not self._server or self._has_begun or self._is_over:
            return
        if not self._route().has_other(self._tried) or self._why_no_replay():
            return
        if self._connection is not None:
            self._connection.abort()
        self._leave_server(0)
        self._replay()

    def on_held_too_long(self) -> None:
        why = f"none became ready within {self._relay.waiting.timeout_s:g} s"
        self._give_up(self._route(), why)

    def on_client_lost(self) -> None:
        """Stop the server's work for it."""
        if self._is_over:
            return
        self._is_over = True
        self._relay.counters.add(counters.ABORTED)
        if self._connection is not None:
            self._connection.abort()
        self._relay.waiting.leave(self)
        if not self._is_admitted and self._server is None:
            self._relay.admission.leave(self)
        self._release()

    def refuse(self, http_status: int, message: str) -> None:
        """Answer in a server's place."""
        self.turn_down(Refusal(http_status, message))

    def turn_down(self, refusal: Refusal) -> None:
        """The same, with all that an error may have."""
        self._release()
        request = self.request
        keeps = self._keeps_open() and request.is_whole
        self._client.answer(request, refusal, keeps_alive=keeps)
        self._finish(keeps_client=keeps)

    def refuse_running(self, refusal: Refusal) -> None:
        """Its body turned out bad when a server had a part of it."""
        if self._connection is not None:
            self._connection.abort()
        if self._has_begun:
            self._release()
            self._is_over = True
            self._client.break_off(b"")
        else:
            self.turn_down(refusal)

    def _route(self) -> Route:
        return self._relay.servers.route(self._model)

    def _wait_or_give_up(self, route: Route) -> None:
        relay = self._relay
        if not route.may_wait:
            self._give_up(route, "")
            return
        if not self._held_until_s:
            self._held_until_s = relay.loop.time() + relay.waiting.timeout_s
            relay.counters.add(counters.HOLDS)
        self._tried.clear()
        relay.waiting.enter(self, self._held_until_s)

    def _give_up(self, route: Route, why: str) -> None:
        if self._model is not None and route.is_of_nobody:
            self.turn_down(unknown_model(self._model, self._relay.servers.models))
            return
        if route.http_status == HTTPStatus.BAD_REQUEST:
            request = self.request
            is_all = request.is_whole or request.scanner is None or request.scanner.is_over
            self.turn_down(no_model(route.reason, 0 if is_all else request.num_body_bytes))
            return
        details = "; ".join(filter(None, (self._failure, why)))
        self.refuse(
            503,
            f"no attention server is ready{f' ({details})' if details else ''}: "
            f"{route.reason or NOT_REACHED}. Try again shortly; if this lasts, do what the reasons "
            "say, or read the servers' logs",
        )

    def _replay_or_give_up(self) -> None:
        logger.warning("%s before it answered a request", self._failure)
        why = self._why_no_replay()
        if why:
            self.refuse(
                502,
                f"{self._failure} before it answered; the request may have run in part and was not "
                f"sent to another server, since {why}: send it again",
            )
        else:
            self._replay()

    def _replay(self) -> None:
        self._num_replays += 1
        self._relay.counters.add(counters.REPLAYED)
        self.choose()

    def _why_no_replay(self) -> str:
        relay = self._relay
        if self._is_own:
            return "only the control process answers it"
        if not self._is_kept():
            return "its body is larger than --max-replay-body-bytes"
        if self._num_replays >= MAX_REPLAYS:
            return f"it was sent {1 + MAX_REPLAYS} times already"
        if relay.is_draining:
            return "this router is shutting down"
        route = self._route()
        if not route.has_other(self._tried) and not route.may_wait:
            return "no other server is ready"
        if not relay.budget.spend():
            return "--retry-budget is spent"
        return ""

    def _is_kept(self) -> bool:
        """Whether the whole body is here still."""
        return self.request.is_whole and not self.is_sending

    def _keeps_open(self) -> bool:
        return self.request.keeps_alive and not self._relay.is_draining

    def _give_to(self, server: Server) -> None:
        self._server = server
        server.exchanges.add(self)
        self._relay.count_server(server, counters.IN_FLIGHT)
        connection = server.take_idle()
        if connection is None:
            server.connect(self)
        else:
            self.send(connection)

    def _begin(self, answer: Answer) -> bytes:
        request, relay = self.request, self._relay
        self._has_begun = True
        self._answer = answer
        self._is_framed = answer.is_framed_for(request)
        self._keeps_client = self._keeps_open() and (
            self._is_framed or request.method == b"HEAD" or not answer.ends_with_connection
        )
        if not self._is_own:
            request.pieces.clear()
            now_s, server = relay.loop.time(), self._server
            relay.counters.add_first_byte(now_s - request.arrived_s)
            if answer.content_type.startswith(SERVER_SENT_EVENTS) and server is not None:
                relay.counters.add_first_token(server.slot, now_s - self._sent_s)
        relay.counters.add(counters.STATUS + min(answer.status, 999))
        return answer.head_for(request, is_framed=self._is_framed, keeps_alive=self._keeps_client)

    def _break_off(self) -> None:
        """End an answer whose server died so that no client can take it for a whole one."""
        message = f"{self._failure} inside its answer: send the request again"
        logger.warning("%s", message)
        self._relay.counters.add(counters.BROKEN)
        self._leave_server(counters.FAILED)
        self._release()
        event = b""
        if self._answer is not None and self._answer.takes_an_event:
            event = error_event(502, message)
            if self._is_framed:
                event = b"%x\r\n%b\r\n" % (len(event), event)
        self._is_over = True
        self._client.break_off(event)

    def _leave_server(self, count: int) -> None:
        """The server has the request no longer; `count` says how that ended."""
        server = self._server
        if server is not None:
            self._server = None
            self._connection = None
            server.exchanges.discard(self)
            self._relay.count_server(server, counters.IN_FLIGHT, -1)
            if count:
                self._relay.count_server(server, count)

    def _release(self) -> None:
        """Give back what the request holds."""
        self._leave_server(0)
        if self._is_admitted:
            self._is_admitted = False
            self._relay.admission.release()

    def _finish(self, *, keeps_client: bool) -> None:
        self._is_over = True
        self._client.on_answered(keeps_open=keeps_client)
