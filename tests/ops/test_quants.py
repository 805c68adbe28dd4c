"""Reading quantised blocks natively: bit for bit what the `gguf` package reads, and packed where it belongs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st

from files.checkpoints import write_safetensors
from models.support import PagedDriver, random_prompts, tiny_model, transformers_logits
from models.test_gguf import write_gguf
from noria.files.gguf_format import ENCODING_IDS, ENCODINGS
from noria.files.model import HostTensor, RawTensor
from noria.files.safetensors import SafetensorsFile
from noria.files.sources import open_model
from noria.ops.native import NativeExecutor

try:
    from noria.ops import _native
except ImportError:
    pytest.skip("the native executor was not built here", allow_module_level=True)
if not _native.has_avx512_bf16():
    pytest.skip("this CPU has no AVX-512 with BF16", allow_module_level=True)

SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ4_NL": [0], "IQ4_XS": [0],
}  # fmt: skip
"""Where a block has its float16 numbers, in bytes: a scale, perhaps a minimum."""

LENGTHS = [1, 20, 65]
EXTREMES = np.array([0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 1.0, -1.0, 65504.0, -65504.0, np.inf, -np.inf, np.nan], np.float16)


def reference(rows: npt.NDArray[np.uint8], encoding: str) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return dequantize(rows, gguf.GGMLQuantizationType(ENCODING_IDS[encoding]))


def assert_same_bits(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    """Bit for bit, save that one NaN is as good as another."""
    assert found.shape == expected.shape
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(found[numbers].view(np.uint32), expected[numbers].view(np.uint32))


@pytest.mark.parametrize("encoding", _native.encodings())
@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 5), num_blocks=st.integers(1, 19), extreme=st.booleans())
def test_blocks_are_read_as_the_gguf_package_reads_them(
    encoding: str, seed: int, num_rows: int, num_blocks: int, extreme: bool
) -> None:
    random = np.random.default_rng(seed)
    block_bytes = ENCODINGS[ENCODING_IDS[encoding]].block_bytes
    blocks = random.integers(0, 256, (num_rows * num_blocks, block_bytes), dtype=np.uint8)
    for place in SCALES.get(encoding, []):
        some = random.choice(EXTREMES, len(blocks)) if extreme else random.normal(0, 0.1, len(blocks)).astype("f2")
        blocks[:, place : place + 2] = some.view(np.uint8).reshape(-1, 2)
    rows = blocks.reshape(num_rows, -1)
    assert_same_bits(_native.decode(rows, encoding), reference(rows, encoding))


def test_every_encoding_that_native_code_names_has_the_shape_that_the_reader_expects() -> None:
    assert set(_native.encodings()) >= {"F32", "F16", "BF16", *SCALES}
    assert set(_native.encodings()) <= set(ENCODING_IDS)


@pytest.mark.parametrize("shape", [(4,), (3, 8), (2, 3, 4)])
@pytest.mark.parametrize(("encoding", "dtype"), [("F32", "f4"), ("F16", "f2"), ("BF16", "u2")])
def test_raw_rows_of_safetensors_hold_its_values(
    tmp_path: Path, shape: tuple[int, ...], encoding: str, dtype: str
) -> None:
    values = np.random.default_rng(1).integers(0, 100, shape).astype(dtype)
    file = SafetensorsFile(write_safetensors(tmp_path / "odd.safetensors", {"a": (encoding, values)}))
    raw = file.raw("a")
    assert raw.encoding == encoding
    assert raw.rows.shape == (int(np.prod(shape[:-1])), values.nbytes // int(np.prod(shape[:-1])))
    assert raw.rows.tobytes() == values.tobytes()


@dataclass
class Requantised:
    """A model file whose matrices come in another encoding; not `is_known`: in one that native code does not know."""

    inner: object
    encoding: str
    is_known: bool = True

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def _rows(self, name: str) -> npt.NDArray[np.uint8]:
        values = self.inner.read(name).data  # type: ignore[attr-defined]
        return quantize(values.astype("f4"), gguf.GGMLQuantizationType(ENCODING_IDS[self.encoding])).view(np.uint8)

    def raw(self, name: str) -> RawTensor:
        if len(self.inner.tensors[name].shape) == 1:  # type: ignore[attr-defined]
            return self.inner.raw(name)  # type: ignore[attr-defined]
        return RawTensor(self._rows(name), self.encoding if self.is_known else "IQ9_ODD")

    def read(self, name: str) -> HostTensor:
        if len(self.inner.tensors[name].shape) == 1:  # type: ignore[attr-defined]
            return self.inner.read(name)  # type: ignore[attr-defined]
        return HostTensor(reference(self._rows(name), self.encoding), "float32")


def logits(files: object, dtype: str) -> list[npt.NDArray[np.float32]]:
    executor = NativeExecutor(files, dtype=dtype, threads=2)  # type: ignore[arg-type]
    driver = PagedDriver(executor, num_blocks=40, block_size=16)
    return [values.copy() for values in driver.logits(random_prompts(LENGTHS), LENGTHS)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("encoding", ["Q4_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_what_is_decoded_natively_runs_as_what_is_decoded_before(tmp_path: Path, encoding: str, dtype: str) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    files = open_model(tmp_path)
    known, unknown = (logits(Requantised(files, encoding, is_known), dtype) for is_known in (True, False))
    assert all(np.array_equal(a, b) for a, b in zip(known, unknown, strict=True))
    if (encoding, dtype) != ("BF16", "bfloat16"):  # which rounds as the executor does
        assert not np.array_equal(known[0], logits(files, dtype)[0]), "the encoding should show"


@pytest.mark.parametrize("bias", [False, True])
def test_rows_of_interleaved_heads_find_their_places(tmp_path: Path, bias: bool) -> None:
    model = tiny_model("llama", attention_bias=bias)
    write_gguf(model, tmp_path / "tiny.gguf")
    found = logits(open_model(tmp_path / "tiny.gguf"), "float32")
    for prompt, ours in zip(random_prompts(LENGTHS), found, strict=True):
        np.testing.assert_allclose(ours, transformers_logits(model, prompt), rtol=0, atol=1e-4)


def test_progress_moves_within_a_tensor_and_ends_at_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noria.ops.native._REPORTED_ELEMENTS", 1000)
    tiny_model("llama").save_pretrained(tmp_path)
    told: list[tuple[int, int]] = []
    NativeExecutor(open_model(tmp_path), dtype="bfloat16", threads=2, report=lambda *counts: told.append(counts))
    done = [count for count, _ in told]
    assert done == sorted(done)
    assert max(np.diff(done)) <= 1000
    assert told[-1][0] == told[-1][1] == {total for _, total in told}.pop()


@pytest.mark.parametrize(
    ("encoding", "shape", "heads", "span", "message"),
    [
        ("Q4_1", (8, 40), 0, (0, 8), "no encoding|whole|as many numbers"),
        ("Q9_9", (8, 128), 0, (0, 8), "no encoding is called Q9_9"),
        ("F32", (8, 124), 0, (0, 8), "as many numbers as inputs"),
        ("F32", (8, 128), 3, (0, 8), "whole heads"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    encoding: str, shape: tuple[int, int], heads: int, span: tuple[int, int], message: str
) -> None:
    executor = _native.ExecutorBF16(1, False)
    matrix = executor.begin_matrix(8, 32, False)
    with pytest.raises(ValueError, match=message):
        executor.fill_matrix(matrix, 0, np.zeros(shape, np.uint8), encoding, heads, *span)


@pytest.mark.parametrize(("first_row", "span"), [(0, (0, 9)), (1, (0, 8)), (0, (-1, 2)), (-1, (0, 2)), (0, (3, 2))])
def test_rows_outside_the_matrix_are_refused(first_row: int, span: tuple[int, int]) -> None:
    executor = _native.ExecutorBF16(1, False)
    matrix = executor.begin_matrix(8, 32, False)
    with pytest.raises(IndexError, match="matrix rows"):
        executor.fill_matrix(matrix, first_row, np.zeros((8, 128), np.uint8), "F32", 0, *span)
