"""From the command to the engine's process: nothing heavy before it, and nothing left behind."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from urllib.request import Request, urlopen

import pytest

from noria import assembly
from noria.config import EngineOptions
from noria.errors import ModelError, OptionError
from noria.server.scripted import open_scripted
from noria.server.start import Launch, Served, _check_certificate


def test_the_engine_starts_before_anything_heavy_is_imported() -> None:
    program = (
        "import sys, noria.cli, noria.server.start\n"
        "print({'numpy', 'zmq', 'starlette', 'uvicorn', 'tokenizers', 'jinja2', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


SLOW_IMPORTS = """
import sys, time
from functools import partial
from noria.config import ServerOptions
from noria.server.scripted import open_scripted
from noria.server.start import serve

class Slow:
    def find_spec(self, name, path, target=None):
        if name == "noria.server.run":
            time.sleep(2)

sys.meta_path.insert(0, Slow())
sys.exit(serve(partial(open_scripted, {}), ServerOptions(port=0)))
"""


def test_the_time_that_starting_took_has_the_imports_in_it() -> None:
    with subprocess.Popen([sys.executable, "-c", SLOW_IMPORTS], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        [took_s] = next(
            found for line in server.stderr if (found := re.findall(r"Noria serves .* after (\S+) s", line))
        )
        server.terminate()
    assert 2 <= float(took_s) < 60


WITHOUT_TEMPLATE = """
import sys
from functools import partial
from noria.config import ServerOptions
from noria.fakes.engine import build_scripted_engine
from noria.fakes.tokenizer import ByteTokenizer
from noria.logs import log_to_stderr
from noria.server.start import Served, serve

def plain():
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = None
    return tokenizer

log_to_stderr("info")
sys.exit(serve(lambda: Served("plain", partial(build_scripted_engine), plain), ServerOptions(port=0)))
"""


@pytest.mark.parametrize(
    "module", [["-m", "noria.server.scripted", '{"server": {"port": 0}}'], ["-c", WITHOUT_TEMPLATE]]
)
def test_the_command_that_is_suggested_works(module: list[str]) -> None:
    with subprocess.Popen([sys.executable, *module], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            log = []
            for line in server.stderr:
                log.append(line)
                if "Noria serves" in line:
                    break
            command = shlex.split(log[-1].split(" Try: ")[1])
            url, body = command[1], json.loads(command[-1])
            headers = {"Content-Type": "application/json"}
            with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=30) as answer:
                assert json.load(answer)["choices"]
        finally:
            server.kill()
    has_no_template = module[0] == "-c"
    assert url.endswith("/v1/completions" if has_no_template else "/v1/chat/completions")
    assert any("the model has no chat template" in line for line in log) == has_no_template


def test_closing_ends_the_process_and_removes_its_sockets() -> None:
    launch = Launch(partial(open_scripted, {}))
    served, engine = launch.started.result(timeout=60)
    assert served.name == "scripted"
    assert engine.process.is_alive()
    directory = Path(engine.address.removeprefix("ipc://")).parent
    assert directory.is_dir()
    launch.close()
    assert not engine.process.is_alive()
    assert not directory.exists()
    launch.close()


def test_what_goes_wrong_is_told() -> None:
    def find() -> Served:
        raise ModelError("no such model")

    with pytest.raises(ModelError, match="no such model"):
        Launch(find).started.result(timeout=60)


def test_a_model_that_is_found_too_late_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noria.server.start.EngineProcess", lambda build: pytest.fail("it started"))
    go, found = threading.Event(), threading.Event()

    def find() -> Served:
        go.wait()
        found.set()
        return open_scripted({})

    launch = Launch(find)
    launch.close()
    go.set()
    assert found.wait(60)
    with pytest.raises(TimeoutError):
        launch.started.result(timeout=0.2)


def test_a_server_may_have_more_connections_than_a_process_has_at_first():
    code = (
        "import resource as r; from noria.file_limit import raise_file_limit; most = r.getrlimit(r.RLIMIT_NOFILE)[1]; "
        "r.setrlimit(r.RLIMIT_NOFILE, (256, most)); raise_file_limit(); print(r.getrlimit(r.RLIMIT_NOFILE), most)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    soft, hard, most = map(int, re.findall(r"-?\d+", printed))
    assert hard == most
    assert soft > 256 or most == 256


def test_certificates_that_cannot_be_used_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("junk")
    with pytest.raises(OptionError, match=r"^ssl_keyfile \S*key.pem: No such file or directory"):
        _check_certificate(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
    (tmp_path / "key.pem").write_text("junk")
    with pytest.raises(OptionError, match="are not a certificate and its private key, both in PEM form"):
        _check_certificate(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))


def test_a_length_beyond_the_model_s_is_told_before_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    files = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=8192))
    monkeypatch.setattr(assembly, "open_model", lambda *_, **__: files)
    monkeypatch.setattr(assembly, "create_executor", lambda *_, **__: pytest.fail("it loads"))
    with pytest.raises(OptionError, match="more than the 8192 tokens that the model supports"):
        assembly.build_core("model", EngineOptions(max_model_len=9000), report=lambda line: None)
