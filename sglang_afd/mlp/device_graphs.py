"""One CUDA graph for each MoE layer and number of rows: pull, the experts, push."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_afd.mlp.device_units import RunsOnDevice
from sglang_afd.mlp.row_buckets import RowBuckets
from sglang_afd.transport.base import Rows
from sglang_afd.transport.cuda_ipc.units import UnitExchange

logger = logging.getLogger(__name__)

Graphs = dict[tuple[int, int], torch.cuda.CUDAGraph]


@dataclass(frozen=True, kw_only=True)
class GraphReport:
    """What the graphs cost; shown by `/server_info`."""

    num_graphs: int
    rows: Sequence[int]  # of a unit, for which there are graphs
    warm_up_s: float
    capture_s: float
    num_bytes: int  # of GPU memory that capture and first replays took


def warm_up(
    exchange: UnitExchange, experts: RunsOnDevice, layer_ids: Sequence[int], buckets: RowBuckets
) -> float:
    """Compile and load every kernel that a unit may launch; returns the seconds that it took.

    Of the experts alone, whose rows are all at hand. A kernel that is loaded later would stand
    behind one that waits for rows.
    """
    started_s = time.monotonic()
    num_experts = exchange.expert_counts.shape[1]
    top_k = exchange.topk_ids.shape[1]
    ids = torch.arange(exchange.topk_ids.numel(), dtype=torch.int32, device="cuda") % num_experts
    exchange.topk_ids.copy_(ids.view(-1, top_k))
    exchange.topk_weights.fill_(1.0 / top_k)
    for bucket in reversed(buckets.all):
        rows = Rows(
            hidden_states=exchange.hidden_states[:bucket],
            topk_ids=exchange.topk_ids[:bucket],
            topk_weights=exchange.topk_weights[:bucket],
        )
        for layer_id in layer_ids:
            experts.run_on_device(layer_id, rows)
    exchange.topk_ids.fill_(-1)
    torch.cuda.synchronize()
    return time.monotonic() - started_s


def capture(
    exchange: UnitExchange,
    experts: RunsOnDevice,
    layer_ids: Sequence[int],
    sizes: Sequence[int],
    *,
    warm_up_s: float,
) -> tuple[Graphs, GraphReport]:
    """Capture on the current stream, the one that replays; after `warm_up`.

    Graphs share one pool of memory, which is sound since they run one after the other; the largest
    comes first, so that the others fit into what it took.
    """
    started_s = time.monotonic()
    free_before, _ = torch.cuda.mem_get_info()
    pool = torch.cuda.graph_pool_handle()
    graphs: Graphs = {}
    torch.cuda.synchronize()
    for bucket in sorted(sizes, reverse=True):
        for layer_id in layer_ids:
            # NOTE: torch.cuda.graph() would empty torch's cache before each of a thousand captures.
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            rows = exchange.pull(bucket)
            exchange.push(experts.run_on_device(layer_id, rows), bucket)
            graph.capture_end()
            graphs[layer_id, bucket] = graph
    _replay_once(exchange, graphs)
    free_after, _ = torch.cuda.mem_get_info()
    report = GraphReport(
        num_graphs=len(graphs),
        rows=tuple(sorted(sizes)),
        warm_up_s=round(warm_up_s, 2),
        capture_s=round(time.monotonic() - started_s, 2),
        num_bytes=free_before - free_after,
    )
    logger.info(
        "%d graphs of one expert run in %.1f s after %.1f s of warm-up, %.2f GiB",
        report.num_graphs,
        report.capture_s,
        report.warm_up_s,
        report.num_bytes / 2**30,
    )
    return graphs, report


def capture_nothing() -> torch.cuda.CUDAGraph:
    """A graph of one tiny kernel, to rehearse a launch with; captured on the current stream."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    graph.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device="cuda")  # in the graph's own pool, so that nobody has to keep it
    graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _replay_once(exchange: UnitExchange, graphs: Graphs) -> None:
    """Run each with a unit of nobody, which waits for nothing: a first launch uploads the graph."""
    for layer_id, bucket in graphs:
        exchange.submit(layer_id, ())
        graphs[layer_id, bucket].replay()
        while exchange.num_submitted - exchange.num_done >= 4:
            time.sleep(0)
    torch.cuda.synchronize()
