"""Who may call what: keys, and the loopback rule where there is no admin key."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from sgl_router_afd.api.answers import ApiError
from sgl_router_afd.api.endpoint import Access, Endpoint
from sgl_router_afd.config import RouterConfig
from sgl_router_afd.keys import Key
from sglang_afd.protocol.auth import is_loopback

GUARDED = ("/afd/v1/", "/workers")
ASK_FOR_KEY = {"WWW-Authenticate": "Bearer"}


class Guard:
    """Lets a request through, or says why not.

    Args:
        config: Has the keys and the address.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._client = config.api_key
        self._admin = config.admin_api_key
        self._secret = config.afd_secret
        self._host = config.host

    def check(self, access: Access, request: web.Request) -> None:
        """Raises: ApiError, if the caller may not do that."""
        match access:
            case Access.CLIENT:
                _check_key(request, self._client, "--api-key")
            case Access.READ:
                _check_key(request, self._admin, "--admin-api-key")
            case Access.CHANGE:
                self._check_may_change(request)
            case Access.SERVER:
                if not self._secret:
                    _refuse_other_sites(request)

    def _check_may_change(self, request: web.Request) -> None:
        if not self._admin and not is_loopback(self._host):
            raise ApiError(
                403,
                f"this router listens on {self._host} and has no admin key, so nobody may change "
                "anything; start it with --admin-api-key-file FILE, or with --host 127.0.0.1",
            )
        _check_key(request, self._admin, "--admin-api-key")
        if not self._admin:
            _refuse_other_sites(request)


def guarding(guard: Guard, endpoints: Iterable[Endpoint]) -> Middleware:
    """A middleware that checks every request before its handler sees it."""
    known = {(one.method, one.path): one.access for one in endpoints}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        method = "GET" if request.method == "HEAD" else request.method
        access = known.get((method, resource.canonical if resource else ""))
        guard.check(access or _access_of_other(request.path), request)
        return await handler(request)

    return check


def _access_of_other(path: str) -> Access:
    """Of a path that the API does not serve itself, or not with this method."""
    return Access.READ if path.startswith(GUARDED) else Access.OPEN


def _check_key(request: web.Request, key: Key, flag: str) -> None:
    if not key:
        return
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    is_right = key.is_equal_to(given.strip().encode("utf-8", "surrogateescape"))
    if scheme.lower() == "bearer" and is_right:
        return
    what = "the key is wrong" if given else "a key is missing"
    raise ApiError(
        401, f"{what}; send Authorization: Bearer KEY with the key of {flag}", ASK_FOR_KEY
    )


def _refuse_other_sites(request: web.Request) -> None:
    """Where no key is asked for, a page of another site could act through a visitor's browser."""
    origin = request.headers.get("Origin")
    if origin is None:
        return
    if not _is_own_page(origin, request.host.lower()):
        raise ApiError(
            403,
            f"a page of {origin} must not change this router; open the router's own page on a "
            "loopback address, or start it with --admin-api-key-file FILE",
        )


def _is_own_page(origin: str, host: str) -> bool:
    try:
        site = urlsplit(origin).netloc.lower()
        # Its own name is no proof: a site can have its name lead to a loopback address.
        return site == host and is_loopback(site)
    except ValueError:  # no browser sends such an origin
        return False
