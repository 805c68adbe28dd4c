"""A small OpenAI-compatible ASGI app that does everything right, until one of its faults is switched on.

`faults.py` says which fault each check must find. Besides the names that stand in the code, a fault may be

    ignore:FIELD, accept:FIELD     the field, or a bad value of it, is passed over
    refuse:FIELD, forbid:FIELD     it is refused, without or with its name
    header:NAME=VALUE              in every response
    WHERE:PATH=JSON, WHERE:-PATH   puts a value into a body, or takes it out; `;` joins several. WHERE is
                                                 answer, chunk, first (chunk), usage-chunk, error, models or card
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any

import validation
from toy_model import CONTEXT, Generated, generate
from toy_routes import routes
from toy_shapes import answer_body, chunk_bodies
from validation import Refused

KEY = "the right key"
MODEL = "toy/model"


class FaultyApp:
    def __init__(self) -> None:
        self.faults: frozenset[str] = frozenset()
        self.num_active = 0
        self.is_wedged = False
        self.num_loading = 0
        """Requests that are still told to come back later."""
        self._ids = itertools.count()

    def switch(self, *faults: str) -> None:
        """Has these faults from now on, and no others."""
        self.faults = frozenset(faults)
        self.num_active = 0
        self.is_wedged = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(self, scope, receive, send)
        self.num_active += 1
        try:
            await exchange.run()
        except Refused as refused:
            await exchange.send_error(refused)
        except ConnectionResetError:
            self.is_wedged = "wedged-by-leavers" in self.faults
        finally:
            self.num_active -= 1

    def new_id(self, prefix: str) -> str:
        return f"{prefix}{next(self._ids)}"


class Exchange:
    """One request and its response."""

    def __init__(self, app: FaultyApp, scope: Any, receive: Any, send: Any) -> None:
        self.app, self.scope, self.receive, self.send = app, scope, receive, send
        self.faults = app.faults
        self.is_stream = False

    async def run(self) -> None:
        if "no-http-1.0" in self.faults and self.scope["http_version"] == "1.0":
            raise Refused(None, "HTTP/1.0", 505)
        keys = [value for name, value in self.scope["headers"] if name == b"authorization"]
        is_open = "no-keys" in self.faults or ("no-keys-for-posts" in self.faults and self.scope["method"] == "POST")
        if keys != [f"Bearer {KEY}".encode()] and not is_open:
            raise Refused(None, "the key is wrong", 401)
        path, method = self.scope["path"], self.scope["method"]
        if path == "/v1/completions" or (path == "/v1/chat/completions" and "no-chat" not in self.faults):
            if method != "POST":
                raise Refused(None, "only POST", 405)
            await self.generate(is_chat="chat" in path)
            return
        await routes(self, path, method)

    # -- reading

    async def read(self) -> bytes:
        if "no-chunked-bodies" in self.faults and (b"transfer-encoding", b"chunked") in self.scope["headers"]:
            raise Refused(None, "no chunks", 411)
        body, more = b"", True
        while more:
            try:
                message = await asyncio.wait_for(self.receive(), 0.1 if "hasty" in self.faults else None)
            except TimeoutError as error:
                raise Refused(None, "too slow", 408) from error
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return body

    def parse(self, raw: bytes, is_chat: bool) -> dict[str, Any]:
        for fault, found in (
            ("crash-on-nesting", b"[[[[" in raw),
            ("crash-on-surrogates", b'\\ud83d word"' in raw or b"\\ud83d word" in raw),
            ("crash-on-large-bodies", len(raw) > 10_000_000),
            ("crash-on-many-fields", raw.count(b'"x_unknown') > 1000),
            ("crash-on-many-prompts", raw.count(b'"x"') > 1000),
        ):
            if found and fault in self.faults:
                raise Refused(None, "an internal error", 500)
        if "no-leading-space" in self.faults and raw[:1].isspace():
            raise Refused(None, "leading space")
        try:
            body = json.loads(raw.decode(), parse_constant=_refuse_constant)
            if not isinstance(body, dict):
                raise Refused(None, "no object")
        except (ValueError, RecursionError, Refused) as error:
            if "lenient-json" not in self.faults:
                raise Refused(None, "not a JSON object") from error
            body = {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
        if "blind-to-escapes" in self.faults and b"\\u005f" in raw:
            body.pop("max_tokens")
        if "latin-1" in self.faults and any(byte > 127 for byte in raw):
            body |= {"prompt": raw.decode("latin-1"), "messages": [{"role": "user", "content": raw.decode("latin-1")}]}
        return body

    # -- generating

    async def generate(self, is_chat: bool) -> None:
        raw = await self.read()
        body = self.parse(raw, is_chat)
        self.is_stream = body.get("stream") is True
        body = validation.check(body, validation.CHAT if is_chat else validation.COMPLETIONS, self.faults)
        if body.get("model", MODEL) != MODEL:
            raise Refused("model", f"there is no model {body['model']}", 404, "model_not_found")
        if "stops-must-be-ascii" in self.faults and not "".join(body.get("stop") or ()).isascii():
            raise Refused("stop", "stop is not ASCII")
        if len(body.get("stop") or ()) > 3 and isinstance(body["stop"], list) and "few-stops" in self.faults:
            raise Refused("stop", "too many")
        if body.get("stop") == [] and "no-empty-lists" in self.faults:
            raise Refused("stop", "stop is empty")
        results = self.results(body, is_chat)
        busy = {"wedged-by-leavers", "overloaded-at-4", "depends-on-others"} & self.faults
        await asyncio.sleep(0.1 if busy else 0)
        if "overloaded-at-4" in self.faults and self.app.num_active > 4:
            raise Refused(None, "too many", 503)
        if "depends-on-others" in self.faults and self.app.num_active > 1:
            for result in results:
                result.text = result.text[::-1]
        if "wedged-by-leavers" in self.faults and not body.get("stream"):
            await self.notice_leavers()
        if self.app.num_loading > 0 or "always-loading" in self.faults:
            self.app.num_loading -= 1
            raise Refused(None, "loading", 503)
        if self.app.is_wedged:
            raise Refused(None, "wedged", 503)
        if (body.get("stream") or "always-stream" in self.faults) and "never-stream" not in self.faults:
            await self.stream(body, results, is_chat)
        else:
            await self.send_json(self.altered("answer", answer_body(self, body, results, is_chat)))

    def results(self, body: dict[str, Any], is_chat: bool) -> list[Generated]:
        prompts = self.prompts(body, is_chat)
        body["max_tokens"] = body.get("max_completion_tokens", body.get("max_tokens", 40))
        if "no-context-limit" in self.faults:
            prompts = [prompt[:50] for prompt in prompts]
            body["max_tokens"] = min(body["max_tokens"], 50)
        for prompt in prompts:
            if len(prompt) + body["max_tokens"] > CONTEXT:
                name = "messages" if is_chat else "prompt"
                raise Refused(name, "longer than the context", 400, "context_length_exceeded")
        count = body.get("n", 1)
        found = [generate(prompt, body, index, self.faults) for prompt in prompts for index in range(count)]
        if not is_chat and body.get("best_of") is None and "best-of-is-n" in self.faults:
            found *= 2
        return found

    def prompts(self, body: dict[str, Any], is_chat: bool) -> list[list[int]]:
        if is_chat:
            messages = body.get("messages")
            if messages is None:
                if "accept:messages" not in self.faults:
                    raise Refused("messages", "messages are missing")
                messages = [{"role": "user", "content": "x"}]
            try:
                validation.check_messages(messages, self.faults)
            except Refused:
                if "accept:messages" not in self.faults or "refuse-tools-in-history" in self.faults:
                    raise
                messages = [{"role": "user", "content": "x"}]
            return [self.render(messages, body)]
        prompt = body.get("prompt")
        if prompt is None:
            if "accept:prompt" not in self.faults:
                raise Refused("prompt", "the prompt is missing")
            prompt = "x"
        if prompt == "" and "crash-on-empty" in self.faults:
            raise Refused(None, "an internal error", 500)
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            prompt = [prompt]
        if "ids-as-text" in self.faults:
            prompt = [str(part) for part in prompt]
        prompts = [self.encode(part) if isinstance(part, str) else part for part in prompt]
        last = body.get("truncate_prompt_tokens")
        if last:
            prompts = [part[-last:] for part in prompts]
        if "first-prompt-only" in self.faults:
            prompts = prompts[:1]
        return prompts[::-1] if "reversed-prompts" in self.faults else prompts

    def encode(self, text: str) -> list[int]:
        if "ascii-only" in self.faults and not text.isascii():
            raise Refused(None, "an internal error", 500)
        return list(text.encode(errors="replace"))

    def render(self, messages: list[Any], body: dict[str, Any]) -> list[int]:
        turns = []
        for message in messages[-1:] if "last-message-only" in self.faults else messages:
            content = message.get("content") or ""
            if isinstance(content, list):
                parts = [part.get("text", "") for part in content]
                content = str(content) if "parts-as-they-are" in self.faults else "".join(parts)
                content = parts[0] if "first-part-only" in self.faults else content
            if f"skips:{message['role']}" not in self.faults:
                turns.append(f"{message['role']}: {content}\n")
        text = "".join(turns)
        if body.get("continue_final_message"):
            return self.encode(text.removesuffix("\n"))
        return self.encode(text + ("" if body.get("add_generation_prompt") is False else "assistant: "))

    # -- answering

    async def stream(self, body: dict[str, Any], results: list[Generated], is_chat: bool) -> None:
        await self.start(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
        end = "\n" if "one-line-end" in self.faults else "\n\n"
        for number, (where, chunk) in enumerate(chunk_bodies(self, body, results, is_chat)):
            chunk = self.altered(where, self.altered("first", chunk) if number == 0 else chunk)
            await self.write(f"data: {json.dumps(chunk)}{end}".encode())
        if "wedged-by-leavers" in self.faults:
            await self.notice_leavers()
        done = "" if "no-done" in self.faults else f"data: [DONE]{end}"
        await self.write(done.encode() * (2 if "done-twice" in self.faults else 1), last=True)

    async def notice_leavers(self) -> None:
        """Raises `ConnectionResetError` if the client has gone."""
        await asyncio.sleep(0.1)
        try:
            if (await asyncio.wait_for(self.receive(), 0.01))["type"] == "http.disconnect":
                raise ConnectionResetError
        except TimeoutError:
            pass

    def altered(self, where: str, body: Any) -> Any:
        """The body with what the faults of that place do to it."""
        for fault in ";".join(sorted(self.faults)).split(";"):
            place, _, change = fault.partition(":")
            if place != where:
                continue
            path, _, value = change.partition("=")
            *steps, last = path.removeprefix("-").split(".")
            target = body
            for step in steps:
                target = _step(target, step)
            if target is None:
                continue
            if path.startswith("-"):
                target.pop(last, None)
            else:
                target[int(last) if isinstance(target, list) else last] = json.loads(value)
        return body

    async def send_json(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        length = len(data) + (9 if "wrong-length" in self.faults else 0)
        fields = {"content-type": "application/json", "content-length": str(length)}
        await self.start(status, fields | (headers or {}))
        await self.write(data, last="wrong-length" not in self.faults and "never-ends" not in self.faults)
        if "never-ends" in self.faults:
            await asyncio.sleep(5)

    async def send_error(self, refused: Refused) -> None:
        kind = "invalid_request_error" if refused.status < 500 else "server_error"
        error = {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}
        content = {"error": self.altered("error", error)}
        if "errors-in-streams" in self.faults and self.is_stream:
            await self.start(200, {"content-type": "text/event-stream"})
            await self.write(f"data: {json.dumps(content)}\n\ndata: [DONE]\n\n".encode(), last=True)
            return
        status = refused.status
        if status == 400 and "error-is-422" in self.faults:
            status = 422
        allow = {"allow": "POST"} if status == 405 and "no-allow" not in self.faults else {}
        await self.send_json(content, status, allow)

    async def start(self, status: int, headers: dict[str, str]) -> None:
        for fault in self.faults:
            if fault.startswith("header:"):
                name, _, value = fault.removeprefix("header:").partition("=")
                headers[name] = value
        fields = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": fields})

    async def write(self, data: bytes, last: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": not last})


def envelope(exchange: Exchange, name: str, is_chat: bool) -> dict[str, Any]:
    prefix = "chatcmpl-" if is_chat else "cmpl-"
    created = int(time.time())
    return {"id": exchange.app.new_id(prefix), "object": name, "created": created, "model": MODEL}


def _step(target: Any, step: str) -> Any:
    """What stands under that name or number, or None."""
    if isinstance(target, dict):
        return target.get(step)
    if isinstance(target, list) and int(step) < len(target):
        return target[int(step)]
    return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
