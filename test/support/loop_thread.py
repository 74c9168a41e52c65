"""An event loop that runs in a thread, so that plain tests can use what is asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """A context manager; the loop ends with it."""

    def __enter__(self) -> LoopThread:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def call(self, what: Coroutine[Any, Any, T]) -> T:
        """Run something on the loop; returns what it returns."""
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()

    def enter(self, context: AbstractAsyncContextManager[T]) -> T:
        """Enter an asynchronous context; `leave` it later."""
        return self.call(_entered(context))

    def leave(self, context: AbstractAsyncContextManager[Any]) -> None:
        self.call(_left(context))


async def _entered(context: AbstractAsyncContextManager[T]) -> T:
    return await context.__aenter__()


async def _left(context: AbstractAsyncContextManager[Any]) -> None:
    await context.__aexit__(None, None, None)
