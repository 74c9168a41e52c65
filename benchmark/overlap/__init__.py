"""What `bench_overlap.py` is made of: planted delays, a tiny model, real servers, traffic."""

from __future__ import annotations

import sys
from pathlib import Path

# Where sglang_afd is not installed; before any part imports it.
sys.path.append(str(Path(__file__).parents[2]))
