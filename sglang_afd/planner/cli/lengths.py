"""Reads the lengths of finished requests."""

from __future__ import annotations

from pathlib import Path

from sglang_afd.errors import ConfigError
from sglang_afd.files import read_file
from sglang_afd.planner.barrier import SlotLoad, slot_load


def read_lengths(path: Path) -> SlotLoad:
    """What a slot of a running batch holds, from one `PROMPT,DECODE` a line.

    Raises: ConfigError, naming the line.
    """
    try:
        lines = read_file(path).decode().splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--lengths {path}: cannot be read ({error})") from error
    prompts, decodes = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt, decode = (float(field) for field in line.split(","))
        except ValueError as error:
            raise ConfigError(
                f"--lengths {path}, line {number}: is {line!r}, wanted PROMPT,DECODE, as in 800,200"
            ) from error
        prompts.append(prompt)
        decodes.append(decode)
    return slot_load(prompts, decodes)
