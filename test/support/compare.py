"""Run the same prompts on two servers and say where the answers differ."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from servers import fetch

NUM_TOKENS = 24
LOGPROB_BOUND = 1e-4  # fp32; two colocated runs with other batch shapes differ by about 1e-6

_TEXT = "the cache keeps attention while experts answer every token with one sum of a few"
_WORDS = _TEXT.split(" ")
PROMPTS = tuple(
    " ".join(_WORDS[(start + step * (1 + start % 3)) % len(_WORDS)] for step in range(length))
    # Lengths from one piece of one chunk to several pieces of several chunks.
    for start, length in enumerate((3, 5, 40, 7, 9, 90, 4, 12, 6, 25, 8, 3, 150, 11, 5, 17))
)


@dataclass(frozen=True)
class Answer:
    """Greedy tokens and the logprob of each."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def ask(url: str, prompt: str, num_tokens: int = NUM_TOKENS, *, timeout_s: float = 120.0) -> Answer:
    """One greedy generation over the native endpoint."""
    body = {
        "text": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": -1,
    }
    status, answer = fetch(f"{url}/generate", body, timeout_s=timeout_s)
    if status != 200:
        raise AssertionError(f"{url} answered {status}: {answer}")
    pairs = answer["meta_info"]["output_token_logprobs"]
    # What is no number comes as null.
    logprobs = (float("nan") if pair[0] is None else pair[0] for pair in pairs)
    return Answer(tuple(pair[1] for pair in pairs), tuple(logprobs))


def ask_one_by_one(url: str, prompts: Sequence[str] = PROMPTS) -> list[Answer]:
    """Batches of one."""
    return [ask(url, prompt) for prompt in prompts]


def ask_at_once(urls: Sequence[str], prompts: Sequence[str] = PROMPTS) -> list[Answer]:
    """All prompts concurrently, each on the next of `urls`."""
    targets = [urls[index % len(urls)] for index in range(len(prompts))]
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, targets, prompts))


def largest_distance(expected: Sequence[Answer], got: Sequence[Answer]) -> float:
    """Of two logprobs at the same place, as far as the tokens before it are the same."""
    apart = [0.0]
    for want, have in zip(expected, got, strict=True):
        pairs = zip(want.token_ids, have.token_ids, want.logprobs, have.logprobs, strict=True)
        for token, other, logprob, other_logprob in pairs:
            if token != other:
                break
            apart.append(abs(logprob - other_logprob))
    return max(apart)


def differences(
    expected: Sequence[Answer], got: Sequence[Answer], bound: float = LOGPROB_BOUND
) -> list[str]:
    """Where tokens differ, or logprobs by more than `bound`; empty when all agree."""
    found = []
    for index, (want, have) in enumerate(zip(expected, got, strict=True)):
        if want.token_ids != have.token_ids:
            place = next(
                (
                    at
                    for at, (a, b) in enumerate(zip(want.token_ids, have.token_ids, strict=False))
                    if a != b
                ),
                min(len(want.token_ids), len(have.token_ids)),
            )
            found.append(f"prompt {index}: first different token at {place}")
            continue
        apart = [abs(a - b) for a, b in zip(want.logprobs, have.logprobs, strict=True)]
        if not all(distance <= bound for distance in apart):  # also where one is no number
            found.append(f"prompt {index}: same tokens, logprobs differ by {max(apart):.2e}")
    return found
