"""What is measured: cases, the shape of the deployment, and how a case is shared by servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MARGIN_TOKENS = 16  # of each sequence, beyond its context and the steps
PROBE_TOKENS, PROBE_STEPS = 32, 2  # of the prompts whose logits are compared, and decoded after
PROBED_ROWS = 32  # of a batch at most; logits of a whole one are hundreds of megabytes
FIRST_BLOCK_S = 250.0  # FlashInfer and DeepGEMM compile for minutes on a fresh machine
PREFILLED_TAIL = 16  # tokens that are really prefilled behind a context of random keys and values


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the results: so many sequences with so many tokens of context."""

    batch: int  # of all attention servers together
    context: int

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        return f"{self.batch}x{self.context}"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that is the same for all cases of a run."""

    model: str  # a name of models.MODELS
    model_path: str
    is_dummy: bool  # weights by seed, see weights.py
    device: str
    dtype: str  # "" leaves it to the model
    num_attn: int
    num_mlp: int
    micro_batches: str
    rounds: str  # on or off
    wait_policy: str  # as --afd-wait-policy
    attention_backend: str
    moe_runner_backend: str
    dispatch_dtype: str  # as --afd-dispatch-dtype
    sm_share: str  # percent for attention and experts, with a comma between; "" for none
    with_mps: bool
    context_kind: str  # cached or prefilled
    steps: int  # timed
    warm_steps: int  # before them
    profile_steps: int  # 0 for none
    colocated_flags: tuple[str, ...] = field(default=())
    attn_flags: tuple[str, ...] = field(default=())
    mlp_flags: tuple[str, ...] = field(default=())

    @property
    def steps_of_case(self) -> int:
        """How far a sequence grows: warm-up, timed steps, one for the routing, the profile."""
        return self.warm_steps + 2 * self.steps + 2 + 2 * self.profile_steps

    @property
    def label(self) -> str:
        """What tells this deployment from others of the same run, for people."""
        parts = [f"{self.num_attn}+{self.num_mlp}"]
        parts += [f"{self.micro_batches} micro-batches"] if self.micro_batches != "1" else []
        parts += ["rounds off"] if self.rounds == "off" else []
        parts += [f"{self.dispatch_dtype} rows"] if self.dispatch_dtype != "auto" else []
        parts += [self.wait_policy] if self.wait_policy != "auto" else []
        parts += [f"SMs {self.sm_share}"] if self.sm_share else []
        parts += [] if self.with_mps else ["no MPS"]
        return ", ".join([*parts, *self.attn_flags, *self.mlp_flags])


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One deployment of split roles, and what it is measured with."""

    setup: Setup
    cases: Sequence[Case]

    @property
    def probe_rows(self) -> int:
        """Sequences of each server whose logits are compared: a full bucket of a timed graph.

        Of fewer a step in micro-batches would not be cut.
        """
        return min(case.batch for case in self.cases) // self.setup.num_attn

    @property
    def rounds_as_stock(self) -> bool:
        """Does every kernel see as many rows as in stock SGLang, and round as it does there?"""
        setup = self.setup
        in_one = (setup.num_attn, setup.num_mlp, setup.micro_batches) == (1, 1, "1")
        return in_one and setup.dispatch_dtype == "auto"


def cases_of(variants: Sequence[Variant]) -> list[Case]:
    """Those of all variants, each once: what the colocated side runs."""
    return list(dict.fromkeys(case for variant in variants for case in variant.cases))


def probe_sizes(variants: Sequence[Variant]) -> list[int]:
    """Batches in which the colocated side computes the logits that others are compared with.

    Of each size that a server has. Where that does not round as stock SGLang does, also of half of
    it, since what differs between the two is rounding.
    """
    sizes = {variant.probe_rows for variant in variants}
    others = {variant.probe_rows for variant in variants if not variant.rounds_as_stock}
    return sorted(sizes | {max(1, size // 2) for size in others})


def probed_rows(num_rows: int) -> list[int]:
    """Which rows of a batch have their logits compared, evenly over it.

    Of two batches one of which is half of the other, every second row is in both.
    """
    return list(range(0, num_rows, max(1, num_rows // PROBED_ROWS)))[:PROBED_ROWS]


def parse_cases(text: str) -> list[Case]:
    """Cases such as `64x1024,128x2048`.

    Raises:
        ValueError: One is not two positive numbers, or is there twice.
    """
    cases = [_parse_case(item.strip()) for item in text.split(",")]
    if len(set(cases)) != len(cases):
        raise ValueError(f"{text} names a case twice")
    return cases


def _parse_case(text: str) -> Case:
    batch, _, context = text.partition("x")
    if not (batch.isdigit() and context.isdigit() and int(batch) and int(context)):
        raise ValueError(f"{text!r} is not a case; write batch x context, e.g. 64x1024")
    if int(context) <= PREFILLED_TAIL:
        raise ValueError(f"the context of {text} must be above {PREFILLED_TAIL} tokens")
    return Case(batch=int(batch), context=int(context))


def check_divides(cases: Sequence[Case], num_attn: int) -> None:
    """Every attention server gets as many sequences as the others.

    Raises:
        ValueError: A batch does not divide.
    """
    for case in cases:
        if case.batch % num_attn:
            raise ValueError(f"the batch of {case.name} does not divide by {num_attn} servers")


def pool_tokens(
    cases: Sequence[Case], steps_of_case: int, num_servers: int, probe_rows: int
) -> int:
    """Tokens that the key-value pool of each of `num_servers` must hold."""
    most = max(
        case.batch // num_servers * (case.context + steps_of_case + MARGIN_TOKENS) for case in cases
    )
    return max(most, probe_rows * (PROBE_TOKENS + PROBE_STEPS + MARGIN_TOKENS))
