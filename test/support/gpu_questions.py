"""What the GPU tests ask servers, and how far two servers' answers are apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import mean
from typing import Any, TypeVar

from compare import PROMPTS, Answer, ask
from servers import Server, fetch

T = TypeVar("T")
ALONE = PROMPTS[:3]
# Of different lengths, and so many tokens that the batch shrinks from sixteen to one.
CROWD = tuple((prompt, 6 + 7 * index % 34) for index, prompt in enumerate(PROMPTS))
NUM_TOKENS = 24
STRIDE = 6  # tokens that are generated after each cut of a text
NUM_TOP = 64  # of some 360 tokens; quantised rows move a likely one far down
PATIENCE_S = 60.0  # a fresh machine compiles kernels meanwhile

# One rank adds the experts' outputs as stock SGLang does. Two ranks add them in another order, and
# SGLang's MoE kernel rounds to float16 what it computes in float32, which makes such a difference
# larger in the layers that follow; a top-k weight one percent off moves logprobs by 1e-2 and more.
LOGPROB_BOUND = 2e-3
# Of bfloat16: what another batch moves in stock SGLang. A few positions are further apart, where a
# token falls to another expert because two are equally likely.
AT_90_PERCENT = 5e-2
MEAN = 3e-2


@dataclass(frozen=True)
class Answers:
    """Of one server, or of several that take turns."""

    alone: list[Answer]
    crowd: list[Answer]

    def all(self) -> list[Answer]:
        """One after the other."""
        return [*self.alone, *self.crowd]


def ask_all(urls: Sequence[str]) -> Answers:
    """Some prompts alone, then all at once."""
    return Answers(
        [ask(urls[0], prompt, timeout_s=PATIENCE_S) for prompt in ALONE], ask_crowd(urls)
    )


def ask_crowd(urls: Sequence[str]) -> list[Answer]:
    """All at once, each on the next of `urls`."""
    return at_once(lambda number: _ask(urls[number % len(urls)], number), len(CROWD))


def at_once(ask_one: Callable[[int], T], number: int) -> list[T]:
    """`ask_one` of 0, 1, ... in threads; a failure, or a time-out, does not wait for the others."""
    pool = ThreadPoolExecutor(number)
    try:
        return list(pool.map(ask_one, range(number)))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _ask(url: str, number: int) -> Answer:
    return ask(url, *CROWD[number], timeout_s=PATIENCE_S)


def forget_prefixes(servers: Sequence[Server]) -> None:
    """Neither a fault nor a comparison may hide behind cached prefixes."""
    for server in servers:
        status, answer = fetch(f"{server.url}/flush_cache", {})
        assert status == 200, answer


@dataclass(frozen=True)
class Text:
    """A prompt and what stock SGLang generated after it; a server is asked to go on inside it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]

    def before(self, cut: int) -> list[int]:
        """What comes before token `cut`."""
        return [*self.prompt, *self.tokens[:cut]]


@dataclass(frozen=True)
class Continuation:
    """What a server says after a given text: a token for each position, and the likeliest ones."""

    tokens: tuple[int, ...]
    top: tuple[dict[int, float], ...]  # logprobs by token
    of_text: tuple[float, ...]  # logprob of each token of the text but the first, by prefill


@dataclass(frozen=True)
class Distance:
    """How far logprobs are apart where both servers were given the same text."""

    largest: float
    at_90_percent: float  # of the positions it is at most this
    mean: float
    num_positions: int
    share_compared: float  # of positions; those after a different token are not

    def __str__(self) -> str:
        return (
            f"largest {self.largest:.2e}, 90 % {self.at_90_percent:.2e}, mean {self.mean:.2e} over "
            f"{self.num_positions} positions ({self.share_compared:.1%})"
        )


def write_texts(url: str) -> list[Text]:
    """What stock SGLang generates greedily, with the tokens of its prompts."""
    return at_once(lambda number: _write_text(url, PROMPTS[number]), len(PROMPTS))


def _write_text(url: str, prompt: str) -> Text:
    answer = _generate(url, text=prompt, logprob_start_len=0, num_tokens=NUM_TOKENS)
    pairs = answer["meta_info"]["input_token_logprobs"]
    return Text(tuple(pair[1] for pair in pairs), tuple(answer["output_ids"]))


def continue_texts(urls: Sequence[str], texts: Sequence[Text]) -> list[Continuation]:
    """Go on inside every text, each on the next of `urls`, all at once.

    Each place is asked with what stock SGLang had before it, so that one token that falls out
    differently does not change what comes after.
    """
    places = [(text, cut) for text in texts for cut in range(0, NUM_TOKENS, STRIDE)]
    return at_once(lambda number: _continue(urls[number % len(urls)], *places[number]), len(places))


def _continue(url: str, text: Text, cut: int) -> Continuation:
    before = text.before(cut)
    is_last = cut == NUM_TOKENS - STRIDE
    answer = _generate(
        url,
        input_ids=before,
        num_tokens=STRIDE,
        logprob_start_len=0 if is_last else -1,
        top_logprobs_num=NUM_TOP,
    )
    info = answer["meta_info"]
    return Continuation(
        tokens=tuple(answer["output_ids"]),
        top=tuple({pair[1]: pair[0] for pair in place} for place in info["output_top_logprobs"]),
        of_text=tuple(pair[0] for pair in info["input_token_logprobs"][1:]) if is_last else (),
    )


def gap_at_first_difference(
    url: str, prompt: str, expected: Sequence[int], got: Sequence[int]
) -> tuple[int, float] | None:
    """Where two generations part, and how far apart the server finds the two tokens there.

    Returns: Position and difference of the logprobs, of which neither is near 0 where one token is
        clearly the likelier one; None where they are equal.
    """
    if list(expected) == list(got):
        return None
    pairs = enumerate(zip(expected, got, strict=True))
    place = next(place for place, (want, have) in pairs if want != have)
    answer = _generate(url, text=prompt, logprob_start_len=0, num_tokens=1)
    ids = [pair[1] for pair in answer["meta_info"]["input_token_logprobs"]]
    answer = _generate(
        url, input_ids=[*ids, *expected[:place]], num_tokens=1, top_logprobs_num=NUM_TOP
    )
    [top] = answer["meta_info"]["output_top_logprobs"]
    found = {pair[1]: pair[0] for pair in top}
    infinite = float("inf")
    likeliest = max(found.values())
    return place, max(
        likeliest - found.get(token, -infinite) for token in (expected[place], got[place])
    )


def distance(expected: Sequence[Continuation], got: Sequence[Continuation]) -> Distance:
    """Compare two servers' words on the same texts.

    Where the tokens fall out differently the position itself is still compared: what counts is
    how likely the reference's tokens are to the other server.
    """
    apart: list[float] = []
    num_positions = 0
    for want, have in zip(expected, got, strict=True):
        num_positions += len(want.tokens) + len(want.of_text)
        for a, b in zip(want.of_text, have.of_text, strict=True):
            apart.append(float("inf") if b is None else abs(a - b))
        for place, token in enumerate(want.tokens):
            apart.append(_apart(want.top[place], have.top[place]))
            if have.tokens[place] != token:
                break
    apart.sort()
    return Distance(
        largest=apart[-1],
        at_90_percent=apart[int(0.9 * len(apart))],
        mean=mean(apart),
        num_positions=len(apart),
        share_compared=len(apart) / num_positions,
    )


def _apart(want: dict[int, float], have: dict[int, float]) -> float:
    """Of the reference's two likeliest tokens; one that the other does not list is infinitely far.

    Also where a logprob is no number.
    """
    likeliest = sorted(want, key=lambda token: -want[token])[:2]
    # What is no number comes as null.
    pairs = [(want[token], have.get(token)) for token in likeliest]
    return max(float("inf") if b is None else abs(a - b) for a, b in pairs)


def _generate(url: str, *, num_tokens: int, **body: Any) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    status, answer = fetch(
        f"{url}/generate",
        {"sampling_params": sampling, "return_logprob": True, **body},
        timeout_s=PATIENCE_S,
    )
    if status != 200:
        raise AssertionError(f"{url} answered {status}: {answer}")
    return answer
