"""Who gets through: every route without a key, with a wrong one, with the right one; and what belongs to whom."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Response, Server, running, running_server

from noria.config import ServerOptions
from noria.server.app import all_routes
from noria.server.keys import Keys
from noria.server.state import ServerState

OPEN = {"/health", "/ready", "/ping"}
ALICE, BOB, ADMIN = "alices-secret", "bobs-secret", "the-admins-secret"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"{ALICE} alice\n{BOB} bob\n")
    return path


@pytest.fixture(scope="module")
def guarded(key_file: Path) -> Iterator[Server]:
    options = {
        "api_key_file": str(key_file),
        "admin_api_key": ADMIN,
        "enable_admin_api": True,
        "access_log": True,
        "allowed_origins": ["https://chat.example"],
    }
    with running_server({"checked": True, "max_model_len": 512, "num_blocks": 256}, options) as server:
        yield server
        assert server.process.poll() is None


def every_route() -> list[tuple[str, str]]:
    options = ServerOptions(enable_admin_api=True)
    specs = all_routes(ServerState(options, Keys(ServerOptions())))
    return [(method, spec.path.partition("{")[0]) for spec in specs for method in spec.methods]


STRANGE = ["//v1/models", "/v1/../v1/models", "/v1/models/", "/health/../metrics", "/health/", "//health", "/HEALTH",
           "/health;x", "/health%2f", "/docs/x", "/", "/nothing", "/health/metrics"]  # fmt: skip


@pytest.mark.parametrize("key", [None, "wrong", ALICE + "x", ALICE[:-1], ALICE.upper(), "", "alice"])
def test_no_route_but_the_open_ones_lets_anybody_in(guarded: Server, key: str | None) -> None:
    headers = {} if key is None else bearer(key)
    others = [(method, path) for path in STRANGE for method in ("GET", "POST", "OPTIONS")]
    for method, path in [*every_route(), *(("OPTIONS", path) for _, path in every_route()), *others]:
        answer = guarded.request(method, path, b"{}", headers=headers)
        if path in OPEN:
            assert answer.status in (200, 405), (method, path)
            continue
        assert answer.status == 401, (method, path, answer.body)
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.error["code"] == "invalid_api_key"


@pytest.mark.parametrize("headers", [bearer(ALICE), {"authorization": f"bearer  {ALICE} "}, {"X-API-Key": ALICE}])
def test_the_right_key_opens_everything_but_the_admins(guarded: Server, headers: dict[str, str]) -> None:
    for method, path in every_route():
        answer = guarded.request(method, path, b"{}", headers=headers)
        is_admins = path in {"/pause", "/resume", "/reset_prefix_cache", "/abort_requests", "/explain/"}
        assert answer.status != 401, (method, path)
        assert (answer.status == 403) == (is_admins and path != "/explain/"), (method, path, answer.body)
    assert guarded.request("GET", "/explain/x", headers=headers).error["code"] == "admin_key_required"
    assert guarded.request("POST", "/resume", headers=bearer(ADMIN)).status == 200


@pytest.mark.parametrize(
    "headers", [{"Authorization": ALICE}, {"Authorization": f"Basic {ALICE}"}, {"Authorization": "Bearer"},
                {"Cookie": ALICE}, {"Authorization": f"Bearer wrong {ALICE}"}]
)  # fmt: skip
def test_a_key_elsewhere_is_none(guarded: Server, headers: dict[str, str]) -> None:
    assert guarded.request("GET", "/v1/models", headers=headers).status == 401
    assert guarded.request("GET", f"/v1/models?api_key={ALICE}&key={ALICE}").status == 401


def cached_tokens(server: Server, prompt: str, key: str) -> int:
    answer = server.request("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1}, headers=bearer(key))
    count: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_nobody_finds_what_another_tenant_has_asked(guarded: Server) -> None:
    """The first finds nothing, the same again its own, another nothing: without the second, no cache at all would
    pass too."""
    prompt = "what only alice knows, at some length, so that there are blocks"
    found = [cached_tokens(guarded, prompt, key) for key in (ALICE, ALICE, BOB, BOB)]
    assert found == [0, len(prompt) // 16 * 16, 0, len(prompt) // 16 * 16]


def test_two_keys_of_one_tenant_share(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("k1 us\nk2 us\n")
    with running_server({}, {"api_key_file": str(tmp_path / "keys")}) as server:
        prompt = "what we both may know, at some length, so that there are blocks"
        assert [cached_tokens(server, prompt, key) > 0 for key in ("k1", "k2")] == [False, True]


def test_tenants_take_turns_under_the_fair_policy(key_file: Path) -> None:
    """Alice has a long queue when Bob comes with one request: he does not wait for all of hers."""
    engine = {"step_s": 0.01, "max_num_seqs": 1, "scheduling": {"scheduling_policy": "fair"}}
    with running_server(engine, {"api_key_file": str(key_file), "access_log": True}) as server:
        server.headers = bearer(ALICE)
        long = {"prompt": ["x"] * 8, "max_tokens": 20}
        whole = begin_call(server, long, ALICE)
        server.wait_until(lambda: server.metric("num_requests_waiting") >= 6)
        server.request("POST", "/v1/completions", {"prompt": "y", "max_tokens": 5}, headers=bearer(BOB))
        assert server.metric("num_requests_waiting") >= 4, "Bob came after nearly all of Alice's"
        whole.close()


def begin_call(server: Server, body: object, key: str) -> http.client.HTTPConnection:
    """A call whose answer nobody waits for."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
    headers = {"Content-Type": "application/json"} | bearer(key)
    connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
    return connection


def test_a_page_of_an_allowed_origin_may_call_and_others_may_not(guarded: Server) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = guarded.request("OPTIONS", "/v1/chat/completions", headers={"Origin": "https://chat.example"} | asked)
    assert preflight.status == 200, "it has no key, since browsers send none"
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    refused = guarded.request("GET", "/v1/models", headers={"Origin": "https://chat.example"})
    assert refused.status == 401
    assert refused.headers["access-control-allow-origin"] == "https://chat.example", "or the page cannot read why"
    other = guarded.request("OPTIONS", "/v1/models", headers={"Origin": "https://evil.example"} | asked)
    assert other.status == 400
    assert "access-control-allow-origin" not in other.headers


def test_without_the_option_there_is_no_cors(server: Server) -> None:
    answer = server.request("GET", "/v1/models", headers={"Origin": "https://chat.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    asked = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    assert server.request("OPTIONS", "/v1/models", headers=asked).status == 405


def test_keys_are_in_no_log_and_no_answer(guarded: Server) -> None:
    everything = b"".join(
        guarded.request(method, path, b"{}", headers=bearer(key)).body
        for method, path in every_route()
        for key in (ALICE, ADMIN, "wrong-secret")
    )
    time.sleep(0.2)
    said = everything.decode() + "".join(guarded.log)
    assert "GET /server_info 200 tenant=alice" in said
    assert "secret" not in said


def test_a_key_on_the_command_line_is_hidden_from_the_list_of_processes(default_model_path: Path) -> None:
    arguments = [
        "noria.cli",
        "serve",
        "--port",
        "0",
        "--api-key",
        "my-own-secret",
        "--admin-api-key",
        "root-secret",
        str(default_model_path),
    ]
    with running(arguments, wait=False) as server:
        shown = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
        assert b"--api-key\0*************\0--admin-api-key\0" in shown
        assert b"secret" not in shown
        assert server.get("/v1/models").status == 401


def test_a_hang_up_does_not_cut_the_server_and_reads_the_keys_again(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first alice\n")
    with running_server({"step_s": 0.01}, {"api_key_file": str(keys)}) as server:
        stream = begin_call(server, {"prompt": "x", "max_tokens": 100, "stream": True}, "first")
        server.headers = bearer("first")
        server.wait_until(lambda: server.metric("num_requests_running") == 1)
        keys.write_text("second alice\n")
        for pid in (server.engine_pid, server.process.pid):
            subprocess.run(["kill", "-HUP", str(pid)], check=True)
        server.wait_until(lambda: server.request("GET", "/version", headers=bearer("second")).status == 200)
        assert server.get("/version").status == 401
        assert stream.getresponse().read().endswith(b"data: [DONE]\n\n")
        stream.close()
        assert server.process.poll() is None


def test_a_hang_up_while_loading_does_not_cut_it_either() -> None:
    with running_server({"load_s": 1.0}, wait=False) as server:
        server.wait_until(lambda: any("engine process" in line for line in server.log))
        server.process.send_signal(signal.SIGHUP)
        server.wait_until(server.is_healthy)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate and its key, made here."""
    where = tmp_path_factory.mktemp("tls")
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    command = ["openssl", *words.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key", "-out", "cert"]
    try:
        subprocess.run(command, cwd=where, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl, which makes the certificate, is not installed")
    return str(where / "cert"), str(where / "key")


def test_https(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    with running_server(server={"ssl_certfile": cert, "ssl_keyfile": key}) as server:
        assert server.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=cert)
        connection = http.client.HTTPSConnection(server.host, server.port, timeout=20, context=context)
        body = json.dumps({"prompt": "x", "max_tokens": 5, "stream": True}).encode()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        got = connection.getresponse()
        answer = Response(got.status, {k.lower(): v for k, v in got.getheaders()}, got.read())
        connection.close()
        assert len(answer.events) == 5
        with socket.create_connection((server.host, server.port)) as plain:
            plain.settimeout(10)
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" not in plain.recv(1000), "nothing is said in the clear"


@pytest.mark.parametrize("wrong", ["missing", "swapped"])
def test_a_certificate_that_cannot_be_used_is_said_at_once(certificate: tuple[str, str], wrong: str) -> None:
    cert, key = certificate if wrong == "missing" else certificate[::-1]
    command = [sys.executable, "-m", "noria.cli", "serve", "--port", "0", "--ssl-certfile", cert, "--ssl-keyfile"]
    done = subprocess.run([*command, "/no/such" if wrong == "missing" else key], capture_output=True, text=True)
    assert done.returncode != 0
    assert "--ssl-keyfile" in done.stderr
    assert "Traceback" not in done.stderr


def test_behind_a_proxy_that_takes_its_path_off() -> None:
    with running_server(server={"root_path": "/llm", "api_key": ["k"]}) as server:
        assert server.get("/health").status == 200
        assert server.get("/llm/health").status == 401, "that would be /llm/llm/health outside"
        assert server.get("/v1/models").status == 401
        assert server.request("GET", "/v1/models", headers=bearer("k")).status == 200
        document = server.request("GET", "/openapi.json", headers=bearer("k")).json
        assert document["servers"] == [{"url": "/llm"}]
