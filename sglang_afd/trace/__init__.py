"""Timelines: what each role records, and how the files of several servers become one (pure)."""
