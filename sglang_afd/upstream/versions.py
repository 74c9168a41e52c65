"""Which SGLang this package was written against."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from sglang_afd.errors import UpstreamMismatch

SGLANG_VERSION = "0.5.17"


@cache
def check_version() -> str:
    """The installed SGLang version.

    Raises:
        UpstreamMismatch: Another one than the hooks were written against, or none.
    """
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        raise UpstreamMismatch(
            f"SGLang is not installed; pip install sglang=={SGLANG_VERSION}"
        ) from None
    if installed != SGLANG_VERSION:
        raise UpstreamMismatch(
            f"SGLang {installed} is installed; this sglang-afd hooks into {SGLANG_VERSION} only. "
            f"pip install sglang=={SGLANG_VERSION}"
        )
    return installed
