"""What a closed form leaves out: jitter, prefill, servers that hang, servers that are lost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sglang_afd.errors import ConfigError
from sglang_afd.planner import checks


class Lost(Enum):
    """Which kind of server fails."""

    MLP = "mlp"  # one rank; its whole group stands still until it is back
    ATTENTION = "attention"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One server that ends. Groups and the servers in one count from 0."""

    lost: Lost
    group: int = 0
    index: int = 0
    at_us: float
    back_after_us: float | None = None  # until it is attached again; None: never

    def __post_init__(self) -> None:
        for name in ("group", "index", "at_us"):
            checks.not_negative("failure", name, getattr(self, name))
        if self.back_after_us is not None:
            checks.positive("failure", "back_after_us", self.back_after_us)


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """Shares are standard deviations relative to the mean; all 0 is a machine without noise."""

    attn_jitter: float = 0.0  # of each layer and micro-batch
    mlp_jitter: float = 0.0  # of each run on each rank
    exchange_jitter: float = 0.0  # of each way of each exchange
    gap_jitter: float = 0.0  # of what lies between two steps
    context_memory: float = 0.98  # how much a server's load of one step tells of its next
    start_spread: float = 1.0  # servers start at random within so many steps
    prefill_per_step: float = 0.0  # probability that a decode step is followed by a prefill
    prefill_tokens: tuple[int, ...] = (512, 2048)  # fewest and most
    stall_per_step: float = 0.0  # probability that a server hangs once in a step
    stall_us: tuple[float, ...] = (50_000.0, 200_000.0)  # shortest and longest
    notice_us: float = 0.0  # until the MLP side knows that an attention server is lost
    failures: tuple[Failure, ...] = ()

    def __post_init__(self) -> None:
        owner = "disturbance"
        for name in _SHARES:
            value = getattr(self, name)
            checks.not_negative(owner, name, value)
            if value > 1:
                raise ConfigError(f"{owner}: {name} is {value}, a share: 5 % is 0.05")
        checks.not_negative(owner, "start_spread", self.start_spread)
        checks.not_negative(owner, "notice_us", self.notice_us)
        _range(owner, "prefill_tokens", self.prefill_tokens)
        _range(owner, "stall_us", self.stall_us)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is drawn but the start."""
        return not any(getattr(self, name) for name in _SHARES if name != "context_memory")


_SHARES = (
    *("attn_jitter", "mlp_jitter", "exchange_jitter", "gap_jitter"),
    *("context_memory", "prefill_per_step", "stall_per_step"),
)


def _range(owner: str, name: str, value: tuple[float, ...]) -> None:
    if len(value) != 2 or not 0 < value[0] <= value[1]:
        raise ConfigError(
            f"{owner}: {name} is {list(value)}; wanted two numbers above 0, the lower one first"
        )


QUIET = Disturbance()
# Source: the noise under which the round rules were chosen (benchmark/rounds_simulation.py):
# 5 % a layer, transfers of 6 to 10 us, gaps of +-30 %.
TYPICAL = Disturbance(attn_jitter=0.05, mlp_jitter=0.03, exchange_jitter=0.15, gap_jitter=0.15)
