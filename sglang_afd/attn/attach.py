"""Finds the MLP servers and attaches to them, again and again, in a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar
from urllib.parse import urlsplit

from sglang_afd.attn.status import LinkState, StatusBoard
from sglang_afd.config import check_exchange_address, split_urls
from sglang_afd.errors import AfdError, ConfigError, PeerLost, Refused, StallTimeout
from sglang_afd.protocol import auth
from sglang_afd.protocol.messages import Attached, StepIntent, Withdrawal
from sglang_afd.transport.addresses import replace_wildcard
from sglang_afd.transport.server_info import fetch_info
from sglang_afd.transport.zmq_link import LinkOptions

logger = logging.getLogger(__name__)

RETRY_S = 0.5
WATCH_S = 0.2
MOVE_S = 2.0  # between two looks whether other MLP servers are there
CLOSE_TIMEOUT_S = 10.0  # an attempt to attach takes its time to end


class GroupLink(Protocol):
    """What the attacher needs of a link, whichever way its rows travel."""

    @property
    def ranks(self) -> tuple[Attached, ...]:
        """See `Link`."""

    @property
    def epoch(self) -> int:
        """See `Link`."""

    @property
    def lost(self) -> str | None:
        """See `Link`."""

    @property
    def is_closed(self) -> bool:
        """See `ZmqLink`."""

    def announce(self, message: StepIntent | Withdrawal) -> None:
        """See `Link`."""

    def watch(self, timeout_s: float) -> bool:
        """See `ZmqLink`."""

    def mark_lost(self, reason: str) -> None:
        """See `Link`."""

    def close(self) -> None:
        """See `Link`."""

    def close_watch(self) -> None:
        """See `ZmqLink`."""


_Link = TypeVar("_Link", bound=GroupLink)


class Attacher(Generic[_Link]):
    """Keeps one link alive.

    The scheduler's thread takes the link inside `use()`, and waits there for another when it was
    lost; this class's own thread attaches, watches, attaches again, and closes what was lost as
    soon as no step uses it. A refusal ends the start-up, but not a server that has once been
    attached.

    Args:
        mlp_url: Where MLP rank 0 may be, with commas; "" to go where the router says.
        options: Of each link.
        board: Shows how it stands, and where the router says that rank 0 is.
        connect: Attaches to the ranks at some addresses.
    """

    def __init__(
        self,
        mlp_url: str,
        options: LinkOptions,
        board: StatusBoard,
        connect: Callable[[Sequence[str], LinkOptions], _Link],
    ) -> None:
        self._mlp_urls = split_urls(mlp_url)
        self._found_at = ""  # of these, or of the router's, where rank 0 was found last
        self._next_move_s = 0.0
        self._options = options
        self._board = board
        self._connect = connect
        self._link: _Link | None = None  # in use by the scheduler's thread
        self._fresh: _Link | None = None  # attached and not taken yet
        self._stalled_since_s = float("inf")  # when the link was lost; inf while attached
        self._loss = ""  # why it was lost; "" while attached
        self._refusal: AfdError | None = None
        self._has_started = False  # from then on a refusal is no reason to end
        self._dead: list[_Link] = []  # lost, and perhaps still used by a step
        self._in_use = threading.Lock()  # held during a step
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="afd-attach", daemon=True)

    def start(self) -> None:
        """Begin to attach."""
        self._thread.start()

    def close(self) -> None:
        """Say goodbye to the MLP servers and end the thread; outside `use()`."""
        self._is_closing.set()
        with self._lock:
            self._drop_link()
        self._thread.join(CLOSE_TIMEOUT_S)

    def wait_first(self, timeout_s: float) -> None:
        """Wait for the first attachment.

        Raises:
            Refused: An MLP server declined.
            ConfigError: The MLP servers do not fit together.
            PeerLost: Nothing was there within `timeout_s`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._fresh or self._refusal, timeout_s)
            if self._refusal is not None:
                raise self._refusal
            if self._fresh is None:
                raise PeerLost(
                    f"could not attach within --afd-attach-timeout {timeout_s:g} s: "
                    f"{self._board.read().reason}"
                )
            self._has_started = True

    @contextmanager
    def use(self) -> Iterator[None]:
        """Around each step of the scheduler's thread: no link is closed under it."""
        with self._in_use:
            yield

    def take(self, *, waiting_since_s: float, limit_s: float) -> _Link:
        """The link in force, inside `use()`; while there is none, wait for the next.

        Args:
            waiting_since_s: When the step began to wait; the stall timeout runs from there, or from
                the loss if that was earlier.
            limit_s: `time.monotonic()` at which the wait ends in any case.

        Raises:
            StallTimeout: No MLP servers are attached, and the deadline has passed.
        """
        with self._changed:
            if self._link is not None and self._link.lost is None:
                return self._link
            since_s = min(waiting_since_s, self._stalled_since_s)
            why = self._drop_link()
            deadline_s = min(since_s + self._options.stall_timeout_s, limit_s)
            left_s = max(0.0, deadline_s - time.monotonic())
            if not self._changed.wait_for(self._is_fresh_one_alive, left_s):
                raise StallTimeout(self._board.read().reason or why)
            self._link, self._fresh = self._fresh, None
            assert self._link is not None
            return self._link

    def take_now(self) -> _Link | None:
        """The link in force, inside `use()`, or None; does not wait."""
        with self._lock:
            if self._link is None or self._link.lost is not None:
                self._drop_link()
                self._link, self._fresh = self._fresh, None
            return self._link

    def hold(self) -> None:
        """Requests are held for another stall timeout from now on, unless attached."""
        with self._lock:
            if self._is_attached():
                return
            now_s = time.monotonic()
            self._board.update(
                state=LinkState.STALLED,
                stalled_since_s=min(now_s, self._stalled_since_s),
                held_until_s=now_s + self._options.stall_timeout_s,
            )

    def wait_attached(self, timeout_s: float) -> bool:
        """Outside `use()`: is a link there, after `timeout_s` at the latest?"""
        with self._changed:
            return self._changed.wait_for(self._is_attached, timeout_s)

    def _is_attached(self) -> bool:
        link = self._fresh or self._link
        return link is not None and link.lost is None

    def _is_fresh_one_alive(self) -> bool:
        # NOTE: it may have been lost before anybody took it. Where rows stay on the GPU a step that
        # began with such a link would find its slots detached, and compute without the experts.
        return self._fresh is not None and self._fresh.lost is None

    def _drop_link(self) -> str:
        """Close the link in force; returns why it is of no use any more."""
        link, self._link = self._link, None
        if link is None:
            return "no MLP server is attached"
        link.close()
        return link.lost or "closed"

    def _run(self) -> None:
        try:
            self._keep_attached()
        finally:
            if not self._is_closing.is_set():  # a bug of ours; say so instead of waiting for ever
                self._failed(ConfigError("the attaching thread ended; restart this server"))
                self._board.update(state=LinkState.DETACHED)

    def _keep_attached(self) -> None:
        while not self._is_closing.is_set():
            self._reap()
            try:
                link = self._connect(self._find(), self._options)
            except AfdError as error:
                self._failed(error)
                self._is_closing.wait(RETRY_S)
                continue
            self._attached(link)
            while link.watch(WATCH_S) and not self._is_closing.is_set():
                self._reap()
                if self._should_move():
                    link.mark_lost("the router has put this server to other MLP servers")
            self._lost(link)
        self._reap()

    def _find(self) -> list[str]:
        """Ask for the exchange address of every rank, where rank 0 may be, in order."""
        if self._mlp_urls:
            return self._find_at(self._mlp_urls)
        told = self._board.told.read()
        if not told.urls:
            why = f": {told.reason}" if told.reason else ""
            raise PeerLost(f"the router has named no MLP servers yet{why}")
        try:
            for url in told.urls:
                auth.require_secret_beyond_loopback(
                    url, self._options.secret, "the router's address of MLP rank 0"
                )
            return self._find_at(told.urls)
        except ConfigError as error:
            raise PeerLost(str(error)) from None  # the router may name others at any time

    def _find_at(self, urls: Sequence[str]) -> list[str]:
        failures: list[AfdError] = []
        for url in urls:
            try:
                addresses = self._addresses_at(url)
            except (ConfigError, PeerLost) as error:
                failures.append(error)
                continue
            self._found_at = url
            return addresses
        raise _together(failures)

    def _should_move(self) -> bool:
        """Does the router name other MLP servers than those in force, and are they all there?"""
        if self._mlp_urls:
            return False
        urls, now_s = self._board.told.read().urls, time.monotonic()
        if not urls or self._found_at in urls or now_s < self._next_move_s:
            return False
        self._next_move_s = now_s + MOVE_S
        try:
            self._find()
        except PeerLost as error:
            logger.info("the router names other MLP servers, which are not there yet: %s", error)
            return False
        return True

    def _addresses_at(self, url: str) -> list[str]:
        info = fetch_info(url)
        if info.role != "mlp":
            raise ConfigError(
                f"--afd-mlp {url} is not an MLP server; give the address of one started "
                f"with --role mlp"
            )
        if info.state == "spare":
            raise PeerLost(f"the MLP server at {url} is a spare that waits")
        if info.group is None:
            raise ConfigError(
                f"--afd-mlp {url} is MLP rank {info.ep_rank}; give the address of "
                f"rank 0, which knows the others"
            )
        if info.missing_ranks:
            missing = list(info.missing_ranks)
            raise PeerLost(f"MLP rank(s) {missing} of the group of {url} do not serve yet")
        host = urlsplit(url).hostname or ""
        for member in info.group:
            check_exchange_address("exchange address", member.exchange_address)
        addresses = [replace_wildcard(member.exchange_address, host) for member in info.group]
        for address in addresses:
            auth.require_secret_beyond_loopback(
                address, self._options.secret, "the exchange address"
            )
        return addresses

    def _attached(self, link: _Link) -> None:
        ranks = tuple(
            {
                "rank": answer.rank,
                "first_expert": answer.first_expert,
                "stop_expert": answer.stop_expert,
                "boot_id": answer.boot_id,
            }
            for answer in link.ranks
        )
        with self._changed:
            self._fresh = link
            self._stalled_since_s, self._loss = float("inf"), ""
            self._board.update(
                state=LinkState.READY,
                reason="",
                epoch=link.epoch,
                ranks=ranks,
                lost=(),
                num_attaches=self._board.read().num_attaches + 1,
            )
            self._changed.notify_all()
        logger.info("attached to %d MLP server(s), epoch %d", len(ranks), link.epoch)

    def _lost(self, link: _Link) -> None:
        reason, now_s = link.lost or "closed", time.monotonic()
        self._dead.append(link)
        with self._lock:
            if self._fresh is link:  # the scheduler never took it
                self._fresh = None
                link.close()
            if self._is_closing.is_set():
                return
            self._stalled_since_s, self._loss = now_s, reason
            self._board.update(
                state=LinkState.STALLED,
                reason=reason,
                epoch=0,
                ranks=(),
                lost=tuple(answer.boot_id for answer in link.ranks),
                num_losses=self._board.read().num_losses + 1,
                stalled_since_s=now_s,
                held_until_s=now_s + self._options.stall_timeout_s,
            )
        logger.warning("lost the MLP servers: %s; attaching again", reason)

    def _reap(self) -> None:
        for link in list(self._dead):
            if not link.is_closed and self._in_use.acquire(blocking=False):
                try:
                    link.close()
                finally:
                    self._in_use.release()
            if link.is_closed:
                link.close_watch()
                self._dead.remove(link)

    def _failed(self, error: AfdError) -> None:
        reason = f"{self._loss}; not attached again: {error}" if self._loss else str(error)
        if reason != self._board.read().reason:
            logger.warning("not attached: %s", error)
            self._board.update(reason=reason)
        if not self._has_started and isinstance(error, Refused | ConfigError):
            with self._changed:
                self._refusal = error
                self._changed.notify_all()


def _together(failures: list[AfdError]) -> AfdError:
    if len(failures) == 1:
        return failures[0]
    text = "; ".join(str(failure) for failure in failures)
    if all(isinstance(failure, ConfigError) for failure in failures):
        return ConfigError(text)
    return PeerLost(text)  # one of them may still come
