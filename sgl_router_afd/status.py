"""python -m sgl_router_afd.status URL: what the status page shows, as a table in the terminal."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from types import FrameType
from typing import TextIO

from sgl_router_afd.api.shapes import GroupsAnswer
from sgl_router_afd.control.standing import GroupState
from sgl_router_afd.keys import key_of
from sgl_router_afd.status_client import NoAnswer, base_of, decode, fetch
from sgl_router_afd.status_table import Style, table
from sglang_afd.errors import ConfigError
from sglang_afd.files import send_nowhere

NARROWEST = 40
CLEAR = "\x1b[H\x1b[2J\x1b[3J"


class Exit(IntEnum):
    """What a script can ask without reading the table."""

    READY = 0  # some group is
    NOT_READY = 1
    UNREACHABLE = 2  # and mistakes on the command line


def main(argv: Sequence[str] | None = None) -> int:
    """Look once, or again and again; returns the exit code of the last look."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        base = base_of(args.url)
        key = key_of("--admin-api-key", None, args.admin_api_key_file)
    except ConfigError as error:
        parser.error(str(error))
    code = Exit.UNREACHABLE
    try:
        with _noting_ctrl_c() as ctrl_c:
            while True:
                code = _look(base, key.value, args)
                if args.watch is None or ctrl_c.is_pressed:
                    return code
                time.sleep(args.watch)
    except KeyboardInterrupt:
        return code
    except BrokenPipeError:
        send_nowhere(sys.stdout)  # whoever reads has enough
        return code


@dataclass
class _CtrlC:
    is_pressed: bool = False

    def press(self, number: int, frame: FrameType | None) -> None:
        """A signal's handler."""
        self.is_pressed = True
        raise KeyboardInterrupt


@contextmanager
def _noting_ctrl_c() -> Iterator[_CtrlC]:
    """Python drops a KeyboardInterrupt that comes where nothing may raise, 1 in 700 here."""
    ctrl_c = _CtrlC()
    before = signal.signal(signal.SIGINT, ctrl_c.press)
    try:
        yield ctrl_c
    finally:
        signal.signal(signal.SIGINT, before)


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="python -m sgl_router_afd.status",
        description="Show how a router's groups and servers stand.",
        epilog="Exit code: 0 when some group is ready, 1 when none is, 2 when the router cannot be "
        "reached or refuses.",
        allow_abbrev=False,
    )
    parser.add_argument("url", metavar="URL", help="of the router, such as http://127.0.0.1:30000")
    parser.add_argument(
        "--watch",
        metavar="S",
        type=_interval,
        help="look again every S seconds (0.1..3600) until Ctrl-C",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the router's answer as it is, one line a look"
    )
    parser.add_argument(
        "--admin-api-key-file",
        metavar="FILE",
        help="the file with the router's admin key, for a router that has one",
    )
    return parser


def _interval(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"got {text}; choose a value from 0.1 to 3600")
    return seconds


def _look(base: str, key: bytes, args: argparse.Namespace) -> Exit:
    is_screen = sys.stdout.isatty() and args.watch is not None and not args.json
    try:
        body = fetch(base, key)
        answer = decode(base, body)
    except NoAnswer as error:
        if is_screen:
            sys.stdout.write(CLEAR)
            sys.stdout.flush()
        when = f"{time.strftime('%H:%M:%S')} " if args.watch is not None else ""
        sys.stderr.write(f"{when}{error}\n")
        return Exit.UNREACHABLE
    if args.json:
        shown = body.decode().strip() + "\n"
    else:
        shown = (CLEAR if is_screen else "") + _table(base, answer, sys.stdout)
        shown += "\n" if args.watch is not None else ""
    sys.stdout.write(shown)
    sys.stdout.flush()
    is_ready = any(group.state is GroupState.READY for group in answer.groups)
    return Exit.READY if is_ready else Exit.NOT_READY


def _table(base: str, answer: GroupsAnswer, out: TextIO) -> str:
    width = max(NARROWEST, shutil.get_terminal_size((120, 24)).columns)
    has_colour = out.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    text = table(base, answer, Style(width=width, has_colour=has_colour))
    # A terminal of another encoding must not end the program.
    encoding = out.encoding or "ascii"
    return text.encode(encoding, "replace").decode(encoding)


if __name__ == "__main__":
    sys.exit(main())
