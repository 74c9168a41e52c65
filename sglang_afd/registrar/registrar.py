"""Keeps one server registered: a thread that looks at the server, and speaks when there is news."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from sglang_afd.errors import AfdError, PeerLost, ProtocolError
from sglang_afd.protocol.registration import FromRouter, Lease, ToRouter, encode
from sglang_afd.registrar.facts import Facts
from sglang_afd.registrar.post import post
from sglang_afd.registrar.speaker import Speaker
from sglang_afd.registrar.tenancy import Tenancy
from sglang_afd.registrar.told import ToldPage

logger = logging.getLogger(__name__)

DRAINING = "draining"  # the state that a server shows instead of ready
LOOK_S = 0.2  # between two looks at the server
LEAVE_S = 5.0  # the end of the process waits no longer

Post = Callable[[str, ToRouter, bytes], FromRouter | None]


class Registrar:
    """Without routers nothing is sent, and a router that asks is still answered.

    Args:
        describe: What the server knows of itself now; None while it does not know enough.
        urls: Of routers; the one that answered last is asked first.
        secret: Signs every message; empty without one.
        told: Shown where MLP rank 0 may be.
        send: One message to one router.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        describe: Callable[[], Facts | None],
        *,
        urls: Sequence[str],
        secret: bytes,
        told: ToldPage,
        send: Post = post,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._speaker = Speaker(describe)
        self._tenancy = Tenancy(self._speaker)
        self._urls = list(urls)
        self._secret = secret
        self._told = told
        self._send = send
        self._clock = clock
        self._wake = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="afd-registrar", daemon=True)

    def start(self) -> None:
        """Begin to register; once."""
        if self._urls and self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """Tell the router that this server ends, if one is there."""
        self._is_closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(LEAVE_S)

    def drain(self) -> None:
        """From now on every report says that this server was asked to end."""
        self._speaker.is_draining = True
        self._wake.set()

    @property
    def is_draining(self) -> bool:
        """By a signal, or because the router says so."""
        lease = self._lease()
        return self._speaker.is_draining or (lease is not None and lease.is_draining)

    @property
    def may_stop(self) -> bool | None:
        """Does the router need this server no more? None when no router knows that it drains."""
        lease = self._lease()
        return lease.may_stop if lease is not None and lease.is_draining else None

    def registration(self) -> bytes | None:
        """The body of a registration made now; None while too little is known."""
        registration = self._speaker.registration()
        return None if registration is None else encode(registration)

    def status(self) -> dict[str, Any] | None:
        """For people; None without routers."""
        if not self._urls:
            return None
        tenancy, lease, now_s = self._tenancy, self._lease(), self._clock()
        return {
            "url": self._urls[0],
            "is_registered": lease is not None,
            "lease_id": lease.lease_id if lease else "",
            "heard_ago_s": round(now_s - tenancy.heard_s, 3) if tenancy.lease else None,
            "group": self._speaker.group,
            "epoch": self._speaker.epoch,
            "reason": lease.reason if lease else "",
            "is_draining": lease.is_draining if lease else False,
            "may_stop": lease.may_stop if lease else False,
            "last_error": tenancy.last_error,
        }

    def turn(self) -> None:
        """Look once, and speak if there is something to say."""
        facts = self._speaker.describe()
        if facts is None:
            return
        message = self._tenancy.next_message(facts, self._clock())
        if message is None:
            return
        try:
            answer = self._to_any(message)
        except AfdError as error:
            self._tenancy.fail(str(error), self._clock())
            self._told.write(urls=(), reason=str(error))
            return
        if isinstance(answer, Lease):
            self._take(answer)
            return
        self._tenancy.decline(answer, self._clock())
        self._told.write(urls=(), reason=answer.message)

    def _take(self, lease: Lease) -> None:
        was_registered = self._tenancy.lease is not None
        if self._tenancy.take(lease, self._clock()):
            self._told.write(urls=lease.mlp_urls, reason=lease.reason)
        if not was_registered:
            where = f"group {lease.group}, epoch {lease.epoch}" if lease.group else "no group yet"
            logger.info("registered with the router at %s: %s", self._urls[0], where)

    def _to_any(self, message: ToRouter) -> FromRouter:
        """To the first router that answers, which is asked first from then on.

        Raises:
            AfdError: None does, or the first that does refuses the message.
        """
        failures = []
        for url in list(self._urls):
            try:
                answer = self._send(url, message, self._secret)
            except PeerLost as error:
                failures.append(str(error))
                continue
            self._urls.remove(url)
            self._urls.insert(0, url)
            if answer is None:
                raise ProtocolError(f"the router at {url} answers nothing to a registration")
            return answer
        raise PeerLost("; ".join(failures))

    def _lease(self) -> Lease | None:
        return self._tenancy.holds_at(self._clock())

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self.turn()
            except Exception:  # a bug of ours must not take the server from its router for good
                logger.exception("while registering with the router")
            self._wake.wait(LOOK_S)
            self._wake.clear()
        self.leave()

    def leave(self) -> None:
        """Say goodbye to the router that gave the lease."""
        lease, facts = self._tenancy.lease, self._speaker.describe()
        if lease is None or facts is None:
            return
        try:
            message = self._speaker.leave(facts.identity, lease.lease_id)
            self._send(self._urls[0], message, self._secret)
        except AfdError as error:
            logger.info("could not say goodbye: %s", error)
