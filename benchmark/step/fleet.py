"""The child processes of one block: started together, asked one thing at a time, ended together."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from step.channel import Channel, ChannelClosed, Door, Message, wait_any

IMPORT_TIMEOUT_S = 240.0
END_TIMEOUT_S = 30.0
GRACE_S = 15.0  # for servers to stop by themselves
FAILED_GRACE_S = 3.0  # the same in a block that has failed
LOG_TAIL = 2500  # characters of a child's log that are shown when it fails


class BlockFailed(Exception):
    """A child ended, or the time of the block was over."""


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """What to start."""

    name: str
    kind: str  # colocated, attn or mlp
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Child:
    """A process that was started; `said` is what it told by itself, by `is`."""

    spec: ChildSpec
    pid: int
    log: Path
    channel: Channel | None = None
    said: dict[str, Message] = field(default_factory=dict)


class Launcher:
    """Owns the zygote and the directory of everything; a context manager."""

    def __init__(self, *, is_dummy: bool, environment: dict[str, str]) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="bench-step-"))
        self._is_dummy = is_dummy
        self._count = 0
        self._log = self.directory / "zygote.log"
        self._door = Door(self.directory / "door")
        with self._log.open("wb") as log:
            self._zygote = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "step.zygote"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment() | environment | {"TMPDIR": str(self.directory)},
                text=True,
                start_new_session=True,  # out of reach of the terminal's Ctrl-C
            )

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def wait_ready(self) -> Message:
        """Until SGLang is imported."""
        return self._read()

    def close(self) -> None:
        """End every process and remove the directory."""
        assert self._zygote.stdin is not None and self._zygote.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._zygote.stdin.close()
        try:
            self._zygote.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._zygote.kill()
            self._zygote.wait()
        self._zygote.stdout.close()
        self._door.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    @contextmanager
    def block(self, specs: Sequence[ChildSpec], *, timeout_s: float) -> Iterator[Block]:
        """Start `specs`; everything ends when the `with` block does.

        Raises:
            BlockFailed: A child did not come up.
        """
        block = Block(time.monotonic() + timeout_s)
        try:
            for spec in specs:
                block.children.append(self._start(spec))
            self._meet(block)
            block.wait_said("here")
            yield block
        finally:
            self._end(block)

    def _start(self, spec: ChildSpec) -> Child:
        self._count += 1
        log = self.directory / f"{self._count:03d}-{spec.name}.log"
        command = {
            "do": "start",
            "name": spec.name,
            "kind": spec.kind,
            "argv": spec.argv,
            "env": spec.env,
            "log": str(log),
            "door": self._door.path,
            "is_dummy": self._is_dummy,
        }
        return Child(spec=spec, pid=self._ask(command)["pid"], log=log)

    def _meet(self, block: Block) -> None:
        missing = {child.spec.name: child for child in block.children}
        while missing:
            met = self._door.accept(block.deadline_s)
            if met is None:
                block.has_failed = True
                raise BlockFailed(f"{sorted(missing)} did not start{_tails(missing.values())}")
            name, channel = met
            missing.pop(name).channel = channel

    def _end(self, block: Block) -> None:
        # Those that wait for others first, so that nobody is missed.
        decoding = [child for child in block.children if child.spec.kind != "mlp"]
        serving = [child for child in block.children if child.spec.kind == "mlp"]
        for group in (decoding, serving):
            self._ask(
                {
                    "do": "stop",
                    "pids": [child.pid for child in group],
                    "patience_s": GRACE_S if all("end" in child.said for child in group) else 0.0,
                    "grace_s": FAILED_GRACE_S if block.has_failed else GRACE_S,
                }
            )
        for child in block.children:
            if child.channel is not None:
                child.channel.close()

    def _ask(self, command: Message) -> Message:
        assert self._zygote.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._zygote.stdin.write(json.dumps(command) + "\n")
            self._zygote.stdin.flush()
        return self._read()

    def _read(self) -> Message:
        assert self._zygote.stdout is not None
        line = self._zygote.stdout.readline()
        if not line:
            raise SystemExit(f"bench_step: SGLang could not be imported\n{_tail(self._log)}")
        answer: Message = json.loads(line)
        return answer


class Block:
    """Children that run together."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.children: list[Child] = []
        self.has_failed = False

    def of_kind(self, *kinds: str) -> list[Child]:
        """In the order in which they were started."""
        return [child for child in self.children if child.spec.kind in kinds]

    def wait_said(self, word: str, *kinds: str) -> None:
        """Until every child, or every one of `kinds`, has said `word`; see `ask_all`."""
        waiting = self.of_kind(*kinds) if kinds else self.children
        self._wait(waiting, word)

    def ask_all(self, children: Sequence[Child], *orders: Message) -> list[Message]:
        """Give each child an order at the same time, and wait for every answer.

        Args:
            children: Whom to ask.
            *orders: One for each, or one for all.

        Raises:
            BlockFailed: Any child of the block ended, or its time was over.
        """
        if not children:
            return []
        each = orders if len(orders) == len(children) else orders * len(children)
        word = each[0]["do"]
        for child, order in zip(children, each, strict=True):
            child.said.pop(word, None)
            try:
                _channel_of(child).send(order)
            except ChannelClosed:
                raise self._failure(child, "ended") from None
        self._wait(children, word)
        return [child.said[word] for child in children]

    def _wait(self, children: Sequence[Child], word: str) -> None:
        for child in self.children:
            self._note_said(child)  # what came together with its name
        while not all(word in child.said for child in children):
            by_channel = {
                _channel_of(child): child for child in self.children if "end" not in child.said
            }
            ready = wait_any(list(by_channel), self.deadline_s)
            if not ready:
                slow = next(child for child in children if word not in child.said)
                raise self._failure(slow, f"has not said {word!r} when the block's time was over")
            for channel in ready:
                self._hear(by_channel[channel], channel)

    def _hear(self, child: Child, channel: Channel) -> None:
        try:
            channel.read()
        except ChannelClosed:
            raise self._failure(child, "ended") from None
        self._note_said(child)

    @staticmethod
    def _note_said(child: Child) -> None:
        while (message := _channel_of(child).take()) is not None:
            child.said[message["is"]] = message

    def _failure(self, child: Child, what: str) -> BlockFailed:
        self.has_failed = True
        return BlockFailed(f"{child.spec.name} {what}{_tails(self.children)}")


def _channel_of(child: Child) -> Channel:
    assert child.channel is not None, f"{child.spec.name} was not met"
    return child.channel


def _tails(children: Any) -> str:
    return "".join(f"\n--- {child.spec.name}:\n{_tail(child.log)}" for child in children)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL:] if log.exists() else ""


def _environment() -> dict[str, str]:
    root = Path(__file__).parents[2]
    path = [str(root / "benchmark"), str(root), str(root / "test" / "support")]
    path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "TOKENIZERS_PARALLELISM": "false"}
