"""Who may call: an ASGI layer around all routes, which lets nothing through without a key but what it names.

There is no list of what is protected: a route that somebody adds tomorrow is, and so is every path that leads nowhere.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from noria.server.errors import ApiError
from noria.server.keys import Caller, Keys

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
"""For supervisors and load balancers, who have no key. Compared whole."""

_CALLER = "noria.caller"


class Access:
    """Answers 401 itself, or passes on with the caller in the scope (`tenant_of`, `check_admin`)."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # nothing else is served
        caller = self._keys.find(_presented(scope))
        if caller is None:
            if route_path(scope) not in OPEN_PATHS:
                await _refuse(send)
                return
            caller = Caller(is_admin=False)
        scope[_CALLER] = caller
        await self._app(scope, receive, send)


def tenant_of(scope: Scope) -> str | None:
    """Whose request it is; None where there are no keys, or it has brought none."""
    caller: Caller | None = scope.get(_CALLER)
    return None if caller is None else caller.tenant


def check_admin(scope: Scope) -> None:
    """Raises `ApiError` 403 unless the caller may use the admin routes."""
    if not scope[_CALLER].is_admin:
        raise ApiError(403, "this route needs the admin key", kind="permission_error", code="admin_key_required")


def route_path(scope: Scope) -> str:
    """The path below `--root-path`."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if root and path.startswith(f"{root}/") else path


def _presented(scope: Scope) -> str:
    """The key that a request brings: `Authorization: Bearer KEY`, or `X-API-Key: KEY`. Empty if there is none."""
    headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # of several, the first counts
    scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return headers.get(b"x-api-key", b"").decode("latin-1").strip()


async def _refuse(send: Send) -> None:
    error = ApiError(
        401,
        "no valid API key: send one as `Authorization: Bearer KEY`",
        kind="authentication_error",
        code="invalid_api_key",
    )
    body = error.body
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
