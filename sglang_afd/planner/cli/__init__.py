"""The commands of `python -m sglang_afd.planner`."""
