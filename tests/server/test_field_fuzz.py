"""Every field of the generating endpoints with every kind of value: an answer or a 400, and nobody else notices."""

from __future__ import annotations

import http.client
import json
from typing import Any

import msgspec
import pytest

from noria.server.bodies import _NOT_YET, ChatBody, CompletionBody

DEEP = "[" * 60 + "]" * 60
VALUES = [
    "null", "true", "false", "0", "-1", "1", "1.5", "-0.0", "1e308", "1e-308", "1e999", "-1e999", "NaN", "Infinity",
    "-Infinity", "9223372036854775808", "1" + "0" * 400, '""', '"x"', '"NaN"',
    '"\\ud800"', '"\\u0000"', '"' + "x" * 5000 + '"',
    "[]", "[null]", "[-1]", "[1e999]", '[""]', '["\\udc00"]', "[9223372036854775808]", "[[]]", DEEP,
    "{}", '{"": null}', '{"x": {}}', '{"1": 1e999}', '{"1": 1}', '{"include_usage": 1}',
]  # fmt: skip


def names(kind: type[msgspec.Struct]) -> list[str]:
    return sorted({field.encode_name for field in msgspec.structs.fields(kind)} | set(_NOT_YET) | {"unknown"})


@pytest.mark.parametrize(
    ("path", "kind", "base"),
    [
        ("/v1/completions", CompletionBody, {"prompt": "x", "max_tokens": 1}),
        ("/v1/chat/completions", ChatBody, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ],
)
def test_no_value_of_any_field_is_more_than_its_senders_trouble(server, path, kind, base) -> None:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
    told: dict[str, set[int]] = {}

    def post(raw: bytes) -> tuple[int, Any]:
        connection.request("POST", path, raw, {"Content-Type": "application/json"})
        response = connection.getresponse()
        body = response.read()
        is_stream = (response.getheader("content-type") or "").startswith("text/event-stream")
        return response.status, None if is_stream else json.loads(body, parse_constant=lambda name: pytest.fail(name))

    for name in names(kind):
        for value in VALUES:
            fields = {other: json.dumps(given) for other, given in base.items() if other != name} | {name: value}
            raw = "{" + ", ".join(f"{json.dumps(field)}: {text}" for field, text in fields.items()) + "}"
            status, answer = post(raw.encode())
            assert status in (200, 400, 404), (raw[:200], answer)
            told.setdefault(name, set()).add(status)
            if status != 200:
                assert set(answer["error"]) == {"message", "type", "param", "code"}, raw[:200]
        assert post(json.dumps(base).encode())[0] == 200, name
    assert all(400 in statuses for statuses in told.values())  # no field takes anything
    assert len(told) > 50
    connection.close()
    server.wait_quiet()
