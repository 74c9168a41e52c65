"""Where MLP rank 0 may be, as the router says; read by the process that attaches to it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sglang_afd.shared_page import SharedPage

_PAGE_BYTES = 64 * 1024
_MAX_REASON = 1000  # characters


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """The last word of the router."""

    urls: tuple[str, ...] = ()  # kept when the router falls silent, or knows nothing yet
    reason: str = "no router has answered yet"  # why there are none, for people


class ToldPage:
    """Written by the process that registers; hand it to a child process as an argument."""

    def __init__(self) -> None:
        self._page = SharedPage(_PAGE_BYTES)
        self._last = Told()

    def write(self, *, urls: Sequence[str], reason: str) -> None:
        """Show what the router says; addresses stay when it names none."""
        told = Told(urls=tuple(urls) or self._last.urls, reason=reason[:_MAX_REASON])
        if told != self._last:
            self._last = told
            self._page.write(msgspec.json.encode(told))

    def read(self) -> Told:
        """The last word."""
        text = self._page.read()
        return msgspec.json.decode(text, type=Told) if text else Told()
