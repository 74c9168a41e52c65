"""One attention server: goes through its steps as its one thread, or stream, does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import add

from sglang_afd.planner.simulator.accounts import Account
from sglang_afd.planner.simulator.plan import ServerCosts, StepPlan
from sglang_afd.planner.simulator.timeline import Interval, Span
from sglang_afd.rounds.units import Member

Emit = Callable[["Server", int, float], None]  # op, when its rows leave


@dataclass(slots=True)
class Service:
    """What became of one exchange; for the accounts."""

    sent_us: float
    arrived_us: float
    last_arrived_us: float  # of all members of its unit
    start_us: float
    end_us: float
    reply_us: float = 0.0


@dataclass(slots=True)
class Counts:
    """Exchanges of one server. Sent = answered + lost + still under way."""

    sent: int = 0
    answered: int = 0
    lost: int = 0  # with the server that had sent them
    resent: int = 0  # of those, again, since MLP servers were away


@dataclass(frozen=True, slots=True)
class Step:
    """One that ended."""

    is_prefill: bool
    began_us: float
    ended_us: float
    tokens: float


@dataclass(slots=True, eq=False)
class Server:
    """Computes ahead: an op whose inputs have a known time is done at once, and leaves later."""

    number: int
    num_layers: int
    costs: ServerCosts
    warm_steps: int
    step: int = 0
    plan: StepPlan | None = None
    is_alive: bool = True
    incarnation: int = 0
    free_us: float = 0.0
    began_us: float = 0.0
    next_op: int = 0
    num_ended: int = 0  # decode steps
    steps: list[Step] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    account: Account = field(init=False)
    intervals: list[Interval] = field(default_factory=list)
    span: Span | None = None
    downs: list[tuple[float, float]] = field(default_factory=list)  # MLP servers away, shared
    _sent: dict[int, tuple[int, float]] = field(default_factory=dict)  # by micro-batch: op, when
    _arrived: dict[int, float] = field(default_factory=dict)
    _replies: list[Service | None] = field(default_factory=list)
    _step_account: Account = field(init=False)
    _ended_us: float = 0.0
    _lost_us: float = 0.0

    def __post_init__(self) -> None:
        self.account = Account(self.num_layers)
        self._step_account = Account(self.num_layers)

    def idle_until(self, now_us: float) -> None:
        """Time before its first step is on no account."""
        self._ended_us = now_us

    def begin(self, now_us: float) -> bool:
        """Start the next step; False when a recording has no more."""
        plan = self.costs.next_step()
        if plan is None:
            self.plan = None
            return False
        self.plan = plan
        self.step += 1
        self.began_us = self.free_us = now_us
        self.next_op = 0
        first = Service(now_us, now_us, now_us, now_us, now_us, now_us)
        self._replies = [first] * plan.num_micro_batches
        self._step_account.sums["outside"] += now_us - self._ended_us
        return True

    def advance(self, emit: Emit) -> float | None:
        """Go on as far as replies are known; when the step is over, when it ended."""
        plan = self.plan
        assert plan is not None, "no step was begun"
        parts, replies, attn_us = len(plan.rows), self._replies, plan.attn_us
        num_ops = self.num_layers * parts
        while self.next_op < num_ops:
            op = self.next_op
            part = op % parts
            reply = replies[part]
            if reply is None:
                return None
            start_us = self._take(plan, reply, op - parts)
            leaves_us = start_us + attn_us[op]
            self._step_account.sums["attention"] += attn_us[op]
            if self.span is not None and self.span.has(self.num_ended):
                self._show(plan, op, start_us, leaves_us)
            self.free_us = leaves_us
            if plan.send_us:
                self.free_us += plan.send_us[op]
                self._step_account.sums["exchange"] += plan.send_us[op]
            replies[part] = None
            self._sent[part] = (op, leaves_us)
            self.counts.sent += 1
            self.next_op += 1
            emit(self, op, leaves_us)
        while self.next_op < num_ops + parts:
            reply = replies[self.next_op - num_ops]
            if reply is None:
                return None
            self.free_us = self._take(plan, reply, self.next_op - parts)
            self.next_op += 1
        return self._end(plan)

    def member(self, op: int) -> Member:
        """The exchange of an op of the present step."""
        plan = self.plan
        assert plan is not None, "no step was begun"
        layer_id, part = divmod(op, len(plan.rows))
        return Member(
            peer=self.number,
            micro_batch_id=part,
            step=self.step,
            layer_id=layer_id,
            num_rows=plan.rows[part],
            num_micro_batches=len(plan.rows),
            is_prefill=plan.is_prefill,
        )

    def waits_for(self, member: Member) -> bool:
        """Whether this exchange still has to be answered."""
        plan = self.plan
        if not self.is_alive or plan is None or member.step != self.step:
            return False
        sent = self._sent.get(member.micro_batch_id)
        return sent is not None and sent[0] // len(plan.rows) == member.layer_id

    def rows_at_us(self, part: int) -> list[float]:
        """When each rank has the rows of this micro-batch; one number is for all."""
        assert self.plan is not None, "no step was begun"
        op, left_us = self._sent[part]
        return list(map(left_us.__add__, self.plan.out_us[op]))

    def arrived(self, part: int, now_us: float) -> None:
        """Rank 0 has the rows."""
        self._arrived[part] = now_us

    def arrived_us(self, part: int) -> float:
        """When rank 0 had the rows."""
        return self._arrived[part]

    def replied(self, part: int, service: Service, ends_us: Sequence[float]) -> None:
        """Each rank has run this micro-batch; its result will be here as soon as all replies are.

        Args:
            part: Micro-batch.
            service: What became of the exchange; the reply's time is filled in.
            ends_us: When each rank had run it.
        """
        assert self._replies[part] is None, f"micro-batch {part} is answered twice"
        assert self.plan is not None, "no step was begun"
        op, service.sent_us = self._sent.pop(part)
        back_us = self.plan.back_us[op]
        if len(back_us) == 1:
            service.reply_us = service.end_us + back_us[0]
        else:
            service.reply_us = max(map(add, ends_us, back_us))
        self._replies[part] = service
        self.counts.answered += 1

    def pending(self) -> list[tuple[int, float]]:
        """(op, when its rows left) of what has no answer, in order."""
        return sorted(self._sent.values())

    def lose(self, now_us: float) -> None:
        """The server ends, with all that it was doing."""
        self.is_alive = False
        self.incarnation += 1
        self.counts.lost += len(self._sent)
        self._sent.clear()
        self._step_account.clear()
        self._step_account.sums["failure"] += now_us - self._ended_us
        self._lost_us = now_us

    def come_back(self, now_us: float) -> None:
        """It starts anew."""
        self.is_alive = True
        self._step_account.sums["failure"] += now_us - self._lost_us
        self._ended_us = now_us

    def stand_still(self, until_us: float) -> None:
        """MLP servers never came back: from its last step on, all time is lost."""
        if self.is_alive and self.num_ended >= self.warm_steps:
            self.account.sums["failure"] += max(until_us - self._ended_us, 0.0)

    # The thread

    def _take(self, plan: StepPlan, reply: Service, op: int) -> float:
        """Wait for the result of `op`, and add it up; returns when the thread goes on."""
        if op < 0:
            return max(self.free_us, reply.reply_us)
        if reply.reply_us > self.free_us:
            self._book(reply, op // len(plan.rows))
            self.free_us = reply.reply_us
        if plan.combine_us:
            self.free_us += plan.combine_us[op]
            self._step_account.sums["exchange"] += plan.combine_us[op]
        return self.free_us

    def _book(self, service: Service, layer: int) -> None:
        """Shorten any phase of an exchange and its wait is as much shorter: each has its share."""
        account, is_first = self._step_account, layer == 0
        sums = account.last if layer == self.num_layers - 1 else account.sums
        waited_us = service.reply_us - self.free_us
        sent_us = service.sent_us
        if self.downs:
            waited_us, sent_us = self._book_downs(sums, service, waited_us)
        share = waited_us / max(service.reply_us - sent_us, 1e-9)
        on_the_way_us = service.arrived_us - sent_us + service.reply_us - service.end_us
        barrier_us = service.last_arrived_us - service.arrived_us
        sums["exchange"] += share * on_the_way_us
        sums["round" if is_first else "barrier"] += share * barrier_us
        queue_us = service.start_us - service.last_arrived_us
        sums["round" if is_first else "queue"] += share * queue_us
        sums["experts"] += share * (service.end_us - service.start_us)

    def _book_downs(
        self, sums: dict[str, float], service: Service, waited_us: float
    ) -> tuple[float, float]:
        """Time in which MLP servers were away, and the rest: wait, and when rows left again."""
        sent_us = service.sent_us
        for down_us, up_us in self.downs:
            if sent_us < up_us <= service.arrived_us and self.free_us < up_us:
                lost_us = up_us - max(self.free_us, down_us)
                sums["failure"] += lost_us
                waited_us -= lost_us
                sent_us = up_us
        return waited_us, sent_us

    def _end(self, plan: StepPlan) -> float:
        end_us, account = self.free_us, self._step_account
        self._ended_us = end_us
        self.steps.append(Step(plan.is_prefill, self.began_us, end_us, plan.tokens))
        if plan.is_prefill:
            took_us = account.total_us
            account.clear()
            account.sums["prefill"] += took_us
            return end_us
        self.num_ended += 1
        if self.num_ended > self.warm_steps:
            self.account.add(account)
        account.clear()
        return end_us

    def _show(self, plan: StepPlan, op: int, start_us: float, end_us: float) -> None:
        layer, part = divmod(op, len(plan.rows))
        name = "prefill" if plan.is_prefill else "attention"
        self.intervals.append(
            Interval(f"attn {self.number}", name, start_us, end_us, self.num_ended, layer, part)
        )
