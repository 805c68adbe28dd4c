"""/openapi.json and /docs: what the routes take and give, from the very structs that they decode and encode.

The page is plain HTML without scripts, styles from elsewhere, or anything else to fetch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any

import msgspec

from noria.server.access import OPEN_PATHS
from noria.server.errors import ErrorAnswer
from noria.server.routes import RouteSpec
from noria.version import __version__

_REFERENCE = "#/components/schemas/{name}"


_HEADERS = {
    "X-Request-Id": "The name that the request brought in this header; else, of a generating call, the call's id.",
    "X-Noria-Call-Id": "Names the call in the access log and for the admin routes: on every answer but 401.",
    "X-Noria-Ignored-Fields": "Fields of the body that nobody knows, if there were any.",
    "Retry-After": "Seconds, where to come back later is worth it.",
}


def openapi(specs: Sequence[RouteSpec], root_path: str, *, needs_key: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes."""
    taken, taken_components = _schemas([t for spec in specs for t in (spec.body, spec.query) if t is not None])
    answers = [t for spec in specs for t in (*spec.answers, spec.chunk) if t is not None]
    given, given_components = _schemas([*answers, ErrorAnswer])
    for schema in given_components.values():
        _require_defaults(schema)
    by_type, components = taken | given, taken_components | given_components
    paths: dict[str, dict[str, Any]] = {}
    for spec in specs:
        operations = paths.setdefault(re.sub(r":\w+}", "}", spec.path), {})
        for method in spec.methods:
            operations[method.lower()] = _operation(spec, method, by_type, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Noria", "version": __version__, "description": "An LLM inference server."},
        "servers": [{"url": root_path or "/"}],
        "security": [{"bearer": []}, {"header": []}] if needs_key else [],
        "paths": paths,
        "components": {
            "schemas": components,
            "headers": {name: {"description": text, "schema": {"type": "string"}} for name, text in _HEADERS.items()},
            "parameters": {"RequestId": _REQUEST_ID},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
    }


_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "Your name for the request: it comes back in the same header and stands in the access log, if it "
    "is up to 256 of A-Z a-z 0-9 . _ ~ : / + = @ , ; | - and is else passed over.",
    "schema": {"type": "string"},
}


def _schemas(types: Sequence[type]) -> tuple[dict[type, dict[str, Any]], dict[str, dict[str, Any]]]:
    """The schema of each type, and the components that they refer to."""
    unique = list(dict.fromkeys(types))
    schemas, components = msgspec.json.schema_components(unique, ref_template=_REFERENCE)
    return dict(zip(unique, schemas, strict=True)), components


def _require_defaults(schema: dict[str, Any]) -> None:
    """Of an object that we send: what has a default is there all the same; only what may be unset may be missing."""
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    schema["required"] = [name for name in properties if name in required or "default" in properties[name]]
    for field in properties.values():
        field.pop("default", None)


def _operation(
    spec: RouteSpec, method: str, by_type: dict[type, dict[str, Any]], components: dict[str, Any]
) -> dict[str, Any]:
    error = _json(by_type[ErrorAnswer])
    on_errors = ["X-Request-Id", *(_own_headers(spec) if spec.chunk is not None else ())]
    operation: dict[str, Any] = {
        "summary": spec.summary,
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{spec.path}").strip("_"),
        "responses": {
            "200": _response("The answer.", _answers(spec, by_type), ["X-Request-Id", *_own_headers(spec)]),
            "4XX": _response("A refusal.", error, on_errors),
            "5XX": _response("Not now, or a failure of ours.", error, [*on_errors, "Retry-After"]),
        },
    }
    parameters: list[dict[str, Any]] = [{"$ref": "#/components/parameters/RequestId"}]
    parameters += [
        {"name": name.removesuffix(":path"), "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{([^}]+)}", spec.path)
    ]
    if spec.query is not None:
        fields = components[spec.query.__name__]["properties"]
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]
    operation["parameters"] = parameters
    if spec.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(by_type[spec.body])}
    if spec.path in OPEN_PATHS:
        operation["security"] = []
        operation["responses"]["503"] = _response("Not now.", _answers(spec, by_type), ["X-Request-Id"])
    return operation


def _response(description: str, content: dict[str, Any], headers: Sequence[str]) -> dict[str, Any]:
    references = {name: {"$ref": f"#/components/headers/{name}"} for name in headers}
    return {"description": description, "headers": references, "content": content}


def _own_headers(spec: RouteSpec) -> list[str]:
    ignored = ["X-Noria-Ignored-Fields"] if spec.body is not None else []
    return ["X-Noria-Call-Id", *ignored] if spec.chunk is not None else ignored


def _answers(spec: RouteSpec, by_type: dict[type, dict[str, Any]]) -> dict[str, Any]:
    schemas = [by_type[answer] for answer in spec.answers]
    schema: dict[str, Any] = schemas[0] if len(schemas) == 1 else {"anyOf": schemas} if schemas else {}
    contents = {spec.media_type: {"schema": schema}}
    if spec.chunk is not None:
        events = f"The data of each event is a {spec.chunk.__name__} or an ErrorAnswer, as JSON; of the last, [DONE]."
        contents["text/event-stream"] = {"schema": {"type": "string", "description": events}}
    return contents


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
code { font: 13px ui-monospace, monospace } table { border-collapse: collapse; margin: .5rem 0 1rem }
td, th { text-align: left; padding: .15rem 1rem .15rem 0; vertical-align: top; border-bottom: 1px solid #ddd }
h2 { margin-top: 2rem } h2 span { font-weight: normal; color: #777 }
@media (prefers-color-scheme: dark) { body { background: #1b1b1b; color: #ddd } td, th { border-color: #444 } }
"""


def docs_page(document: dict[str, Any]) -> str:
    """A page for people: each route, and the fields of what it takes and gives."""
    schemas = document["components"]["schemas"]
    root = "" if document["servers"][0]["url"] == "/" else document["servers"][0]["url"]
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Noria's API</title>",
        f"<style>{_STYLE}</style><h1>Noria {escape(document['info']['version'])}</h1>",
        f"<p>All fields are sent as JSON. For tools: <a href='{escape(root)}/openapi.json'>openapi.json</a>.</p>",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2>{method.upper()} <code>{escape(path)}</code></h2><p>{escape(operation['summary'])}</p>")
            parts += [_table("in the address", [_row(p["name"], p["schema"], is_needed=p.get("required", False))
                                                for p in operation["parameters"] if "name" in p])]  # fmt: skip
            body = operation.get("requestBody", {"content": {}})["content"]
            parts += [_fields("body", content["schema"], schemas) for content in body.values()]
            answers = operation["responses"]["200"]["content"]
            answer = answers.get("application/json", {"schema": {}})["schema"]
            parts += [_fields("answer", schema, schemas) for schema in answer.get("anyOf", [answer])]
    parts.append("<h2>Errors</h2>" + _fields("answer", {"$ref": _REFERENCE.format(name="ErrorContent")}, schemas))
    return "".join(parts) + "</html>"


def _fields(title: str, schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """A table of the fields of an object's schema; nothing for other schemas."""
    resolved = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    needed = resolved.get("required", ())
    rows = [_row(name, field, is_needed=name in needed) for name, field in resolved.get("properties", {}).items()]
    return _table(title, rows)


def _table(title: str, rows: list[str]) -> str:
    return f"<table><tr><th>{title}</th><th>type</th><th>default</th></tr>{''.join(rows)}</table>" if rows else ""


def _row(name: str, schema: dict[str, Any], *, is_needed: bool) -> str:
    default = "required" if is_needed else "" if schema.get("default") is None else repr(schema["default"])
    return f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type(schema))}</td><td>{escape(default)}</td></tr>"


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(word for word in map(_type, schema["anyOf"]) if word != "null")
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    return str(schema.get("type", "anything"))
