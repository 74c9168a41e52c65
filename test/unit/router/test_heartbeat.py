from __future__ import annotations

import asyncio
from collections.abc import Callable

from sgl_router_afd.dataplane.heartbeat import LOOKS, START_LOOKS, Heartbeat

LIMIT_S = 3.0


def looks_until_silent(answers: Callable[[int, int], bool]) -> int:
    """How often a heartbeat looked before it gave up.

    Args:
        answers: Whether the answer comes before this look (from 1 on) at this question (from 1 on).
    """
    num_looks = [0]  # at each question

    async def sleep(seconds: float) -> None:
        assert seconds == LIMIT_S / LOOKS
        num_looks[-1] += 1
        if answers(num_looks[-1], len(num_looks) - 1):
            heartbeat.on_answer()

    heartbeat = Heartbeat(lambda: num_looks.append(0), LIMIT_S, sleep)
    asyncio.run(heartbeat.until_silent())
    return sum(num_looks)


def test_one_that_never_answers_is_silent_after_the_limit_for_the_start() -> None:
    assert looks_until_silent(lambda look, question: False) == START_LOOKS


def test_one_that_answered_before_is_silent_after_the_limit() -> None:
    assert looks_until_silent(lambda look, question: question <= 5) == 5 + LOOKS


def test_one_that_is_late_with_each_answer_is_busy_and_not_silent() -> None:
    looks = looks_until_silent(lambda look, question: question <= 9 and look == LOOKS)

    assert looks == 9 * LOOKS + LOOKS


def test_an_answer_to_an_older_question_answers_no_later_one() -> None:
    assert looks_until_silent(lambda look, question: (look, question) == (1, 1)) == 1 + LOOKS
