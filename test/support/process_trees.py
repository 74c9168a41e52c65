"""What a process and its children are and use, as tests of processes ask."""

from __future__ import annotations

import contextlib

import psutil


def children_with(pid: int, words: str) -> list[int]:
    """The descendants of a process whose command line has these words."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if words in " ".join(child.cmdline()):
                found.append(child.pid)
    return found


def memory_bytes(pid: int) -> int:
    """Memory that a process and its descendants have for themselves."""
    root = psutil.Process(pid)
    return sum(process.memory_full_info().uss for process in (root, *root.children(recursive=True)))


def descendants(pid: int) -> list[int]:
    """All that descend from a process; none of one that is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []
