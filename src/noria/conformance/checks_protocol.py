"""HTTP, JSON, the shape of errors, and the list of models."""

from __future__ import annotations

import json
from typing import Any

from noria.conformance.client import Server, strict_json
from noria.conformance.contract import NotSupported, Source, Theme, expect
from noria.conformance.endpoints import CHAT, COMPLETIONS, Endpoint

THEME = Theme("protocol")
BOTH = (COMPLETIONS, CHAT)


# -- models


@THEME.check("models are listed: object list, data", Source.OPENAI)
def models_list(server: Server) -> None:
    listed = server.get("/v1/models").json
    expect(listed.get("object") == "list", f"object is {listed.get('object')!r}")
    expect(isinstance(listed.get("data"), list) and listed["data"], f"data is {listed.get('data')!r}")


@THEME.check("a model has id, object model, created and owned_by", Source.OPENAI)
def models_card(server: Server) -> None:
    for card in server.get("/v1/models").json["data"]:
        expect(card.get("object") == "model", f"object is {card.get('object')!r}")
        expect(isinstance(card.get("id"), str), f"id is {card.get('id')!r}")
        expect(type(card.get("created")) is int, f"created is {card.get('created')!r}")
        expect(isinstance(card.get("owned_by"), str), f"owned_by is {card.get('owned_by')!r}")


@THEME.check("no two models have one id", Source.OPENAI)
def models_ids(server: Server) -> None:
    ids = [card["id"] for card in server.get("/v1/models").json["data"]]
    expect(len(set(ids)) == len(ids), f"ids {ids}")


@THEME.check("the list of models has content type application/json", Source.SDK)
def models_content_type(server: Server) -> None:
    response = server.get("/v1/models")
    expect(response.is_json, f"content type is {response.headers.get('content-type')!r}")


@THEME.check("a model can be asked for by its id", Source.OPENAI)
def models_retrieve(server: Server) -> None:
    card = server.get(f"/v1/models/{server.model}").json
    expect(card.get("id") == server.model and card.get("object") == "model", f"the card is {card}")


@THEME.check("an unknown model's card is a 404 in the shape of errors", Source.OPENAI)
def models_unknown(server: Server) -> None:
    error = server.send("GET", "/v1/models/no-such-model").error(404)
    expect(isinstance(error.get("message"), str), f"the error is {error}")


@THEME.check("the list of models cannot be posted to", Source.HTTP)
def models_post(server: Server) -> None:
    response = server.send("POST", "/v1/models", {})
    expect(response.status in (404, 405), f"answered with {response.shown}")


@THEME.check("HEAD has no body", Source.HTTP)
def head_has_no_body(server: Server) -> None:
    """Seen on the bare connection: what follows the first answer must be the second's status line."""
    with server.socket() as connection:
        connection.sendall(
            server.head("HEAD", "/v1/models") + server.head("GET", "/v1/models", {"Connection": "close"})
        )
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    first, _, rest = received.partition(b"\r\n\r\n")
    status = first.split(b" ")[1] if b" " in first else b""
    expect(status in (b"200", b"404", b"405", b"501"), f"HEAD is answered with {received[:60]!r}")
    expect(b"connection: close" in first.lower() or rest.startswith(b"HTTP/1.1 "), f"after HEAD comes {rest[:60]!r}")


@THEME.check("a query that nobody knows changes nothing", Source.OPENAI)
def models_query(server: Server) -> None:
    server.get("/v1/models?limit=5&nonsense=%F0%9F%98%80")


@THEME.check("an unknown path is a 404 in the shape of errors", Source.OPENAI)
def unknown_path(server: Server) -> None:
    server.send("GET", "/v1/no-such-path").error(404)


# -- keys


@THEME.check("without the right key: 401, in the shape of errors", Source.OPENAI)
def wrong_key(server: Server) -> None:
    if server.api_key is None:
        raise NotSupported("no key was given, so the server is taken to need none")
    for value in ("", "Bearer", "Bearer no-such-key", "Basic YTpi", f"Bearer {server.api_key}x"):
        headers = {"Authorization": value}
        server.send("GET", "/v1/models", headers=headers).error(401)
        for endpoint in BOTH:
            response = server.send(
                "POST", endpoint.path, endpoint.body(server.model, {"max_tokens": 1}), headers=headers
            )
            if response.status != 404:  # it has no such endpoint for anybody
                response.error(401)


# -- errors


@THEME.check_each("an error has message, type, param and code", Source.OPENAI, *BOTH)
def error_shape(server: Server, endpoint: Endpoint) -> None:
    error = server.refusal(endpoint, temperature="hot")
    missing = {"message", "type", "param", "code"} - set(error)
    expect(not missing, f"the error has no {sorted(missing)}: {error}")
    expect(isinstance(error["message"], str) and error["message"], f"message is {error['message']!r}")


@THEME.check_each("a bad field's error has status 400", Source.OPENAI, *BOTH)
def error_status(server: Server, endpoint: Endpoint) -> None:
    server.refusal(endpoint, 400, temperature="hot")


@THEME.check_each("a bad field's error has type invalid_request_error", Source.OPENAI, *BOTH)
def error_type(server: Server, endpoint: Endpoint) -> None:
    error = server.refusal(endpoint, temperature="hot")
    expect(error.get("type") == "invalid_request_error", f"type is {error.get('type')!r}")


@THEME.check_each("param is the bad field's name", Source.OPENAI, *BOTH)
def error_param(server: Server, endpoint: Endpoint) -> None:
    for field, value in (("temperature", "hot"), ("top_p", 7), ("max_tokens", "many")):
        error = server.refusal(endpoint, **{field: value})
        expect(error.get("param") == field, f"param is {error.get('param')!r} for a bad {field}")


@THEME.check_each("an error has content type application/json", Source.SDK, *BOTH)
def error_content_type(server: Server, endpoint: Endpoint) -> None:
    response = server.post(endpoint, temperature="hot")
    response.error(400, 422)
    expect(response.is_json, f"content type is {response.headers.get('content-type')!r}")


@THEME.check_each("an unknown model is a 404", Source.OPENAI, *BOTH)
def unknown_model(server: Server, endpoint: Endpoint) -> None:
    for stream in (False, True):
        server.refusal(endpoint, 404, model="no-such-model", stream=stream)


@THEME.check_each("an unknown model's code is model_not_found", Source.OPENAI, *BOTH)
def unknown_model_code(server: Server, endpoint: Endpoint) -> None:
    error = server.refusal(endpoint, 404, model="no-such-model")
    expect(error.get("code") == "model_not_found", f"code is {error.get('code')!r}")


@THEME.check_each("GET is refused: 404, or 405 with Allow: POST", Source.HTTP, *BOTH)
def wrong_method(server: Server, endpoint: Endpoint) -> None:
    response = server.send("GET", endpoint.path)
    expect(response.status in (404, 405), f"answered with {response.shown}")
    if response.status == 405:
        expect("POST" in response.headers.get("allow", ""), f"Allow is {response.headers.get('allow')!r}")


# -- JSON


def _post(server: Server, endpoint: Endpoint, body: bytes) -> Any:
    return server.send("POST", endpoint.path, body)


def _with(server: Server, endpoint: Endpoint, raw: str) -> bytes:
    """A request in which `user` is written as it stands in `raw`."""
    return json.dumps(endpoint.body(server.model, {"user": "HERE"})).replace('"HERE"', raw).encode()


@THEME.check_each("no body, and what is not JSON, is refused", Source.JSON, *BOTH)
def json_invalid(server: Server, endpoint: Endpoint) -> None:
    for body in (b"", b"{", b"prompt=x", b'{"model": }', b"{'model': 'x'}"):
        _post(server, endpoint, body).error(400, 422)


@THEME.check_each("a body that is no JSON object is refused", Source.OPENAI, *BOTH)
def json_not_an_object(server: Server, endpoint: Endpoint) -> None:
    for body in (b"[]", b'"text"', b"5", b"null", b"true"):
        _post(server, endpoint, body).error(400, 422)


@THEME.check_each("text after the JSON is refused", Source.JSON, *BOTH)
def json_trailing(server: Server, endpoint: Endpoint) -> None:
    _post(server, endpoint, _with(server, endpoint, '"x"') + b" and more").error(400, 422)


@THEME.check_each("NaN and Infinity are no JSON, and are refused", Source.JSON, *BOTH)
def json_nan(server: Server, endpoint: Endpoint) -> None:
    for value in ("NaN", "Infinity", "-Infinity"):
        body = _with(server, endpoint, '"x"').replace(b'"temperature": 0', f'"temperature": {value}'.encode())
        _post(server, endpoint, body).error(400, 422)


@THEME.check_each("a number beyond a double is refused", Source.JSON, *BOTH)
def json_huge_number(server: Server, endpoint: Endpoint) -> None:
    for value in ("1e999", "-1e999", "9" * 400):
        body = _with(server, endpoint, '"x"').replace(b'"temperature": 0', f'"temperature": {value}'.encode())
        _post(server, endpoint, body).error(400, 422)


@THEME.check_each("a body that is not UTF-8 is refused", Source.JSON, *BOTH)
def json_not_utf_8(server: Server, endpoint: Endpoint) -> None:
    for raw in (b'"\xff\xfe"', b'"\xc3"', b'"\xed\xa0\x80"'):
        body = _with(server, endpoint, '"HERE"').replace(b'"HERE"', raw)
        _post(server, endpoint, body).error(400, 422)


@THEME.check_each("nesting beyond measure is refused or passed over, and does no harm", Source.OURS, *BOTH)
def json_deep(server: Server, endpoint: Endpoint) -> None:
    response = _post(server, endpoint, _with(server, endpoint, "[" * 100_000 + "]" * 100_000))
    expect(response.status in (200, 400, 413, 422), f"answered with {response.shown}")
    server.must_be_well(endpoint)


@THEME.check_each("deep nesting in an unknown field does no harm", Source.OURS, *BOTH)
def json_deep_unknown(server: Server, endpoint: Endpoint) -> None:
    body = _with(server, endpoint, '"x", "x_unknown": ' + "[" * 400 + "]" * 400)
    response = _post(server, endpoint, body)
    expect(response.status in (200, 400, 422), f"answered with {response.shown}")


@THEME.check_each("half a surrogate pair is answered or refused, in valid UTF-8", Source.JSON, *BOTH)
def json_lone_surrogate(server: Server, endpoint: Endpoint) -> None:
    for half in ("\\ud83d", "\\ude00"):
        text = f"word {half} word"
        field = f'"prompt": "{text}"' if endpoint is COMPLETIONS else (
            f'"messages": [{{"role": "user", "content": "{text}"}}]'
        )  # fmt: skip
        body = f'{{"model": "{server.model}", "max_tokens": 4, {field}}}'.encode()
        response = _post(server, endpoint, body)
        strict_json(response.body)
        expect(response.status in (200, 400, 422), f"answered with {response.shown}")
    server.must_be_well(endpoint)


@THEME.check_each("a body that begins with spaces and line ends is JSON", Source.JSON, *BOTH)
def json_whitespace(server: Server, endpoint: Endpoint) -> None:
    body = b" \r\n\t" + _with(server, endpoint, '"x"') + b"\n\n"
    server.supported(_post(server, endpoint, body), endpoint.path)


@THEME.check_each("escapes in names and texts are what they stand for", Source.JSON, *BOTH)
def json_escapes(server: Server, endpoint: Endpoint) -> None:
    plain = _with(server, endpoint, '"x"')
    escaped = plain.replace(b'"max_tokens"', b'"max\\u005ftokens"')
    answers = [server.supported(_post(server, endpoint, body), endpoint.path).json for body in (plain, escaped)]
    counts = [answer["usage"]["completion_tokens"] for answer in answers]
    expect(counts[0] == counts[1], f"{counts[1]} tokens with an escape in max_tokens, {counts[0]} without")
