"""How far bfloat16 is from float32: ours beside transformers' own, over the same tokens. Measured and printed.

The reference executor over the test prompts and their answers; the native one over thousands of positions of text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from noria.files.sources import open_model
from noria.ops.native import NativeExecutor, why_unavailable
from noria.ops.reference import TorchExecutor
from noria.runner.executor import Executor, ForwardBatch
from support.engines import Judged, judge, llm_factory
from support.reference import Reference

Logits = npt.NDArray[np.float32]

NUM_POSITIONS, PIECE_TOKENS = 5_120, 512


@dataclass
class Distance:
    """From the float32 distribution to another one, over all positions added so far."""

    num_positions: int = 0
    sum_kl: float = 0.0  # nats
    num_agreements: int = 0

    def add(self, exact: Logits, other: Logits) -> None:
        """Both are [positions, vocab_size]; a few positions at a time, for the sake of memory."""
        for start in range(0, len(exact), 64):
            a, b = exact[start : start + 64], other[start : start + 64]
            p, q = _log_softmax(a), _log_softmax(b)
            self.num_positions += len(a)
            self.sum_kl += float((np.exp(p) * (p - q)).sum())
            self.num_agreements += int((a.argmax(axis=1) == b.argmax(axis=1)).sum())

    @property
    def mean_kl(self) -> float:
        return self.sum_kl / self.num_positions

    @property
    def top1_agreement(self) -> float:
        return self.num_agreements / self.num_positions

    def __str__(self) -> str:
        return f"mean KL {self.mean_kl:.2e} nats, top-1 agreement {self.top1_agreement:.2%}"


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def all_logits(executor: Executor, tokens: list[int], block_size: int = 16) -> Logits:
    """[tokens, vocab_size]: what the model expects after each token, from one forward pass."""
    num_tokens, num_blocks = len(tokens), -(-len(tokens) // block_size)
    num_groups = len(executor.kv_windows)
    executor.allocate_kv(num_blocks * num_groups, block_size)
    positions = np.arange(num_tokens, dtype=np.int32)
    return executor.forward(
        ForwardBatch(
            token_ids=np.array(tokens, dtype=np.int32),
            positions=positions,
            slots=positions + block_size,  # blocks 1, 2, 3, ... in order
            query_start=np.array([0, num_tokens], dtype=np.int32),
            context_len=np.array([num_tokens], dtype=np.int32),
            block_table=np.arange(1, num_blocks + 1, dtype=np.int32)[None],
            logit_tokens=positions,
        ).spread(num_groups, block_size)
    )


def distance(exact: Logits, other: Logits) -> Distance:
    measured = Distance()
    measured.add(exact, other)
    return measured


def test_the_measure_itself() -> None:
    logits = np.random.default_rng(0).normal(size=(100, 30)).astype(np.float32)
    shifted = distance(logits, logits + 3)
    assert (shifted.num_positions, shifted.mean_kl, shifted.top1_agreement) == (100, pytest.approx(0, abs=1e-6), 1.0)
    reversed_ = distance(logits, logits[:, ::-1])
    assert reversed_.mean_kl > 0.5
    assert reversed_.top1_agreement < 0.2
    # KL((0.5, 0.5) || (0.9, 0.1)), by hand.
    two = distance(np.zeros((1, 2), np.float32), np.log(np.array([[0.9, 0.1]], np.float32)))
    assert two.mean_kl == pytest.approx(0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1), abs=1e-6)


def report(path: Path, directory: Path, judged: Judged) -> None:
    """Compares over the judged prompts and their answers; ours must not be much further off than transformers'."""
    exact, peer = Reference(directory), Reference(directory, "bfloat16")
    files = open_model(path)
    in_float32, in_bfloat16 = (TorchExecutor(files, dtype=dtype) for dtype in ("float32", "bfloat16"))
    same, ours, theirs = Distance(), Distance(), Distance()
    for prompt, answer in zip(judged.prompts, judged.answers, strict=True):
        tokens = prompt + answer
        truth = exact.logits(tokens).numpy()
        same.add(truth, all_logits(in_float32, tokens))
        ours.add(truth, all_logits(in_bfloat16, tokens))
        theirs.add(truth, peer.logits(tokens).numpy())
    print(f"\n{files.name}, {same.num_positions} positions, against transformers in float32:")
    print(f"  noria float32:         {same}")
    print(f"  noria bfloat16:        {ours}")
    print(f"  transformers bfloat16: {theirs}")
    assert same.mean_kl < 1e-6
    assert ours.mean_kl < 2 * theirs.mean_kl


@pytest.mark.full
def test_default_model(default_model_path: Path, default_model_hf_directory: Path, judged: Judged) -> None:
    report(default_model_path, default_model_hf_directory, judged)


@pytest.mark.full
def test_qwen(qwen_path: Path, qwen_hf_directory: Path) -> None:
    llm = llm_factory(qwen_path, "float32")()
    report(qwen_path, qwen_hf_directory, judge(qwen_hf_directory, llm))


def documentation(reference: Reference) -> list[list[int]]:
    """This project's own documentation, in pieces of `PIECE_TOKENS` tokens: text that no model was tuned on."""
    root = Path(__file__).parents[2]
    files = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    tokens = reference.tokenizer("\n".join(file.read_text() for file in files))["input_ids"][:NUM_POSITIONS]
    assert len(tokens) == NUM_POSITIONS
    return [tokens[start : start + PIECE_TOKENS] for start in range(0, NUM_POSITIONS, PIECE_TOKENS)]


def report_native(path: Path, directory: Path) -> None:
    """The native executor in bfloat16 is no further from float32 than transformers' bfloat16 is."""
    exact, peer = Reference(directory), Reference(directory, "bfloat16")
    files = open_model(path)
    in_float32, in_bfloat16 = (NativeExecutor(files, dtype=dtype) for dtype in ("float32", "bfloat16"))
    same, ours, theirs = Distance(), Distance(), Distance()
    for tokens in documentation(exact):
        truth = exact.logits(tokens).numpy()
        same.add(truth, all_logits(in_float32, tokens))
        ours.add(truth, all_logits(in_bfloat16, tokens))
        theirs.add(truth, peer.logits(tokens).numpy())
    print(f"\n{files.name}, {same.num_positions} positions, against transformers in float32:")
    print(f"  native float32:        {same}")
    print(f"  native bfloat16:       {ours} ({in_bfloat16.kernel})")
    print(f"  transformers bfloat16: {theirs}")
    assert same.num_positions >= 5_000
    assert same.mean_kl < 1e-6
    assert ours.mean_kl <= theirs.mean_kl


needs_native = pytest.mark.skipif(why_unavailable() is not None, reason=why_unavailable() or "")


@pytest.mark.full
@needs_native
def test_native_default_model(default_model_path: Path, default_model_hf_directory: Path) -> None:
    report_native(default_model_path, default_model_hf_directory)


@pytest.mark.full
@needs_native
def test_native_qwen(qwen_path: Path, qwen_hf_directory: Path) -> None:
    report_native(qwen_path, qwen_hf_directory)
