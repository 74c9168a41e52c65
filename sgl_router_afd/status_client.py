"""Asks a router for `/afd/v1/groups`, and says plainly why it got no answer."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request

import msgspec
from yarl import URL

from sgl_router_afd.api.shapes import VERSION, ErrorAnswer, GroupsAnswer
from sglang_afd.errors import AfdError, ConfigError

GROUPS_PATH = "/afd/v1/groups"
TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 64 * 1024 * 1024
MAX_DETAIL = 500


class NoAnswer(AfdError):
    """The router was not reached, or did not tell."""


class _Versioned(msgspec.Struct):
    version: int


def base_of(text: str) -> str:
    """The router's address, without a path.

    Raises:
        ConfigError: It is none.
    """
    wanted = "wanted the router's http://host:port"
    try:
        url = URL(text if "://" in text else f"http://{text}")
        port = url.port
    except ValueError as error:
        raise ConfigError(f"URL is {text!r} ({error}); {wanted}") from error
    if url.scheme not in ("http", "https") or not url.host or url.user or url.path not in ("", "/"):
        raise ConfigError(f"URL is {text!r}; {wanted}")
    return str(URL.build(scheme=url.scheme, host=url.host, port=port)).rstrip("/")


def fetch(base: str, key: bytes) -> bytes:
    """The router's answer.

    Args:
        base: Of `base_of`.
        key: The admin key; empty for none.

    Raises:
        NoAnswer: With what to do.
    """
    request = urllib.request.Request(base + GROUPS_PATH, headers={"Accept": "application/json"})
    if key:
        request.add_unredirected_header("Authorization", f"Bearer {key.decode('latin-1')}")
    # No proxy of the environment: a router is asked directly, as servers ask it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as response:
            body: bytes = response.read(MAX_ANSWER_BYTES)
            return body
    except urllib.error.HTTPError as error:
        raise NoAnswer(_why_refused(base, error)) from None
    except urllib.error.URLError as error:
        raise NoAnswer(_why_unreached(base, error.reason)) from None
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(_why_unreached(base, error)) from None


def decode(base: str, body: bytes) -> GroupsAnswer:
    """Read it.

    Raises:
        NoAnswer: It is of another version, or of something that is no router.
    """
    try:
        version = msgspec.json.decode(body, type=_Versioned).version
        if version != VERSION:
            raise NoAnswer(
                f"the router at {base} answers in version {version}, this program reads "
                f"{VERSION}; install the same sglang-afd on both"
            )
        return msgspec.json.decode(body, type=GroupsAnswer)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NoAnswer(
            f"what {base}{GROUPS_PATH} answers is not of an sglang-afd router: {error}"
        ) from None


def _why_refused(base: str, error: urllib.error.HTTPError) -> str:
    try:
        text = error.read(MAX_ANSWER_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        text = ""
    try:
        text = msgspec.json.decode(text, type=ErrorAnswer).error.message
    except msgspec.MsgspecError:
        text = text.strip()
    detail = f": {text[:MAX_DETAIL]}" if text else ""
    if error.code in (401, 403):
        todo = "; give the router's admin key with --admin-api-key-file FILE"
    elif error.code == 404:
        todo = "; is that an sglang-afd router?"
    else:
        todo = ""
    return f"{base} answers {error.code} for {GROUPS_PATH}{detail}{todo}"


def _why_unreached(base: str, reason: object) -> str:
    if isinstance(reason, TimeoutError):
        return f"the router at {base} does not answer within {TIMEOUT_S:.0f} s"
    if isinstance(reason, ConnectionRefusedError):
        return (
            f"nobody listens at {base}; is the router started, and is that its --host and --port?"
        )
    return f"the router at {base} cannot be reached: {reason}"
