"""What the user's own flags for the servers say, as far as the launcher must know (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_afd.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Arguments of one server; what stands later wins, as with argparse."""

    argv: Sequence[str]

    def text(self, *names: str, default: str = "") -> str:
        """The value of a flag, which may have several names."""
        value = default
        for at, word in enumerate(self.argv):
            name, is_joined, joined = word.partition("=")
            if name in names:
                following = self.argv[at + 1] if at + 1 < len(self.argv) else ""
                value = joined if is_joined else following
        return value

    def number(self, name: str, default: int) -> int:
        """The value of a flag that takes a number.

        Raises:
            ConfigError: It is none.
        """
        text = self.text(name)
        try:
            return int(text) if text else default
        except ValueError:
            raise ConfigError(f"{name} got {text!r}; give a number") from None

    def has(self, *names: str) -> bool:
        """Is one of these flags there?"""
        return any(word.partition("=")[0] in names for word in self.argv)
