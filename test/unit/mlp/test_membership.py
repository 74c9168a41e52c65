from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from peers import SECRET
from registering import silent_registrar

from sglang_afd.mlp import membership as membership_module
from sglang_afd.mlp.board import Board
from sglang_afd.mlp.group import LEASE_S, Group, MemberReport
from sglang_afd.mlp.http import build_app
from sglang_afd.mlp.membership import (
    MEMBERS_PATH,
    REFUSED,
    Answer,
    Membership,
    Outcome,
    open_session,
)
from sglang_afd.mlp.place import NO_RANK, Place
from sglang_afd.mlp.spare import Candidate, Watch
from sglang_afd.registrar.told import ToldPage


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def report(rank: int, boot_id: str, address: str = "") -> MemberReport:
    return MemberReport(
        rank=rank,
        ep_size=2,
        boot_id=boot_id,
        fingerprint="ab",
        exchange_address=address,
        sent_at_s=0.0,
    )


def place(rank: int, boot_id: str, address: str = "") -> Place:
    member = report(rank, boot_id, address)
    info = {"role": "mlp", "ep_size": 2, "fingerprint": "ab", "boot_id": boot_id}
    return Place(info, member, Board(1))


def leader(clock: Clock) -> Place:
    """Rank 0 of a group whose rank 1 died a lease ago."""
    main = place(0, "main", "ipc:///run/0")
    main.group = Group(main.report, clock=clock)
    main.group.report(report(1, "dead", "ipc:///run/1"))
    clock.now_s += LEASE_S
    return main


@asynccontextmanager
async def serving(one: Place) -> AsyncIterator[str]:
    """The HTTP side of a server, at its address."""
    async with serving_app(build_app(Board(1), one, SECRET, silent_registrar())) as url:
        yield url


@asynccontextmanager
async def serving_app(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def test_of_two_spares_that_look_at_once_one_takes_the_rank() -> None:
    async def test() -> None:
        main, spares = leader(Clock()), [place(NO_RANK, "s1"), place(NO_RANK, "s2")]
        async with serving(main) as url, open_session() as session:
            looks = []
            for one in spares:
                candidate = Candidate(
                    boot_id=one.report.boot_id, fingerprint="ab", ep_size=2, owns_rank_0=False
                )
                membership = Membership(one, [url], SECRET, lambda rank: None)
                looks.append(membership.look(session, Watch([url], candidate)))

            got = await asyncio.gather(*looks)

        assert sorted(got) == [False, True]
        winner, loser = (spares[got.index(is_winner)] for is_winner in (True, False))
        assert winner.rank == 1 and winner.state()[0] == "loading"
        assert loser.rank == NO_RANK and loser.state()[0] == "spare"
        assert "rank 1 is already being loaded" in loser.reason or "is free" in loser.reason
        assert main.group is not None
        assert (main.group.loading(), main.group.missing()) == ([1], [1])

    run(test)


@pytest.mark.parametrize("first", ["nobody", "a spare"])
def test_a_report_goes_to_the_first_that_takes_it_and_stays_there(first: str) -> None:
    async def test() -> None:
        clock = Clock()
        main, other = leader(clock), leader(clock)
        spare = place(NO_RANK, "s1")
        member = place(1, "mine", "ipc:///run/mine")
        async with (
            serving(spare) as spare_url,
            serving(main) as main_url,
            serving(other) as other_url,
            open_session() as session,
        ):
            away = "http://127.0.0.1:1" if first == "nobody" else spare_url
            membership = Membership(member, [away, main_url, other_url], SECRET, lambda rank: None)

            answer = await membership.report_to_any(session)

            assert answer == Answer(Outcome.ACCEPTED, f"accepted by {main_url}")
            assert membership._urls == [main_url, away, other_url]
        assert main.group is not None and other.group is not None
        assert [one.boot_id for one in main.group.members()] == ["main", "mine"]
        assert other.group.missing() == [1]

    run(test)


def test_a_rank_is_listed_at_once_when_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "RENEW_S", 3600.0)

    async def test() -> None:
        main = leader(Clock())
        member = place(1, "mine")
        async with serving(main) as url:
            membership = Membership(member, [url], SECRET, lambda rank: None)
            task = asyncio.create_task(membership.keep_reporting())
            assert main.group is not None
            while not main.group.loading():
                await asyncio.sleep(0.01)
            assert main.group.missing() == [1]

            member.serve({}, "ipc:///run/mine")
            membership.hurry()
            async with asyncio.timeout(60):
                while main.group.missing():
                    await asyncio.sleep(0.01)
            task.cancel()

    run(test)


def test_a_rank_that_somebody_else_has_is_told_so_among_addresses_that_are_away() -> None:
    async def test() -> None:
        main = leader(Clock())
        assert main.group is not None
        main.group.report(report(1, "spare", "ipc:///run/s"))
        member = place(1, "returned", "ipc:///run/mine")
        async with serving(main) as url, open_session() as session:
            urls = [url, "http://127.0.0.1:1"]
            membership = Membership(member, urls, SECRET, lambda rank: None)

            answer = await membership.report_to_any(session)

        assert answer.outcome is Outcome.REFUSED
        assert "rank 1 is already served by ipc:///run/s" in answer.text
        assert "http://127.0.0.1:1 is not reached" in answer.text

    run(test)


def test_an_answer_that_is_no_text_is_an_answer_all_the_same() -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=REFUSED, body=b"\xff" * 100_000, content_type="text/plain")

    async def test() -> None:
        app = web.Application()
        app.add_routes([web.post(MEMBERS_PATH, refuse)])
        async with serving_app(app) as url, open_session() as session:
            membership = Membership(place(1, "mine"), [url], SECRET, lambda rank: None)

            answer = await membership.report_to_any(session)

        assert answer.outcome is Outcome.REFUSED
        assert len(answer.text) < 3000

    run(test)


def test_a_spare_with_another_secret_takes_nothing_and_says_why() -> None:
    async def test() -> None:
        main, spare = leader(Clock()), place(NO_RANK, "s1")
        candidate = Candidate(boot_id="s1", fingerprint="ab", ep_size=2, owns_rank_0=False)
        async with serving(main) as url, open_session() as session:
            membership = Membership(spare, [url], b"another secret" * 2, lambda rank: None)

            has_rank = await membership.look(session, Watch([url], candidate))

        assert not has_rank and spare.rank == NO_RANK
        assert "secret is not rank 0's" in spare.reason
        assert main.group is not None and main.group.loading() == []

    run(test)


def test_the_leaders_answer_shows_what_spares_decide_on() -> None:
    async def test() -> None:
        async with (
            serving(leader(Clock())) as url,
            open_session() as session,
            session.get(url + "/server_info") as response,
        ):
            info: dict[str, Any] = msgspec.json.decode(await response.read())

        assert info["group"] == [{"rank": 0, "boot_id": "main", "exchange_address": "ipc:///run/0"}]
        assert info["missing_ranks"] == info["claimable_ranks"] == [1]
        assert info["loading_ranks"] == []

    run(test)


def test_a_rank_without_an_address_reports_where_the_router_says_and_waits_until_then() -> None:
    async def test() -> None:
        main = leader(Clock())
        member = place(1, "mine", "ipc:///run/mine")
        page = ToldPage()
        async with serving(main) as url, open_session() as session:
            membership = Membership(member, [], SECRET, lambda rank: None, told=page.read)

            first = await membership.report_to_any(session)
            page.write(urls=(url,), reason="")
            second = await membership.report_to_any(session)

        assert first.outcome is Outcome.NOT_THERE
        assert "has not said where rank 0 is: no router has answered yet" in first.text
        assert second == Answer(Outcome.ACCEPTED, f"accepted by {url}")

    run(test)
