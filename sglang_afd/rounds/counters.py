"""What the rounds did, in numbers that only grow, to show convoys while they happen (pure)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RoundCounters:
    """Sums since the start, but for `parked_peers` and `max_prefill_age_s`."""

    units: int = 0  # decode units
    unit_peers: int = 0
    unit_rows: int = 0
    rounds: int = 0
    merged: int = 0  # peers that boarded a round on its way
    split: int = 0  # peers that were parked
    parked_peers: int = 0  # in the middle of a step and in no round, now
    windows: int = 0  # rounds that were held back for a peer that was not there
    vain_windows: int = 0  # of these, after which a peer was missing
    window_s: float = 0.0
    prefill_pieces: int = 0
    prefill_rows: int = 0
    prefill_age_s: float = 0.0  # time that pieces waited
    max_prefill_age_s: float = 0.0
    one_exchange_runs: int = 0  # decode exchanges that were out of place in their peer's round
    repeated: int = 0  # exchanges that were here already, and were ignored
