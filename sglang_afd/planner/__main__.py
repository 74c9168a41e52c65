"""python -m sglang_afd.planner: says before deploying whether AFD pays."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from sglang_afd.cli import StrictParser
from sglang_afd.errors import AfdError, ConfigError
from sglang_afd.files import send_nowhere

PROGRAM = "python -m sglang_afd.planner"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A module with `add_arguments(parser)` and `run(args)`, imported only when it is called."""

    module: str
    summary: str

    def parser(self, name: str) -> StrictParser:
        """The flags of this command."""
        parser = StrictParser(
            prog=f"{PROGRAM} {name}", description=self.summary, allow_abbrev=False
        )
        add = cast(
            Callable[[argparse.ArgumentParser], None],
            importlib.import_module(self.module).add_arguments,
        )
        add(parser)
        return parser

    def run(self, args: argparse.Namespace) -> int:
        """Do it; returns the exit code."""
        run = cast(Callable[[argparse.Namespace], int], importlib.import_module(self.module).run)
        return run(args)


_ROOM = "sglang_afd.planner"
COMMANDS = {
    "predict": Command(
        module=f"{_ROOM}.cli.predict_command",
        summary="Predict step time, throughput and memory of one deployment, and its speed-up.",
    ),
    "search": Command(
        module=f"{_ROOM}.cli.search_command",
        summary="Search the best disaggregated and the best colocated deployment: does AFD pay?",
    ),
    "explain": Command(
        module=f"{_ROOM}.cli.explain_command",
        summary="Write a report of one page, as HTML or for a terminal.",
    ),
    "what-if": Command(
        module=f"{_ROOM}.cli.what_if_command",
        summary="Compare the verdict with that under other assumptions.",
    ),
    "profile": Command(
        module=f"{_ROOM}.profiling.command",
        summary="Measure a profile with stock SGLang on the GPU at hand.",
    ),
    "simulate": Command(
        module=f"{_ROOM}.simulator.command",
        summary="Play a deployment event by event: jitter, unequal contexts, prefill, failures.",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns: Exit code: 0, 1 after an error, 2 after bad input, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()  # here, where it can be told that this failed
        return code
    except AfdError as error:
        return _fail(str(error), 2 if isinstance(error, ConfigError) else 1)
    except BrokenPipeError:
        send_nowhere(sys.stdout)  # whoever reads has enough
        return 0
    except OSError as error:
        if error.filename is not None:
            raise  # not of standard output, which has no name
        send_nowhere(sys.stdout)
        return _fail(f"the answer cannot be written ({error}); send it elsewhere", 1)
    except KeyboardInterrupt:
        return 130


def _run(arguments: Sequence[str]) -> int:
    if sys.stdout is None:
        raise ConfigError("standard output is closed; say where the answer goes, as in > FILE")
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(usage())
        return 0 if arguments else 2
    name = arguments[0]
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}; wanted one of {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    return command.run(command.parser(name).parse_args(arguments[1:]))


def _fail(message: str, code: int) -> int:
    if sys.stderr is not None:
        sys.stderr.write(f"error: {message}\n")
    return code


def usage() -> str:
    """All commands, a line each."""
    lines = [f"usage: {PROGRAM} COMMAND ... (COMMAND --help shows its flags)", ""]
    lines += [f"  {name:<10}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
