"""The status page in a real browser: what it shows of a fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from page_scenes import MODEL, Ready, answer_of, empty, hostile, many, troubled

if TYPE_CHECKING:
    from conftest import Page

EVIL = "<img src=x onerror=window.ran=1>"
BOXES = (
    "[...document.querySelectorAll('.tile, .group, .server, .panel, .bar, .value, .speeds span')]"
    ".map((one) => { const box = one.getBoundingClientRect();"
    " return [box.x, box.y, box.width, box.height].map(Math.round).join(' '); }).join('; ')"
)


def shown(page: Page) -> Page:
    """The page with the server's answer drawn."""
    page.open()
    page.until("!document.getElementById('view').hidden")
    return page


def pairs(page: Page, kind: str) -> list[str]:
    """Who is joined by lines of a kind."""
    found = page.ask(
        f"[...document.querySelectorAll('.picture .wires .{kind}')]"
        ".map(({ dataset }) => `${dataset.from} ${dataset.to}`).sort()"
    )
    return list(found)


def card(server_id: str) -> str:
    return f'.server[data-server="{server_id}"]'


def test_a_ready_group_shows_who_is_attached_to_whom_and_its_load(page: Page) -> None:
    page.server.answer = Ready().step()

    shown(page)

    assert page.text(".group-head .state") == "ready"
    assert page.text(".group-why") == "2 of 2 attention servers serve"
    assert MODEL in page.text(".group-head .facts")
    assert page.texts(".servers .state") == ["serving"] * 4
    assert pairs(page, "attached") == [
        "attn-0 mlp-0",
        "attn-0 mlp-1",
        "attn-1 mlp-0",
        "attn-1 mlp-1",
    ]
    assert "attn-1 is attached to mlp-0" in page.ask(
        "document.querySelector('.picture .wires').getAttribute('aria-label')"
    )
    assert page.texts(f"{card('attn-0')} .meters li") == [
        "running\n30 of 64",
        "waiting\n1",
        "KV use\n67 %",
    ]
    assert page.text(f"{card('attn-0')} .speeds") == "1239 tokens/s\n38 ms to first token"
    assert "experts 0\u20133, rank 0 of 2" in page.text(card("mlp-0"))
    assert page.text('[data-tile="tokens"] .number') == "2850 tokens/s"
    assert page.text('[data-tile="ttft"] .number') == "38 ms mean"
    assert page.text('[data-tile="imbalance"] .number') == "1.77 \u00d7 the mean"
    assert page.text('[data-tile="requests"] .number') == "71 in this router"
    assert page.problems == []


def test_lines_end_at_the_cards_that_they_join(page: Page) -> None:
    page.server.answer = Ready().step()

    shown(page)

    page.until("document.querySelectorAll('.picture .wires .attached').length == 4")
    gaps = page.ask(
        """[...document.querySelectorAll('.picture .wires .attached')].map((line) => {
          const side = (name) => document.querySelector(`.server[data-server="${name}"]`)
            .getBoundingClientRect();
          const at = (length) => line.getPointAtLength(length)
            .matrixTransform(line.getScreenCTM());
          const [from, to] = [side(line.dataset.from), side(line.dataset.to)];
          const [first, last] = [at(0), at(line.getTotalLength())];
          const isBeside = first.y > from.top && first.y < from.bottom
            && last.y > to.top && last.y < to.bottom;
          return isBeside ? Math.abs(first.x - from.right) + Math.abs(last.x - to.left) : 1e9;
        })"""
    )
    assert len(gaps) == 4
    assert max(gaps) < 1


def test_trouble_is_told_by_shape_word_and_reason(page: Page) -> None:
    page.server.answer = answer_of(troubled())

    shown(page)

    shapes = page.ask(
        "Object.fromEntries([...document.querySelectorAll('.server')].map((one) =>"
        " [one.dataset.server, [one.querySelector('use').getAttribute('href'),"
        " one.querySelector('.state').innerText]]))"
    )
    assert shapes == {
        "attn-0": ["#shape-good", "serving"],
        "attn-1": ["#shape-trouble", "degraded"],
        "attn-2": ["#shape-wait", "waiting"],
        "attn-3": ["#shape-drain", "draining"],
        "mlp-0": ["#shape-good", "serving"],
        "mlp-1": ["#shape-good", "serving"],
        "no attention server": ["#shape-apart", "not there"],
        "mlp-big-0": ["#shape-good", "serving"],
        "rank 1 of 4": ["#shape-apart", "not there"],
        "rank 2 of 4": ["#shape-apart", "not there"],
        "rank 3 of 4": ["#shape-apart", "not there"],
        "attn-other": ["#shape-apart", "in no group"],
        "mlp-spare": ["#shape-apart", "in no group"],
    }
    assert page.text(f"{card('attn-1')} .why") == "stalled: waits for mlp-1 with 31 requests"
    assert "lost mlp-1: no heartbeat for 1.2 s" in page.text(f"{card('attn-1')} .peers")
    assert "serves another model" in page.text(f"{card('attn-other')} .why")
    assert "connection refused" in page.text("#unheard")
    assert pairs(page, "attached") == [
        "attn-0 mlp-0",
        "attn-0 mlp-1",
        "attn-1 mlp-0",
        "attn-3 mlp-0",
        "attn-3 mlp-1",
    ]
    assert pairs(page, "lost") == ["attn-1 mlp-1"]
    assert page.count(".picture .wires .cross") == 1
    assert pairs(page, "apart") == ["attn-2 mlp-0", "attn-2 mlp-1"]
    assert page.texts(".group-head .state") == ["ready", "forming"]
    assert "rank 1, 2, 3 is not there" in page.texts(".group-why")[1]
    last, before = page.texts(".events span")[:2]
    assert last == "attn-1 is degraded: stalled: waits for mlp-1 with 31 requests"
    assert before.startswith("attn-1 reports that it lost mlp-1")
    assert page.problems == []


def test_nothing_moves_when_only_numbers_change(page: Page) -> None:
    scene = Ready()
    page.server.answer = scene.answer_with(running=5, waiting=0, tokens_per_s=9.5, ttft_s=0.0084)
    shown(page)
    before = page.ask(BOXES)

    page.server.answer = scene.answer_with(
        running=64, waiting=120, tokens_per_s=12345.6, ttft_s=12.3
    )

    page.until("document.querySelector('[data-tile=tokens] .number').innerText.startsWith('24.7k')")
    assert page.ask(BOXES) == before


def test_what_a_person_opened_stays_open_over_updates(page: Page) -> None:
    page.server.answer = Ready().step()
    shown(page)
    page.ask("document.querySelector('.server summary').click()")

    page.until_asked_again()

    assert page.ask("document.querySelector('.server details').open") is True
    assert "http://attn-0:30000" in page.text(f"{card('attn-0')} .more")


def test_the_last_minute_of_tokens_becomes_a_line(page: Page) -> None:
    scene = Ready()
    page.server.answer = scene.step()
    shown(page)
    line = "document.querySelector('[data-tile=tokens] .spark path:last-child').getAttribute('d')"

    page.server.answer = scene.step()

    page.until(f"{line}.split('L').length >= 2")
    label = "document.querySelector('[data-tile=tokens] .spark').getAttribute('aria-label')"
    assert page.ask(label).startswith("Tokens per second over the last minute: from ")


def test_text_of_servers_never_becomes_html(page: Page) -> None:
    answer = answer_of(hostile(EVIL))
    group = answer.groups[0]
    server = msgspec.structs.replace(group.attn[0], server_id=EVIL, url=EVIL, boot_id=EVIL)
    group = msgspec.structs.replace(group, name=EVIL, reason=EVIL, attn=(server,))
    page.server.answer = msgspec.structs.replace(answer, groups=(group,))

    shown(page)

    page.until_asked_again()
    assert page.text(".group-why") == EVIL
    assert page.text(".server .name") == EVIL
    assert EVIL in page.text(".events")
    assert EVIL in page.text("#unheard")
    assert page.count("img") == 0
    assert page.ask("window.ran") is None


@pytest.mark.parametrize(
    "attack",
    [
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.ran=1>')",
        "document.body.append(Object.assign(document.createElement('script'), {text: 'ran=1'}))",
        "document.body.setAttribute('onclick', 'window.ran=1'); document.body.click()",
        "eval('window.ran=1')",
    ],
)
def test_not_even_a_mistake_of_the_page_could_run_something(page: Page, attack: str) -> None:
    page.server.answer = answer_of(empty())
    shown(page)

    # Devtools may evaluate; what they start from a timer stands under the page's own policy.
    page.ask(f"setTimeout(() => {{ window.tried = true; {attack}; }})")

    page.until("window.tried")
    page.until_told_of_a_problem()
    assert page.ask("window.ran") is None


def test_an_empty_router_says_how_to_start_servers(page: Page) -> None:
    page.server.answer = answer_of(empty())

    shown(page)

    origin = page.server.url.rstrip("/")
    assert page.text("#empty h2") == "No server has registered yet"
    for role in ("mlp", "attn"):
        words = page.text(f"#start-{role}")
        assert f"--role {role}" in words
        assert f"--afd-router {origin}" in words
    assert page.count(".group") == 0


def test_a_large_group_stays_readable(page: Page) -> None:
    page.server.answer = answer_of(many(num_attn=56, num_mlp=8))

    shown(page)

    assert page.count(".picture .wires .attached") == 56 * 8
    assert page.count(".server.compact") == 56
    assert page.ask("document.documentElement.scrollHeight") < 3200


def test_changes_of_state_are_said_to_screen_readers_and_numbers_are_not(page: Page) -> None:
    scene = Ready()
    page.server.answer = scene.step()
    shown(page)
    page.server.answer = scene.step()
    page.until_asked_again()
    assert page.text("#said") == ""

    scene.fleet.plane.drain("attn-0", "an operator asked", scene.fleet.clock_s)
    page.server.answer = scene.step()

    page.until("document.getElementById('said').textContent.includes('attn-0 is draining')")
