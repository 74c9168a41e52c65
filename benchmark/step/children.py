"""What a child process of a block does: decode when told to, or serve experts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from step import weights
from step.channel import Channel, ChannelClosed, Message, connect
from step.decoding import Around, Decoder, nothing_around
from step.kernels import KernelTimes


def run(command: dict[str, Any]) -> int:
    """The child that `command` describes; returns its exit code."""
    channel = connect(command["door"])
    channel.send({"name": command["name"]})
    if command["is_dummy"]:
        weights.replace_dummy_weights()
    channel.send({"is": "here"})
    match command["kind"]:
        case "colocated":
            return _colocated(command, channel)
        case "attn":
            return _attention(command, channel)
        case "mlp":
            return _mlp(command, channel)
    raise ValueError(f"unknown kind of child {command['kind']}")


def _colocated(command: dict[str, Any], channel: Channel) -> int:
    from sglang.srt.server_args import prepare_server_args

    decoder = _load(lambda: Decoder(prepare_server_args(command["argv"]), nothing_around), channel)
    return _obey(decoder, channel, lambda: None)


def _attention(command: dict[str, Any], channel: Channel) -> int:
    from step.attention import AttentionRole

    role = AttentionRole(command["argv"])
    around: Around = role.around
    decoder = _load(lambda: Decoder(role.server_args, around), channel)
    role.wait_attached()
    channel.send({"is": "attached"})
    return _obey(decoder, channel, role.check, role.close)


def _load(make: Any, channel: Channel) -> Decoder:
    started_s = time.monotonic()
    decoder: Decoder = make()
    channel.send(
        {
            "is": "loaded",
            "load_s": round(time.monotonic() - started_s, 2),
            "pool_tokens": decoder.pool_tokens,
            "num_graphs": decoder.num_graphs,
        }
    )
    return decoder


@torch.no_grad()
def _obey(
    decoder: Decoder,
    channel: Channel,
    check: Callable[[], None],
    close: Callable[[], None] = lambda: None,
) -> int:
    """Do what the benchmark asks until it has enough.

    Args:
        decoder: Of this process.
        channel: To the benchmark.
        check: Raises when what was done is worthless.
        close: Called at the end.
    """
    recorder = _Recorder()
    while True:
        try:
            order = channel.receive()
        except ChannelClosed:
            return 1
        if order["do"] == "end":
            close()
            channel.send({"is": "end"})
            return 0
        answer = recorder.answer(order) or _decoded(decoder, order)
        check()
        channel.send({"is": order["do"]} | answer)


def _decoded(decoder: Decoder, order: Message) -> Message:
    match order["do"]:
        case "probe":
            import numpy as np

            np.save(order["file"], decoder.probe(order["num_rows"], order["first"]))
            return {}
        case "prepare":
            decoder.prepare(
                first_row=order["first_row"],
                num_rows=order["num_rows"],
                context=order["context"],
                is_cached=order["is_cached"],
            )
            return {}
        case "decode":
            wall, device = decoder.decode(warm=order["warm"], steps=order["steps"])
            times = {"step_ms": wall, "device_ms": device}
            return times | {"stream_ms": decoder.decode_stream(order["steps"])}
        case "touched":
            return {"touched": decoder.touched()}
        case "profile":
            decoder.decode_plain(order["steps"])
            return {}
    raise ValueError(f"unknown order {order}")


class _Recorder:
    """Records this process's kernels between two orders."""

    def __init__(self) -> None:
        self._times: KernelTimes | None = None

    def answer(self, order: Message) -> Message | None:
        """Do what a recorder does; None for other orders."""
        match order["do"]:
            case "record":
                self._times = KernelTimes()
                self._times.__enter__()
                return {"is": "record"}
            case "recorded":
                assert self._times is not None, "nothing is being recorded"
                self._times.__exit__()
                return {"is": "recorded", "kernels": self._times.events}
        return None


def _mlp(command: dict[str, Any], channel: Channel) -> int:
    """The real server; a thread of ours waits until its kernels are to be recorded."""
    from sglang_afd import launch_server

    threading.Thread(target=_record, args=(channel,), daemon=True).start()
    return launch_server.main(command["argv"])


def _record(channel: Channel) -> None:
    recorder = _Recorder()
    while True:
        try:
            order = channel.receive()
        except ChannelClosed:
            return  # the benchmark is gone, and the zygote ends this process
        answer = recorder.answer(order)
        if answer is not None:
            channel.send(answer)
