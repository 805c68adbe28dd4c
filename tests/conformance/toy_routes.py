"""The faulty app's small routes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from validation import Refused

if TYPE_CHECKING:
    from faulty import Exchange

CARD = {"id": "toy/model", "object": "model", "created": 1, "owned_by": "tests", "max_model_len": 2000}


async def routes(exchange: Exchange, path: str, method: str) -> None:
    """Everything but the generating endpoints."""
    faults = exchange.faults
    if path == "/v1/models" and (method in ("GET", "HEAD") or "models-may-be-posted" in faults):
        if ("no-queries" in faults and exchange.scope["query_string"]) or ("no-head" in faults and method == "HEAD"):
            raise Refused(None, "an internal error", 500)
        listed = {"object": "list", "data": [dict(CARD) for _ in range(2 if "twins" in faults else 1)]}
        await exchange.send_json(exchange.altered("models", listed))
    elif path.startswith("/v1/models/") and method == "GET":
        if path != "/v1/models/toy/model" and "any-card" not in faults:
            raise Refused("model", "there is no such model", 404, "model_not_found")
        await exchange.send_json(exchange.altered("card", dict(CARD)))
    elif method == "POST" and path in ("/tokenize", "/detokenize"):
        body: Any = json.loads(await exchange.read())
        if path == "/tokenize":
            await exchange.send_json({"tokens": list(body["prompt"].encode())})
        else:
            tokens = body["tokens"][1:] if "loses-a-token" in faults else body["tokens"]
            await exchange.send_json({"prompt": bytes(tokens).decode()})
    elif path == "/health" and "unhealthy" not in faults:
        await exchange.send_json({})
    elif path == "/metrics":
        kind = "application/json" if "metrics-are-json" in faults else "text/plain; version=0.0.4"
        page = b'# HELP a What.\na_total{b="c"} 1.0\n\nd 2 123\n'
        page = b"# nothing\n" if "metrics-are-empty" in faults else page
        await exchange.send_json(page, headers={"content-type": kind})
    elif path == "/version":
        await exchange.send_json({} if "no-version" in faults else {"version": "1"})
    elif "any-path" in faults:
        await exchange.send_json({})
    elif path == "/health":
        raise Refused(None, "not well", 503)
    else:
        raise Refused(None, f"{method} {path}: there is nothing", 404)
