"""Streams: how they are framed, what each chunk says, and that together they say what a whole answer says."""

from __future__ import annotations

import json

from noria.conformance.client import Server
from noria.conformance.contract import Source, Theme, expect
from noria.conformance.endpoints import CHAT, COMPLETIONS, Endpoint

THEME = Theme("streaming")
BOTH = (COMPLETIONS, CHAT)
WITH_USAGE = {"stream_options": {"include_usage": True}}


@THEME.check_each("a stream has content type text/event-stream", Source.SSE, *BOTH)
def stream_content_type(server: Server, endpoint: Endpoint) -> None:
    response = server.supported(server.post(endpoint, stream=True), endpoint.path)
    kind = response.headers.get("content-type", "")
    expect(kind.split(";")[0].strip() == "text/event-stream", f"content type is {kind!r}")


@THEME.check_each("events are data lines, each with an empty line after it, in UTF-8", Source.SSE, *BOTH)
def stream_framing(server: Server, endpoint: Endpoint) -> None:
    server.stream(endpoint)


@THEME.check_each("[DONE] comes once, as the last event", Source.OPENAI, *BOTH)
def stream_done(server: Server, endpoint: Endpoint) -> None:
    stream = server.stream(endpoint)
    count = stream.raw.count(b"[DONE]")
    expect(count == 1, f"[DONE] stands {count} times in the stream")


@THEME.check_each("the joined stream is the text of the whole answer", Source.OPENAI, *BOTH)
def stream_joined(server: Server, endpoint: Endpoint) -> None:
    whole = server.answer(endpoint, max_tokens=24)["choices"][0]
    stream = server.stream(endpoint, max_tokens=24)
    text = stream.text(endpoint)
    expect(text == endpoint.text(whole), f"{text!r} is streamed, {endpoint.text(whole)!r} is answered")
    expect(stream.finish_reason() == whole["finish_reason"], "their finish reasons differ")


@THEME.check_each("text arrives in several chunks", Source.OPENAI, *BOTH)
def stream_in_chunks(server: Server, endpoint: Endpoint) -> None:
    fields, _ = server.long_answer(endpoint)
    pieces = [choice for choice in server.stream(endpoint, **fields).choices() if endpoint.piece(choice)]
    expect(len(pieces) > 1, "16 tokens arrive in one chunk")


@THEME.check_each("chunks have the object's name, and one id, created and model", Source.OPENAI, *BOTH)
def stream_envelope(server: Server, endpoint: Endpoint) -> None:
    events = server.stream(endpoint, **WITH_USAGE).events
    seen = {(event["id"], event["object"], event["created"], event["model"]) for event in events}
    expect(len(seen) == 1, f"they change within one stream: {sorted(map(str, seen))[:3]}")
    expect(events[0]["object"] == endpoint.chunk_object_name, f"object is {events[0]['object']!r}")


@THEME.check_each("finish_reason is null until a choice's last chunk with one", Source.OPENAI, *BOTH)
def stream_finish_reason(server: Server, endpoint: Endpoint) -> None:
    choices = server.stream(endpoint).choices()
    reasons = [choice["finish_reason"] for choice in choices]
    expect(reasons[-1] in ("stop", "length"), f"the last chunk's finish_reason is {reasons[-1]!r}")
    expect(not any(reasons[:-1]), f"finish reasons of the chunks: {reasons}")


@THEME.check_each("include_usage gives a last chunk with usage and no choices", Source.OPENAI, *BOTH)
def stream_usage(server: Server, endpoint: Endpoint) -> None:
    last = server.stream(endpoint, **WITH_USAGE).events[-1]
    expect(last["choices"] == [] and isinstance(last.get("usage"), dict), f"the last chunk is {last}")


@THEME.check_each("a stream's usage is the whole answer's", Source.OPENAI, *BOTH)
def stream_usage_equals(server: Server, endpoint: Endpoint) -> None:
    whole, streamed = server.answer(endpoint)["usage"], server.stream(endpoint, **WITH_USAGE).usage
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        expect(whole[name] == streamed[name], f"{name}: {streamed[name]} streamed, {whole[name]} answered")


@THEME.check_each("no other chunk has a usage that is not null", Source.OPENAI, *BOTH)
def stream_usage_once(server: Server, endpoint: Endpoint) -> None:
    events = server.stream(endpoint, **WITH_USAGE).events
    count = sum(bool(event.get("usage")) for event in events)
    expect(count == 1, f"{count} chunks of {len(events)} have usage")


@THEME.check_each("without include_usage there is no usage chunk", Source.OPENAI, *BOTH)
def stream_no_usage(server: Server, endpoint: Endpoint) -> None:
    events = server.stream(endpoint).events
    expect(all(event["choices"] for event in events), "there is a chunk without choices")


@THEME.check_each("stream_options without stream is refused", Source.OPENAI, *BOTH)
def stream_options_alone(server: Server, endpoint: Endpoint) -> None:
    server.refusal(endpoint, **WITH_USAGE)


@THEME.check_each("n choices are streamed side by side, each whole", Source.OPENAI, *BOTH, needs=("n",))
def stream_n(server: Server, endpoint: Endpoint) -> None:
    whole = server.answer(endpoint, n=2)["choices"]
    stream = server.stream(endpoint, n=2, **WITH_USAGE)
    for choice in whole:
        text = stream.text(endpoint, choice["index"])
        expect(
            text == endpoint.text(choice), f"choice {choice['index']}: {text!r} streamed of {endpoint.text(choice)!r}"
        )
        stream.finish_reason(choice["index"])
    indices = {choice["index"] for event in stream.events for choice in event["choices"]}
    expect(indices == {0, 1}, f"choices {sorted(indices)} are streamed with n = 2")


@THEME.check_each("a stream of one token is a stream like any other", Source.OPENAI, *BOTH)
def stream_one_token(server: Server, endpoint: Endpoint) -> None:
    stream = server.stream(endpoint, max_tokens=1, **WITH_USAGE)
    expect(stream.usage["completion_tokens"] == 1, f"usage is {stream.usage}")
    stream.finish_reason()


@THEME.check_each("a bad field of a stream is refused with a status, before it begins", Source.SDK, *BOTH)
def stream_refused(server: Server, endpoint: Endpoint) -> None:
    response = server.post(endpoint, stream=True, temperature="hot")
    response.error(400, 422)
    expect(response.is_json, f"the refusal has content type {response.headers.get('content-type')!r}")


@THEME.check_each("proxies are told not to keep a stream: Cache-Control: no-cache", Source.OURS, *BOTH)
def stream_not_cached(server: Server, endpoint: Endpoint) -> None:
    control = server.stream(endpoint).headers.get("cache-control", "")
    expect("no-cache" in control or "no-store" in control, f"Cache-Control is {control!r}")


@THEME.check("the first chunk of a chat says that the assistant speaks", Source.OPENAI)
def chat_stream_role(server: Server) -> None:
    delta = server.stream(CHAT).choices()[0]["delta"]
    expect(delta.get("role") == "assistant", f"the first delta is {delta}")


@THEME.check("every delta is an object, and its content a string or null", Source.SDK)
def chat_stream_deltas(server: Server) -> None:
    choices = server.stream(CHAT).choices()
    expect(choices, "no chunk has a choice")
    for choice in choices:
        delta = choice["delta"]
        expect(isinstance(delta, dict), f"a delta is {delta!r}")
        expect(isinstance(delta.get("content"), str | None), f"a delta's content is {delta.get('content')!r}")


@THEME.check("a completion's chunks have text, never delta or message", Source.OPENAI)
def completions_stream_text(server: Server) -> None:
    choices = server.stream(COMPLETIONS).choices()
    expect(choices, "no chunk has a choice")
    for choice in choices:
        expect(isinstance(choice.get("text"), str) and "delta" not in choice, f"a chunk's choice is {choice}")


@THEME.check("an HTTP/1.0 client gets a stream, too, without chunked encoding", Source.HTTP)
def stream_over_http_1_0(server: Server) -> None:
    body = json.dumps(COMPLETIONS.body(server.model, {"stream": True})).encode()
    with server.socket() as connection:
        connection.sendall(server.head("POST", COMPLETIONS.path, {"Content-Length": str(len(body))}, "1.0") + body)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, rest = received.partition(b"\r\n\r\n")
    expect(b" 200" in head.split(b"\r\n")[0], f"answered with {received[:80]!r}")
    expect(b"chunked" not in head.lower(), "chunked, which HTTP/1.0 does not have")
    expect(rest.startswith(b"data:") and rest.endswith(b"[DONE]\n\n"), f"the body is {rest[:80]!r} ... {rest[-40:]!r}")
