"""Talks to rank 0 for one server: reports to it, or waits as a spare until a rank is missing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import aiohttp
import msgspec

from sglang_afd.mlp.group import RENEW_S, MemberReport
from sglang_afd.mlp.place import Place
from sglang_afd.mlp.spare import Candidate, Claim, Lead, Seen, Wait, Watch
from sglang_afd.protocol import auth
from sglang_afd.registrar.told import Told
from sglang_afd.transport.server_info import MAX_INFO_BYTES

logger = logging.getLogger(__name__)

PROOF_HEADER = "X-Afd-Proof"
MEMBERS_PATH = "/afd/v1/members"
TIMEOUT_S = RENEW_S * 2
MAX_ANSWER_BYTES = 2000  # of rank 0 to a report; it is shown to people
NOT_THE_LEADER = 421  # HTTP's Misdirected Request
REFUSED = 409


class Outcome(Enum):
    """What became of one report."""

    ACCEPTED = auto()
    REFUSED = auto()  # by rank 0
    NOT_THERE = auto()  # nothing answers, or something that is not rank 0


@dataclass(frozen=True, slots=True)
class Answer:
    """To one report; `text` is for people."""

    outcome: Outcome
    text: str


class Membership:
    """One server's dealings with the others.

    Args:
        place: Changed here.
        urls: Where rank 0 may be, in order.
        secret: Proves that this server belongs to the group.
        on_rank: Told the rank to load, once, when a waiting server has got one.
        told: Where the router says that rank 0 is; asked where there are no `urls`.
    """

    def __init__(
        self,
        place: Place,
        urls: Sequence[str],
        secret: bytes,
        on_rank: Callable[[int], None],
        told: Callable[[], Told] = Told,
    ) -> None:
        self._place = place
        self._urls = list(urls)
        self._told = told
        self._secret = secret
        self._on_rank = on_rank
        self._has_news = asyncio.Event()

    def hurry(self) -> None:
        """The place has changed: report it now rather than at the next renewal."""
        self._has_news.set()

    async def wait_and_report(self, *, owns_rank_0: bool) -> None:
        """Of a spare, or of a rank 0 that another may have replaced; never returns as a member."""
        async with open_session() as session:
            await self._wait(session, owns_rank_0=owns_rank_0)
            self._on_rank(self._place.rank)
            if self._place.group is None:
                await self._keep_reporting(session)

    async def keep_reporting(self) -> None:
        """Of every other rank; never returns."""
        async with open_session() as session:
            await self._keep_reporting(session)

    async def _wait(self, session: aiohttp.ClientSession, *, owns_rank_0: bool) -> None:
        report = self._place.report
        candidate = Candidate(
            boot_id=report.boot_id,
            fingerprint=report.fingerprint,
            ep_size=report.ep_size,
            owns_rank_0=owns_rank_0,
        )
        watch = Watch(tuple(self._urls), candidate)
        while not await self.look(session, watch):
            await asyncio.sleep(RENEW_S)

    async def look(self, session: aiohttp.ClientSession, watch: Watch) -> bool:
        """Look around once, and act on it.

        Args:
            session: Of `open_session`.
            watch: Remembers what was seen before.

        Returns: Whether this server has got a rank.
        """
        answers = await asyncio.gather(*(_ask(session, url) for url in self._urls))
        match watch.decide(answers):
            case Wait(reason=reason):
                self._wait_because(reason)
                return False
            case Claim(leader_url=url, rank=rank):
                return await self._claim(session, url, rank)
            case Lead(is_successor=is_successor):
                logger.warning("nobody leads the group: this server becomes rank 0")
                self._place.lead(is_successor=is_successor)
                return True

    async def _claim(self, session: aiohttp.ClientSession, url: str, rank: int) -> bool:
        claim = msgspec.structs.replace(self._place.report, rank=rank, is_claim=True)
        answer = await self._report(session, url, claim)
        if answer.outcome is not Outcome.ACCEPTED:
            self._wait_because(answer.text)
            return False
        logger.warning("rank %d of the group of %s is missing: taking its place", rank, url)
        self._place.take(rank)
        self._prefer(url)
        return True

    def _wait_because(self, reason: str) -> None:
        if reason != self._place.reason:
            logger.info("waiting: %s", reason)
        self._place.wait(reason)

    async def _keep_reporting(self, session: aiohttp.ClientSession) -> None:
        said = ""
        while True:
            self._has_news.clear()
            answer = await self.report_to_any(session)
            if answer.text != said:
                logger.info("report to rank 0: %s", answer.text)
                said = answer.text
            self._place.refusal = answer.text if answer.outcome is Outcome.REFUSED else ""
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_news.wait(), RENEW_S)

    async def report_to_any(self, session: aiohttp.ClientSession) -> Answer:
        """Report once, to the first address that takes it.

        Begins with the one that accepted last, so that another that is away costs no lease.
        """
        answers = []
        told = self._told()
        urls = list(self._urls or told.urls)
        if not urls:
            why = f": {told.reason}" if told.reason else ""
            return Answer(Outcome.NOT_THERE, f"the router has not said where rank 0 is{why}")
        for url in urls:
            answer = await self._report(session, url, self._place.report)
            if answer.outcome is Outcome.ACCEPTED:
                self._prefer(url)
                return answer
            answers.append(answer)
        is_refused = any(answer.outcome is Outcome.REFUSED for answer in answers)
        outcome = Outcome.REFUSED if is_refused else Outcome.NOT_THERE
        return Answer(outcome, "; ".join(answer.text for answer in answers))

    def _prefer(self, url: str) -> None:
        if url in self._urls:
            self._urls.remove(url)
            self._urls.insert(0, url)

    async def _report(
        self, session: aiohttp.ClientSession, url: str, report: MemberReport
    ) -> Answer:
        body = msgspec.json.encode(msgspec.structs.replace(report, sent_at_s=time.time()))
        headers = {PROOF_HEADER: auth.prove(self._secret, "member", body).hex()}
        try:
            async with session.post(url + MEMBERS_PATH, data=body, headers=headers) as response:
                text = (await response.content.read(MAX_ANSWER_BYTES)).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError) as error:
            return Answer(Outcome.NOT_THERE, f"{url} is not reached: {error!r}")
        if response.status == 200:
            return Answer(Outcome.ACCEPTED, f"accepted by {url}")
        outcome = Outcome.REFUSED if response.status == REFUSED else Outcome.NOT_THERE
        return Answer(outcome, f"refused by {url}: {text}")


def open_session() -> aiohttp.ClientSession:
    """With the time that one question may take."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


async def _ask(session: aiohttp.ClientSession, url: str) -> Seen | None:
    try:
        async with session.get(url + "/server_info") as response:
            text = b""
            async for chunk in response.content.iter_any():
                text += chunk
                if len(text) > MAX_INFO_BYTES:
                    return None
        return msgspec.json.decode(text, type=Seen)
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError, RecursionError):
        return None
