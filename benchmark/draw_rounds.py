"""Draws the pictures of docs/rounds.md, from scenes that the rounds really play.

    python benchmark/draw_rounds.py [NAME ...]

Writes docs/pictures/rounds/NAME.svg, for all names unless some are given. What ran is in each
file's description; a test compares it with what the rounds do now.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from round_pictures.draw import draw  # noqa: E402
from round_pictures.scenes import PICTURES  # noqa: E402

OUT = ROOT / "docs" / "pictures" / "rounds"


def main(argv: Sequence[str]) -> None:
    """Draw what `argv` names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    names = parser.parse_args(argv).names or list(PICTURES)
    if unknown := set(names) - set(PICTURES):
        parser.error(f"no picture is called {sorted(unknown)}; there are {', '.join(PICTURES)}")
    OUT.mkdir(parents=True, exist_ok=True)
    for name in names:
        draw(PICTURES[name](), OUT / f"{name}.svg")
        print(OUT / f"{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
