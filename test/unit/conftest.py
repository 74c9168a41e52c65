"""Hypothesis without the clock: a machine that is busy with something else is no bug of ours.

Examples are drawn from each test's own text, so a run that passed here passes everywhere; with
HYPOTHESIS_SEARCH=1 every run draws others.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "unhurried",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not os.environ.get("HYPOTHESIS_SEARCH"),
)
settings.load_profile("unhurried")
