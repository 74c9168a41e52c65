"""SGLang is imported here once, before any test file does; its import warns of much."""

from __future__ import annotations

import warnings

from sglang_afd.upstream import cpu_shim  # noqa: F401 - before any import of SGLang

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang_afd.attn.split_forward  # noqa: F401
