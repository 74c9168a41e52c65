"""Install hooks into SGLang, and prove that they took.

SGLang logs and swallows a hook that fails to apply, and would then serve the model unsplit.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_afd.errors import UpstreamMismatch

AROUND = HookType.AROUND
REPLACE = HookType.REPLACE


@dataclass(frozen=True, kw_only=True)
class Hook:
    """One row of docs/upstream.md."""

    target: str  # dotted path
    type: HookType
    function: Callable[..., Any]


def install(hooks: Sequence[Hook]) -> None:
    """Apply `hooks` in this process and check each target afterwards.

    Raises:
        UpstreamMismatch: A target does not exist, or is still SGLang's own after installation.
    """
    originals = {hook.target: _resolve(hook.target) for hook in hooks}
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, hook.type)
    HookRegistry.apply_hooks()
    verify_installed(originals)


def verify_installed(originals: dict[str, object]) -> None:
    """Check that every target was wrapped.

    Args:
        originals: What each target was before installation.

    Raises:
        UpstreamMismatch: Names the first target that was not.
    """
    for target, original in originals.items():
        now = _resolve(target)
        if now is original or getattr(now, "__wrapped__", None) is not original:
            raise UpstreamMismatch(
                f"the hook on {target} did not take; this server would serve the model unsplit. "
                f"Is another SGLang plugin replacing it? Set SGLANG_PLUGINS= to disable plugins"
            )


def _resolve(target: str) -> object:
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise UpstreamMismatch(f"SGLang has no {target}: {error}") from None
