"""Does another process still turn its event loop?"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

LOOKS = 30  # for an answer, before somebody counts as silent
START_LOOKS = 4 * LOOKS  # for the first, which comes after all imports


class Heartbeat:
    """Asks one question at a time, and looks for its answer now and then.

    Looks are counted, and no clock is read: whoever was stopped, or had no time, and then finds
    that much time is gone, would else take the other process for the one that was silent.

    Args:
        ask: Sends the question.
        limit_s: How long an answer may take.
        sleep: Between two looks.
    """

    def __init__(
        self,
        ask: Callable[[], None],
        limit_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._ask = ask
        self._look_s = limit_s / LOOKS
        self._sleep = sleep
        self._is_answered = False

    def on_answer(self) -> None:
        self._is_answered = True

    async def was_alive_until(self, end: Coroutine[Any, Any, object]) -> bool:
        """Wait for the end of the other process, or until it hangs; False for the latter.

        Raises: What waiting for the end, or asking, does.
        """
        loop = asyncio.get_running_loop()
        ending, hanging = loop.create_task(end), loop.create_task(self.until_silent())
        try:
            done, _ = await asyncio.wait((ending, hanging), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            return ending in done
        finally:
            ending.cancel()
            hanging.cancel()

    async def until_silent(self) -> None:
        """Return once a question was not answered in time."""
        num_looks = START_LOOKS
        while await self._is_answered_within(num_looks):
            num_looks = LOOKS

    async def _is_answered_within(self, num_looks: int) -> bool:
        self._is_answered = False
        self._ask()
        for _ in range(num_looks):
            await self._sleep(self._look_s)
            if self._is_answered:
                return True
        return False
