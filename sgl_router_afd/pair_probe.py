"""The I/O of a pair probe: one generated token, asked of one attention server."""

from __future__ import annotations

import uuid

import aiohttp
import msgspec

from sgl_router_afd.control.plane import Probe
from sgl_router_afd.control.probe import Outcome, outcome_of
from sgl_router_afd.keys import Key
from sgl_router_afd.upstream_session import describe, read_at_most

GENERATE = "/generate"
REQUEST_ID_PREFIX = "afd-pair-probe-"  # so that people find, and tests know, these requests
MAX_ANSWER_BYTES = 1024 * 1024
SHOWN_CHARS = 200


class _Meta(msgspec.Struct, frozen=True):
    completion_tokens: int = 0


class _Answer(msgspec.Struct, frozen=True):
    """The part of SGLang's answer that counts."""

    meta_info: _Meta = _Meta()


async def make_probe(
    probe: Probe, session: aiohttp.ClientSession, *, api_key: Key, timeout_s: float
) -> tuple[Outcome, str]:
    """Ask for one token.

    Returns: What came of it, and the answer or the error, for people.
    """
    request_id = REQUEST_ID_PREFIX + uuid.uuid4().hex
    body = msgspec.json.encode(
        {
            "input_ids": [1],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            "stream": False,
            "rid": request_id,
        }
    )
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key.value.decode()}"
    try:
        async with session.post(
            probe.url + GENERATE,
            data=body,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            allow_redirects=False,
        ) as answer:
            return _judge(answer.status, await read_at_most(answer, MAX_ANSWER_BYTES))
    except TimeoutError:
        return Outcome.STALLED, f"no answer within {timeout_s:g} s"
    except aiohttp.ClientConnectorError as error:
        return Outcome.UNREACHABLE, describe(error)
    except aiohttp.ClientError as error:
        return Outcome.FAILED, describe(error)


def _judge(http_status: int, body: bytes) -> tuple[Outcome, str]:
    shown = body[:SHOWN_CHARS].decode(errors="replace")
    if http_status != 200:
        return outcome_of(http_status, 0), f"HTTP {http_status}: {shown}"
    try:
        num_tokens = msgspec.json.decode(body, type=_Answer).meta_info.completion_tokens
    except (msgspec.MsgspecError, UnicodeDecodeError):
        num_tokens = 0
    return outcome_of(http_status, num_tokens), "" if num_tokens else f"no token in {shown!r}"
