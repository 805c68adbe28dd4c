"""Making an executor: options that cannot be had are refused with what to change; loading reports its progress."""

from __future__ import annotations

import builtins
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.support import LONGROPE, PagedDriver, random_prompts, tiny_model, transformers_logits
from noria.assembly import join_core
from noria.config import EngineOptions
from noria.errors import OptionError, UnsupportedError
from noria.files.model import ModelFiles
from noria.files.sources import open_model
from noria.ops.executors import create_executor as create
from noria.ops.native import why_unavailable


def create_executor(files: ModelFiles, *, report: Any = None, **options: Any) -> Any:
    return create(files, EngineOptions(executor="torch", **options), report=report)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(path)
    return open_model(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype 'float16' is not supported; use one of bfloat16, float32"),
        ({"dtype": "float32", "device": "abacus"}, "device 'abacus' is not supported; use cpu"),
        ({"dtype": "float32", "device": "meta"}, "device 'meta' is not supported; use cpu, cuda or cuda:N"),
    ],
)
def test_options_are_refused(files: ModelFiles, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        create_executor(files, **options)


@pytest.mark.parametrize("kind", ["native", "torch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_log_says_what_runs_in_which_precision(
    kind: str, dtype: str, files: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "native" and (reason := why_unavailable()):
        pytest.skip(reason)
    caplog.set_level("INFO")
    create(files, EngineOptions(executor=kind, dtype=dtype, threads=1))
    assert f"{kind} executor: {dtype}" in caplog.text


@pytest.mark.parametrize(("count", "message"), [(0, "sees no CUDA device"), (1, "sees 1 CUDA devices")])
def test_a_cuda_device_that_is_not_there(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch, count: int, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(OptionError, match=message):
        create_executor(files, dtype="float32", device="cuda:3")


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_longrope_is_chosen_from_the_length_that_the_pool_leaves(kind: str, tmp_path: Path) -> None:
    """One executor, which one engine after the other takes over. The original context is of 48 tokens, and texts of up
    to that length are those for which transformers takes the short factors."""
    if kind == "native" and (reason := why_unavailable()):
        pytest.skip(reason)
    model = tiny_model("phi3", **LONGROPE)
    model.save_pretrained(tmp_path)
    files = open_model(tmp_path)
    executor = create(files, EngineOptions(executor=kind, dtype="float32", threads=1))
    text, longer_text = random_prompts([40, 60])
    for asked, num_blocks, final in [(None, 3, 48), (None, 4, 64), (500, 3, 48), (48, 40, 48), (49, 40, 49)]:
        options = EngineOptions(dtype="float32", max_model_len=asked, num_kv_blocks=num_blocks)
        core = join_core(files, executor, options)
        assert core.scheduler.config.max_model_len == final
        driver = PagedDriver(executor, num_blocks=8, block_size=16)
        known = text if final == 48 else longer_text
        (logits,) = driver.logits([known], [100])
        np.testing.assert_allclose(logits, transformers_logits(model, known), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("head_dim", "message"), [(24, "not 24"), (100, "not 100"), (272, "at most 256, not 272")])
def test_heads_that_native_code_does_not_run(
    head_dim: int, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Told before weights are loaded; who did not choose the executor gets the other one, and the reason in the log."""
    if reason := why_unavailable():
        pytest.skip(reason)
    tiny_model("llama", head_dim=head_dim, num_hidden_layers=1).save_pretrained(tmp_path)
    files = open_model(tmp_path)
    with pytest.raises(OptionError, match=f"heads have a multiple of 16 values.*{message}; executor=torch runs"):
        create(files, EngineOptions(executor="native"))
    caplog.set_level("INFO")
    assert type(create(files, EngineOptions(executor="auto", threads=1))).__name__ == "TorchExecutor"
    assert "not on the native executor: the native executor needs a model whose heads" in caplog.text
    assert message in caplog.text


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_torch(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)
        return original(name, *rest)

    monkeypatch.delitem(sys.modules, "noria.ops.reference", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_torch)


@pytest.mark.usefixtures("no_torch")
def test_without_torch_it_says_what_to_install(files: ModelFiles) -> None:
    with pytest.raises(OptionError, match=r'pip install "noria\[torch\]"'):
        create_executor(files, dtype="float32")


@pytest.mark.parametrize("has_torch", [True, False])
def test_a_cpu_that_native_code_does_not_run_on(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, has_torch: bool
) -> None:
    native = pytest.importorskip(
        "noria.ops._native", reason="the native executor was not built here", exc_type=ImportError
    )
    monkeypatch.setattr(native, "has_avx512_bf16", lambda: False)
    needs = "the native executor needs a CPU that has AVX-512 with BF16"
    with pytest.raises(OptionError, match=f"{needs}; executor=torch runs without it"):
        create(files, EngineOptions(executor="native"))
    if has_torch:
        assert type(create(files, EngineOptions(executor="auto"))).__name__ == "TorchExecutor"
    else:
        request.getfixturevalue("no_torch")
        with pytest.raises(OptionError, match=rf'{needs}; and .*pip install "noria\[torch\]"'):
            create(files, EngineOptions(executor="auto"))


def test_an_extension_that_was_built_from_other_sources(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    native = pytest.importorskip(
        "noria.ops._native", reason="the native executor was not built here", exc_type=ImportError
    )
    monkeypatch.delattr(native, "interface")  # older ones have none
    with pytest.raises(OptionError, match="built from other sources than these; install again"):
        create(files, EngineOptions(executor="native"))


def test_a_pool_that_does_not_fit(files: ModelFiles) -> None:
    executor = create_executor(files, dtype="float32", threads=1)
    with pytest.raises(OptionError, match=r"KV pool of 1000000000000 blocks .* lower num_kv_blocks"):
        executor.allocate_kv(10**12, 16)


def test_loading_reports_bytes(files: ModelFiles) -> None:
    seen: list[tuple[int, int]] = []
    executor = create_executor(files, dtype="float32", threads=1, report=lambda done, total: seen.append((done, total)))
    totals = dict.fromkeys(total for _, total in seen)
    done = [d for d, _ in seen]
    assert done == sorted(done)
    assert list(totals) == [done[-1]]
    constants = 8 * 4  # the rotary frequencies are in no file
    assert executor.num_weight_bytes == done[-1] + constants
    assert executor.num_weight_bytes - constants == sum(p.nbytes for p in tiny_model("llama").parameters())
    assert executor.config == files.config


def test_loading_in_bfloat16_halves_what_products_use(files: ModelFiles) -> None:
    whole, half = (create_executor(files, dtype=dtype, threads=1) for dtype in ("float32", "bfloat16"))
    assert half.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    assert half.num_weight_bytes < 0.51 * whole.num_weight_bytes


def test_an_architecture_that_is_not_there(files: ModelFiles) -> None:
    class Renamed:
        def __getattr__(self, name: str) -> Any:
            return replace(files.config, architecture="mamba") if name == "config" else getattr(files, name)

    with pytest.raises(UnsupportedError, match="'mamba' is not supported; supported: llama, qwen2"):
        create_executor(Renamed(), dtype="float32", threads=1)
