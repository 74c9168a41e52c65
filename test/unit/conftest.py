"""Hypothesis without deadlines: a machine that is busy with something else is no bug of ours."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
