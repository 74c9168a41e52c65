"""Parts of bench_step.py: decode steps of stock SGLang and of split roles on one device."""

from __future__ import annotations

import sys
from pathlib import Path

# Where sglang_afd is not installed; before any part imports it.
sys.path.append(str(Path(__file__).parents[2]))
