"""One HTTP request from its arrival to its end: `Call`, the layer that makes it, and the access log.

The layer is the outermost but for transport: every request passes it once, answered by whatever is inside. A
generating endpoint tells its call which answer it is, and the counts of calls when it begins and ends.
"""

from __future__ import annotations

import logging
import re
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from noria.core.events import FinishReason
from noria.observe.calls import Outcome, Stage
from noria.server.access import OPEN_PATHS, route_path, tenant_of
from noria.server.errors import ApiError

if TYPE_CHECKING:
    from noria.server.generation import Generation

logger = logging.getLogger("noria.access")

REQUEST_ID = re.compile(r"[A-Za-z0-9._~:/+=@,;|-]{1,256}")
"""What an X-Request-Id may be to be told again: it stands as it is in a header and between spaces in the log."""

_CALL = "noria.call"
_MAX_PATH_CHARACTERS = 200
_QUIET_PATHS = OPEN_PATHS | {"/metrics"}
"""Asked for all the time by machines: worth a line only when they are refused."""


class Call:
    """What is known of one request. Times are in seconds; tokens are those that the client was told of."""

    def __init__(self, request_id: str | None = None) -> None:
        self.request_id = request_id
        """The client's name for it, or a proxy's: told again, and used nowhere."""
        self.began_s = time.monotonic()
        self.ended_s: float | None = None
        self.call_id: str | None = None
        """Of a generating call: what the answer's id ends with, and the names of its sequences begin with."""
        self.generation: Generation | None = None
        self.outcome: Outcome | None = None
        self.status: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return 0 if self.generation is None else self.generation.usage.prompt_tokens

    @property
    def num_completion_tokens(self) -> int:
        return 0 if self.generation is None else self.generation.usage.completion_tokens

    @property
    def ttft_s(self) -> float | None:
        """From its arrival to the first token; None if there has been none."""
        if self.generation is None or self.generation.first_token_s is None:
            return None
        return self.generation.first_token_s - self.began_s

    @property
    def duration_s(self) -> float:
        return (time.monotonic() if self.ended_s is None else self.ended_s) - self.began_s

    @property
    def stage(self) -> Stage:
        return Stage.WAITING if self.ttft_s is None else Stage.RUNNING

    def note_answered(self) -> None:
        """The answer is out. It may be one that somebody has cut short."""
        outputs = [] if self.generation is None else self.generation.outputs
        is_cut = any(output.finish_reason == FinishReason.ABORT for output in outputs)
        self.outcome = Outcome.ABORTED if is_cut else Outcome.FINISHED

    def note_error(self, error: ApiError) -> None:
        is_refusal = error.status < 500 or (error.status == 503 and error.code != "deadline_exceeded")
        self.outcome = Outcome.REFUSED if is_refusal else Outcome.FAILED


def call_of(scope: Scope) -> Call:
    """The call that `Calls` has made for a request."""
    call = scope[_CALL]
    assert isinstance(call, Call)
    return call


class Calls:
    """Makes the calls, and writes a line when one is over if there is an access log."""

    def __init__(self, app: ASGIApp, *, access_log: bool) -> None:
        self._app = app
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # nothing else is served
        call = scope[_CALL] = Call(_request_id(scope))

        async def note_start(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                if (name := call.request_id or call.call_id) is not None:
                    message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
            await send(message)

        try:
            await self._app(scope, receive, note_start)
        finally:
            call.ended_s = time.monotonic()
            if self._access_log and not (call.status == 200 and route_path(scope) in _QUIET_PATHS):
                logger.info("%s", access_line(call, scope))


def access_line(call: Call, scope: Scope) -> str:
    """Everything but what was said: no query, no body, of the headers only the name that the request was given.

    The path is escaped, being the client's.
    """
    status = "-" if call.status is None else call.status  # nothing was sent: the client was gone
    fields = {
        "tenant": tenant_of(scope),
        "id": call.call_id,
        "request_id": call.request_id,
        "outcome": call.outcome,
    }
    if call.generation is not None:
        ttft_s = call.ttft_s
        fields |= {
            "prompt_tokens": str(call.num_prompt_tokens),
            "completion_tokens": str(call.num_completion_tokens),
            "ttft_s": None if ttft_s is None else f"{ttft_s:.4f}",
        }
    fields["duration_s"] = f"{call.duration_s:.4f}"
    said = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
    return f"{scope['method']} {quote(route_path(scope))[:_MAX_PATH_CHARACTERS]} {status} {said}"


def _request_id(scope: Scope) -> str | None:
    """The request's X-Request-Id. One that cannot be told is passed over: a proxy may set it, and no user can help."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = str(value.decode("latin-1"))
            return text if REQUEST_ID.fullmatch(text) else None
    return None
