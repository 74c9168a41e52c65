"""SGLang is imported here once, before any test file does; its import warns of much."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator

import pytest

from sglang_afd.upstream import cpu_shim  # noqa: F401 - before any import of SGLang

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang_afd.upstream.environment
    import sglang_afd.upstream.hooks
    import sglang_afd.upstream.http_server
    import sglang_afd.upstream.moe
    import sglang_afd.upstream.scheduler
    import sglang_afd.upstream.server_args
    import sglang_afd.upstream.weights  # noqa: F401


@pytest.fixture(autouse=True)
def _undo_what_sglang_sets() -> Iterator[None]:
    """Parsing arguments sets environment variables and the root logger."""
    environment, root = dict(os.environ), logging.getLogger()
    handlers, level = list(root.handlers), root.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    os.environ.clear()
    os.environ.update(environment)
    root.handlers[:] = handlers
    root.setLevel(level)
