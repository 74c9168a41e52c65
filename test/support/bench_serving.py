"""SGLang's own `python -m sglang.bench_serving`, on a machine without a GPU.

Its package imports every kind of data set that it can load; Hugging Face's `datasets` is needed by
none that tests use, and is not installed for them.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
import types
from typing import NoReturn

import sglang_afd.upstream.cpu_shim  # noqa: F401 - precedes every import of SGLang


def load_dataset(*_args: object, **_more: object) -> NoReturn:
    raise AssertionError("the package datasets is not installed; take --dataset-name random-ids")


if __name__ == "__main__":
    if importlib.util.find_spec("datasets") is None:
        stand_in = types.ModuleType("datasets")
        stand_in.load_dataset = load_dataset  # type: ignore[attr-defined]
        sys.modules["datasets"] = stand_in
    runpy.run_module("sglang.bench_serving", run_name="__main__")
