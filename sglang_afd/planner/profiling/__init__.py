"""Measures a profile with stock SGLang, colocated; the one part of the planner that uses torch."""
