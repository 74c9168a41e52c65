"""The board as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sglang_afd.mlp.board import Board, Counter

_PREFIX = "sglang_afd_mlp_"
_COUNTS = {
    Counter.EXCHANGES: ("exchanges", "Exchanges served."),
    Counter.FAILED: ("failed_exchanges", "Exchanges declined because the experts raised."),
    Counter.REFUSED: ("refused_messages", "Messages declined by the protocol."),
    Counter.ATTACHES: ("attaches", "Attention servers that attached since the start."),
    Counter.LOST_PEERS: ("lost_peers", "Attention servers whose connection broke."),
    Counter.RUNS: ("expert_runs", "Runs of one layer's experts."),
    Counter.DECODE_RUNS: ("decode_runs", "Expert runs of decode units."),
    Counter.DECODE_RUN_PEERS: ("decode_run_peers", "Attention servers, summed over decode runs."),
    Counter.PREFILL_PIECES: ("prefill_pieces", "Expert runs of prefill rows."),
    Counter.ROUNDS: ("rounds", "Rounds of decode steps."),
    Counter.BOARDED: ("boarded_peers", "Attention servers that joined a round on its way."),
    Counter.PARKED: ("parked_peers", "Attention servers that a round went on without."),
    Counter.WINDOWS: ("windows", "Rounds held back for an attention server that was expected."),
    Counter.VAIN_WINDOWS: ("vain_windows", "Of these, after which one was still missing."),
    Counter.ONE_EXCHANGE_RUNS: ("lone_runs", "Decode exchanges run outside of any round."),
    Counter.DECODE_ROWS: ("decode_rows", "Rows of decode steps."),
    Counter.PREFILL_ROWS: ("prefill_rows", "Rows of prefill steps."),
    Counter.ROWS: ("rows", "Rows of all steps."),
    Counter.LAUNCHES: ("launches", "Units enqueued on a GPU."),
    Counter.GRAPH_RUNS: ("graph_runs", "Units launched as a CUDA graph."),
    Counter.EAGER_RUNS: ("eager_runs", "Units launched kernel by kernel."),
}
_TIMES = {
    Counter.WINDOW_NS: ("window_seconds", "Time that rounds were held back."),
    Counter.PREFILL_AGE_NS: ("prefill_age_seconds", "Time that prefill pieces waited."),
    Counter.WAIT_NS: ("wait_seconds", "Time spent waiting for rows."),
    Counter.RUN_NS: ("expert_run_seconds", "Time spent running experts."),
    Counter.REPLY_NS: ("reply_seconds", "Time spent sending partial sums."),
    Counter.LAUNCH_NS: ("launch_seconds", "The host's time to choose and enqueue units."),
}


class BoardCollector(Collector):
    """Reads the board whenever it is scraped."""

    def __init__(self, board: Board, *, rank: int, first_expert: int) -> None:
        self._board = board
        self._rank = str(rank)
        self._first_expert = first_expert

    def collect(self) -> Iterator[Metric]:
        """Every metric, labelled with the rank."""
        values = self._board.read()
        for counter, (name, text) in _COUNTS.items():
            yield self._counter(name, text, float(values[counter]))
        for counter, (name, text) in _TIMES.items():
            yield self._counter(name, text, values[counter] / 1e9)
        yield self._gauge("attached_peers", "Attention servers attached.", values[Counter.PEERS])
        yield self._gauge("waiting_exchanges", "Arrived and not run.", values[Counter.WAITING])
        yield self._gauge(
            "units_in_flight", "Enqueued on a GPU and not done.", values[Counter.IN_FLIGHT]
        )
        yield self._gauge(
            "parked_peers_now", "In a step and in no round.", values[Counter.PARKED_NOW]
        )
        yield self._gauge(
            "max_prefill_age_seconds",
            "Longest wait of a prefill piece.",
            values[Counter.MAX_PREFILL_AGE_NS] / 1e9,
        )
        yield self._gauge("loop_age_seconds", "Since the loop last turned.", self._board.age_s())
        rows = CounterMetricFamily(
            _PREFIX + "expert_rows", "Choices routed to an expert.", labels=["rank", "expert"]
        )
        for place, count in enumerate(self._board.rows_per_expert()):
            rows.add_metric([self._rank, str(self._first_expert + place)], count)
        yield rows

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(_PREFIX + name, text, labels=["rank"])
        family.add_metric([self._rank], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(_PREFIX + name, text, labels=["rank"])
        family.add_metric([self._rank], value)
        return family


def render(board: Board, *, rank: int, first_expert: int) -> bytes:
    """The exposition text of one scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(BoardCollector(board, rank=rank, first_expert=first_expert))
    return generate_latest(registry)
