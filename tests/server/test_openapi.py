"""The description of the routes: every answer is what it says, and all that it says is in the documentation."""

from __future__ import annotations

import http.client
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from serving import Server, running_server

from noria.config import ServerOptions
from noria.server.app import all_routes
from noria.server.bodies import ChatBody, CompletionBody
from noria.server.keys import Keys
from noria.server.state import ServerState

SERVING = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
MESSAGES = [{"role": "user", "content": "hi"}]
EVERYTHING = {"max_tokens": 3, "n": 2, "prompt_logprobs": 1, "return_token_ids": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


class Description:
    """A server's /openapi.json, taken by its word: nothing may come that it does not name."""

    def __init__(self, server: Server) -> None:
        self.document: dict[str, Any] = server.get("/openapi.json").json
        for schema in self.document["components"]["schemas"].values():
            if "properties" in schema:
                schema["additionalProperties"] = False

    def complaints(self, schema: dict[str, Any], value: Any) -> list[str]:
        whole = self.document | schema
        return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(whole).iter_errors(value)]

    def response(self, method: str, path: str, status: int) -> dict[str, Any]:
        responses = self.document["paths"][path][method.lower()]["responses"]
        found = responses.get(str(status)) or responses[f"{status // 100}XX"]
        assert isinstance(found, dict)
        return found

    def check(self, answer: Any, method: str, path: str, status: int) -> None:
        assert answer.status == status, answer.body
        schema = self.response(method, path, status)["content"]["application/json"]["schema"]
        assert self.complaints(schema, answer.json) == []

    def check_events(self, answer: Any, path: str) -> None:
        """Each is what the description of the stream says in words."""
        words = self.response("POST", path, 200)["content"]["text/event-stream"]["schema"]["description"]
        name = re.match(r"The data of each event is a (\w+) or", words)[1]  # type: ignore[index]
        assert len(answer.events) > 3
        for event in answer.events:
            kind = "ErrorAnswer" if "error" in event else name
            assert self.complaints({"$ref": f"#/components/schemas/{kind}"}, event) == []


@pytest.mark.parametrize(
    ("path", "described"),
    [(path, path) for path in ("/health", "/ready", "/ping", "/load", "/version", "/server_info", "/v1/models")]
    + [("/v1/models/scripted", "/v1/models/{name}")],
)
def test_get_routes_answer_what_they_say(server, path, described):
    Description(server).check(server.get(path), "GET", described, 200)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": ["ab", "c"], "echo": True, "logprobs": 1} | EVERYTHING),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2} | EVERYTHING),
        ("/tokenize", {"prompt": "x"}),
        ("/tokenize", {"messages": MESSAGES, "return_token_strs": True}),
        ("/tokenize", {"content": "x"}),
        ("/tokenize", {"content": "né", "with_pieces": True}),
        ("/detokenize", {"tokens": [65]}),
    ],
)
def test_posts_answer_what_they_say(server, path, body):
    answer = server.request("POST", path, {"max_tokens": 3} | body)
    Description(server).check(answer, "POST", path, 200)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": ["ab", "c"], "echo": True, "logprobs": 1, "return_token_ids": True}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "n": 2, "return_token_ids": True}),
    ],
)
@pytest.mark.parametrize("usage", [{"stream": True}, STREAM])
def test_streams_are_what_they_say(server, path, body, usage):
    answer = server.request("POST", path, {"max_tokens": 4} | body | usage)
    Description(server).check_events(answer, path)


def test_what_is_always_sent_is_required_and_what_may_be_unset_is_not(server):
    schemas = Description(server).document["components"]["schemas"]
    assert {"object", "usage"} & set(schemas["CompletionAnswer"]["required"]) == {"object"}
    assert {"finish_reason", "logprobs", "token_ids"} & set(schemas["CompletionChoice"]["required"]) == {
        "finish_reason",
        "logprobs",
    }
    assert schemas["HealthAnswer"]["required"] == ["status", "phase"]
    assert schemas["ChatBody"]["required"] == ["messages"], "what is taken may have defaults"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        ("/v1/completions", {"prompt": 5}),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": -1}),
        ("/tokenize", {"prompt": "x"}),
        ("/tokenize", {"prompt": "x", "content": "x"}),
        ("/detokenize", {"tokens": [-1]}),
    ],
)
def test_the_headers_of_ours_that_answers_have_are_described(server, path, body):
    answer = server.request("POST", path, body | {"x_unknown": 1}, headers={"X-Request-Id": "mine"})
    given = {name for name in answer.headers if name.startswith("x-noria") or name in ("x-request-id", "retry-after")}
    described = {name.lower() for name in Description(server).response("POST", path, answer.status)["headers"]}
    assert given <= described
    if path.startswith("/v1/"):
        assert "x-noria-call-id" in given


def test_a_stream_that_ends_with_an_error_is_what_it_says():
    with running_server({"step_s": 0.02, "scheduling": {"request_deadline_s": 0.5}}) as server:
        answer = server.complete(prompt="x", max_tokens=1000, stream=True)
        assert answer.events[-1]["error"]["code"] == "deadline_exceeded"
        Description(server).check_events(answer, "/v1/completions")


def test_errors_are_what_they_say():
    with running_server({}, {"api_key": ["k"], "enable_admin_api": True, "admin_api_key": "admin"}) as server:
        assert server.get("/v1/models").status == 401
        refused = server.get("/v1/models")
        server.headers = {"Authorization": "Bearer k"}
        description = Description(server)
        description.check(refused, "GET", "/v1/models", 401)
        description.check(server.get("/v1/models/other"), "GET", "/v1/models/{name}", 404)
        description.check(server.complete(prompt=5), "POST", "/v1/completions", 400)
        description.check(server.complete(prompt="x", model="other"), "POST", "/v1/completions", 404)
        description.check(server.request("POST", "/tokenize", b"{"), "POST", "/tokenize", 400)
        description.check(server.request("POST", "/pause"), "POST", "/pause", 403)
        assert description.document["security"] == [{"bearer": []}, {"header": []}]


def test_unavailability_is_what_it_says():
    with running_server({"load_s": 3.0}, wait=False) as server:
        description = Description(server)
        for path in ("/health", "/ready"):
            description.check(server.get(path), "GET", path, 503)
        description.check(server.complete(prompt="x"), "POST", "/v1/completions", 503)


def test_admin_routes_answer_what_they_say():
    with running_server({"step_s": 0.01}, {"enable_admin_api": True}) as server:
        description = Description(server)
        for path in ("/pause", "/resume", "/reset_prefix_cache"):
            description.check(server.request("POST", path), "POST", path, 200)
        call = OpenStream(server)
        description.check(server.get(f"/explain/{call.call_id}"), "GET", "/explain/{request_id}", 200)
        answer = server.request("POST", "/abort_requests", {"request_ids": [call.call_id]})
        description.check(answer, "POST", "/abort_requests", 200)
        assert answer.json["num_aborted"] == 1
        call.connection.close()


class OpenStream:
    """A stream under way, whose name its header has told."""

    def __init__(self, server: Server) -> None:
        self.connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
        self.connection.request("POST", "/v1/completions", b'{"prompt": "x", "max_tokens": 4000, "stream": true}')
        self.call_id = self.connection.getresponse().headers["X-Noria-Call-Id"]


def specs() -> list[Any]:
    return all_routes(ServerState(ServerOptions(enable_admin_api=True), Keys(ServerOptions())))


def test_every_route_is_described_with_the_fields_it_takes(server):
    document = server.get("/openapi.json").json
    assert document["openapi"] == "3.1.0"
    assert set(document["paths"]["/tokenize"]) == {"post"}
    for path, kind in (("/v1/completions", CompletionBody), ("/v1/chat/completions", ChatBody)):
        operation = document["paths"][path]["post"]
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert list(document["components"]["schemas"][name]["properties"]) == list(kind.__struct_encode_fields__)
        assert "text/event-stream" in operation["responses"]["200"]["content"]
    assert document["paths"]["/health"]["get"]["security"] == []
    assert "security" not in document["paths"]["/v1/models"]["get"]
    assert document["paths"]["/v1/models/{name}"]["get"]["parameters"][1]["name"] == "name"
    assert "/pause" not in document["paths"], "there is none on this server"


def test_all_references_lead_somewhere_and_operations_have_names_of_their_own(server):
    text, document = server.get("/openapi.json").body.decode(), server.get("/openapi.json").json
    references = set(re.findall(r'"#/components/([\w/-]+)"', text))
    assert references <= {f"{kind}/{name}" for kind, parts in document["components"].items() for name in parts}
    assert len(references) > 10
    names = [o["operationId"] for path in document["paths"].values() for o in path.values()]
    assert len(set(names)) == len(names)


def test_the_page_needs_nothing_from_elsewhere(server):
    answer = server.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    page = answer.body.decode()
    assert not re.findall(r"<script|<link|<img|@import|https?://", page)
    for spec in server.get("/openapi.json").json["paths"]:
        assert f"<code>{spec}</code>" in page
    for field in CompletionBody.__struct_encode_fields__:
        assert f"<code>{field}</code>" in page


def test_every_route_is_in_the_documentation():
    paths = [re.sub(r":\w+}", "}", spec.path) for spec in specs()]
    assert [path for path in paths if f"`{path}`" not in SERVING] == []


def test_every_metric_is_in_the_documentation(server):
    names = re.findall(r"^# TYPE noria:(\w+) (\w+)", server.get("/metrics").body.decode(), flags=re.MULTILINE)
    assert len(names) > 40
    assert [name for name, kind in names if not re.search(rf"`{name}[`{{]", SERVING)] == []
