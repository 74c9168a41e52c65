"""Small exchanges for compute-sanitizer: both sides in one process, and no kernel ever spins.

Each kernel is launched once what it waits for is there, so that the tools, which slow kernels down
and may run them one after the other, cannot make one wait for the next. `--fault read` reads beyond
a tensor, which memcheck must report; with `--fault race` threads of a block disagree, which
racecheck must.

Racecheck sees shared memory only, of which the kernels have one word. Whether blocks and processes
see each other's stores in order is for stress_exchange.py to find out.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
from collections.abc import Sequence
from importlib import resources

import torch
from one_sided import (
    LAYER_IDS,
    Rank,
    attached_slab,
    make_rows,
    make_shape,
    member,
    reference,
    send,
    weigh,
)

from sglang_afd.protocol.messages import Kind
from sglang_afd.transport.cuda_ipc import driver, kernels
from sglang_afd.transport.cuda_ipc.layout import WaitPolicy

LIMIT_S = 150.0  # of one run, after which it says where it stands
WIDE = 1024  # a hidden size whose rows are copied by several warps


def check(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare, once the device is done."""
    torch.cuda.synchronize()
    if not torch.equal(got, wanted):
        raise AssertionError(f"{name}: values differ")
    sys.stdout.write(f"{name}: right\n")


def run_case(
    dtype: str, num_rows: int, num_ranks: int, policy: WaitPolicy, hidden_size: int = 256
) -> None:
    """One exchange there and back."""
    shape = make_shape(dtype, hidden_size=hidden_size)
    ranks = [Rank(shape, weigh, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    slab, indices = attached_slab(shape, ranks, policy)
    inputs = make_rows(shape, num_rows, seed=num_rows)
    send(slab, 1, LAYER_IDS[1], inputs)
    torch.cuda.synchronize()
    for rank, index in zip(ranks, indices, strict=True):
        rank.heard(index)
        rank.serve(LAYER_IDS[1], [member(index, 1, num_rows)], bucket=64)
        torch.cuda.synchronize()
    total = slab.combine(1, num_rows)
    parts = [reference(inputs, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    wanted = parts[0].float()
    for part in parts[1:]:
        wanted = wanted + part.float()
    name = f"{dtype}, {num_rows} rows of {hidden_size}, {num_ranks} ranks, {policy}"
    check(name, total, wanted.to(total.dtype))


def run_many_members() -> None:
    """One unit of three servers with other numbers of rows each, and padding behind."""
    shape = make_shape()
    rank = Rank(shape, weigh)
    sizes = (1, 64, 31)
    slabs = [attached_slab(shape, [rank], epoch=number + 1) for number in range(len(sizes))]
    all_inputs = [make_rows(shape, size, seed=size) for size in sizes]
    for (slab, _), inputs in zip(slabs, all_inputs, strict=True):
        send(slab, 0, LAYER_IDS[0], inputs)
    torch.cuda.synchronize()
    members = []
    for (_, [index]), size in zip(slabs, sizes, strict=True):
        rank.heard(index)
        members.append(member(index, 0, size))
    rank.serve(LAYER_IDS[0], members, bucket=128)
    torch.cuda.synchronize()
    for (slab, _), inputs, size in zip(slabs, all_inputs, sizes, strict=True):
        check(f"one of three servers, {size} rows", slab.combine(0, size), reference(inputs))


def run_pieces() -> None:
    """A prefill in two pieces."""
    shape = make_shape()
    rank = Rank(shape, weigh)
    slab, [index] = attached_slab(shape, [rank])
    inputs = make_rows(shape, 50, seed=50)
    send(slab, 0, LAYER_IDS[2], inputs)
    torch.cuda.synchronize()
    rank.heard(index)
    for first_row, number, bucket in ((0, 33, 48), (33, 17, 17)):
        with torch.cuda.stream(rank.stream):
            rank.exchange.submit(
                LAYER_IDS[2],
                [member(index, 0, 50)],
                first_row=first_row,
                num_rows=number,
                is_last_piece=first_row > 0,
            )
            rank.run(bucket)
        torch.cuda.synchronize()
    check("two pieces", slab.combine(0, 50), reference(inputs))


def run_padded() -> None:
    """A dispatch of more rows than the step has: those beyond stay."""
    shape = make_shape()
    rank = Rank(shape, weigh)
    slab, [index] = attached_slab(shape, [rank])
    states, ids, weights = make_rows(shape, 64, seed=64)
    slab.stage_step(step=1, kind=Kind.DECODE, num_micro_batches=1, num_rows=40)
    slab.dispatch(0, LAYER_IDS[0], states, ids, weights, rings=True)
    torch.cuda.synchronize()
    [header] = rank.heard(index)
    rank.serve(LAYER_IDS[0], [member(index, 0, header.num_rows)], bucket=64)
    torch.cuda.synchronize()
    wanted = reference((states[:40], ids[:40], weights[:40]))
    check("40 rows of 64", slab.combine(0, 64)[:40], wanted)


def run_fp8() -> None:
    """Quantised on the way out; within what e4m3 loses."""
    shape = make_shape(is_fp8=True)
    rank = Rank(shape, weigh)
    slab, [index] = attached_slab(shape, [rank])
    inputs = make_rows(shape, 33, seed=33)
    send(slab, 0, LAYER_IDS[0], inputs)
    torch.cuda.synchronize()
    rank.heard(index)
    rank.serve(LAYER_IDS[0], [member(index, 0, 33)], bucket=33)
    torch.cuda.synchronize()
    got, wanted = slab.combine(0, 33).float(), reference(inputs).float()
    bound = wanted.abs().amax() / 8
    check("fp8", ((got - wanted).abs() < bound).all(), torch.ones((), dtype=torch.bool).cuda())


def run_attached_anew() -> None:
    """What is pending is asked for again, by a rank that has only just mapped the slots."""
    shape = make_shape()
    first, second = Rank(shape, weigh), Rank(shape, weigh)
    slab, _ = attached_slab(shape, [first], epoch=1)
    inputs = make_rows(shape, 9, seed=9)
    send(slab, 0, LAYER_IDS[0], inputs)
    torch.cuda.synchronize()
    index = second.open(slab, 2)
    slab.attach(2, 1)
    second.heard(index)
    second.serve(LAYER_IDS[0], [member(index, 0, 9)], bucket=16)
    torch.cuda.synchronize()
    check("attached anew", slab.combine(0, 9), reference(inputs))
    slab.abort()
    slab.combine(0, 9)
    slab.detach()
    torch.cuda.synchronize()


def run_read_fault() -> None:
    """Reads rows that a tensor does not have."""
    shape = make_shape()
    rank = Rank(shape, lambda states, ids, weights: weigh(states, ids, weights)[:8].clone())
    slab, [index] = attached_slab(shape, [rank])
    inputs = make_rows(shape, 64, seed=64)
    send(slab, 0, LAYER_IDS[0], inputs)
    torch.cuda.synchronize()
    rank.heard(index)
    rank.serve(LAYER_IDS[0], [member(index, 0, 64)], bucket=64)
    torch.cuda.synchronize()


def run_race_fault() -> None:
    """A block's threads change the word in which one of them says whether it is the last."""
    source = resources.files("sglang_afd.transport.cuda_ipc").joinpath("exchange.cu").read_text()
    before, barrier, after = source.partition("  __syncthreads();\n  return is_last;")
    assert barrier, "exchange.cu has no such barrier any more; plant another race"
    changed = f"{before}  if (threadIdx.x) is_last ^= 1;\n{barrier}{after}"
    definitions = kernels.definitions("bfloat16", torch.cuda.get_device_capability())
    module = driver.Module(changed, "exchange.cu", 0, definitions)
    kernels.module = lambda device, dtype: module  # type: ignore[assignment]
    run_case("bfloat16", 7, 1, WaitPolicy.POLL, WIDE)


FAULTS = {"read": run_read_fault, "race": run_race_fault}


def main(argv: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS)
    fault = parser.parse_args(argv).fault
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    if fault is not None:
        FAULTS[fault]()
        return 0
    for policy in WaitPolicy:
        for num_rows in (1, 7, 64):
            run_case("bfloat16", num_rows, 2, policy)
    for dtype in ("float16", "float32"):
        run_case(dtype, 33, 1, WaitPolicy.POLL)
    run_case("bfloat16", 33, 2, WaitPolicy.POLL, WIDE)
    run_many_members()
    run_pieces()
    run_padded()
    run_fp8()
    run_attached_anew()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
