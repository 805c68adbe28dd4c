"""`noria bench determinism`: are the logits of a request the same bits whatever happens around it?

Some sequences are answered in every combination of: alone or batched, cold or with a warm prefix cache, several token
budgets (so prompts are cut into other chunks), preempted or not, blocks as they come or shuffled, and numbers of
threads. At the executor every row of logits is filed under all the tokens that it follows from, and compared with what
the first case gave for the same tokens. Each case must also have done what its name says, or it would prove nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from noria.assembly import Assembled, join
from noria.bench.throughput import run_workload
from noria.bench.watched import ExecutorWrapper
from noria.bench.workload import WorkloadRequest
from noria.config import EngineOptions
from noria.errors import NoriaError, OptionError
from noria.files.model import ModelFiles
from noria.files.sources import open_model
from noria.kv_layout import KVLayout, group_layers
from noria.ops.executors import create_executor
from noria.runner.executor import Executor, Float32Array, ForwardBatch, GroupBlocks, Int32Array
from noria.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

MakeExecutor = Callable[[ModelFiles, EngineOptions], Executor]
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """How much is compared. `budgets`: tokens of a step."""

    num_sequences: int = 24
    num_new_tokens: int = 16
    longest_prompt: int = 200
    budgets: tuple[int, ...] = (16, 100, 512)
    threads: tuple[int, ...] = (1, 2)

    def __post_init__(self) -> None:
        if min(self.num_sequences, self.longest_prompt, *self.threads) < 1 or self.num_new_tokens < 2:
            raise OptionError(
                "--sequences, --longest-prompt and --threads must be at least 1, and --new-tokens at least 2"
            )
        if self.longest_prompt <= BLOCK_SIZE:
            raise OptionError(f"--longest-prompt must be over {BLOCK_SIZE}: only whole blocks are found in the cache")

    def prompts(self, vocab_size: int) -> list[tuple[int, ...]]:
        """Random, their lengths spread evenly up to the longest."""
        numbers = random.Random(1)
        lengths = np.linspace(1, self.longest_prompt, self.num_sequences).astype(int).tolist()
        lengths[-1] = self.longest_prompt
        return [tuple(numbers.randrange(vocab_size) for _ in range(length)) for length in lengths]

    def cases(self) -> Iterator[Case]:
        """Preempted are only batched ones: a sequence that is alone keeps its blocks."""
        for threads, budget, shuffled, warm in itertools.product(
            self.threads, self.budgets, (False, True), (False, True)
        ):
            for batched, preempted in ((False, False), (True, False), (True, True)):
                yield Case(
                    threads=threads, budget=budget, shuffled=shuffled, warm=warm, batched=batched, preempted=preempted
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination."""

    threads: int
    budget: int
    shuffled: bool
    warm: bool
    batched: bool
    preempted: bool

    def __str__(self) -> str:
        words = (
            "batched" if self.batched else "alone",
            "warm" if self.warm else "cold",
            f"budget {self.budget}",
            "preempted" if self.preempted else "",
            "blocks shuffled" if self.shuffled else "",
            f"{self.threads} threads",
        )
        return ", ".join(filter(None, words))

    def options(self, matrix: Matrix, dtype: str, executor: str, windows: tuple[int | None, ...]) -> EngineOptions:
        layout = KVLayout(BLOCK_SIZE, windows, self.budget)
        longest = layout.most_blocks(matrix.longest_prompt + matrix.num_new_tokens)
        names: dict[str, object] = {
            "dtype": dtype,
            "executor": executor,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": min(self.budget, matrix.num_sequences) if self.batched else 1,
            "max_num_batched_tokens": self.budget,
            "enable_prefix_caching": self.warm,
            # So few that they must be taken from each other, or enough for everybody, cached prompts included.
            "num_kv_blocks": longest + layout.num_groups
            if self.preempted
            else (longest + layout.num_groups) * (matrix.num_sequences + 1),
            "adaptive_watermark": not self.preempted,
            "reserve_full_sequence": not self.preempted,
            "threads": self.threads,
        }
        return EngineOptions.from_names(names)


@dataclass(slots=True)
class Ledger:
    """What was seen. `first` is the first case's digest of the logits that follow some tokens."""

    first: dict[bytes, bytes] = field(default_factory=dict)
    num_compared: int = 0
    num_different: int = 0
    is_first_case: bool = True

    def note(self, tokens: bytes, logits: bytes) -> None:
        """Tokens that the first case did not come to mean that an earlier choice was another: a difference too."""
        if self.is_first_case:
            self.first[tokens] = logits
            return
        self.num_compared += 1
        self.num_different += self.first.get(tokens) != logits


class RecordingExecutor(ExecutorWrapper):
    """Files each row of logits under the tokens it follows from, and may deal KV blocks in another order.

    A slot remembers the digest of all tokens up to its own, made from that of the position before, which is found
    through the block table: so what a prefix cache supplied is in it, and what a window has moved past as well.
    `seed` None leaves blocks where they are.
    """

    def __init__(self, executor: Executor, ledger: Ledger, seed: int | None) -> None:
        super().__init__(executor)
        self._ledger = ledger
        self._seed = seed
        self._block_size = 0
        reaches = [np.inf if window is None else window for window in executor.kv_windows]
        self._group = int(np.argmax(reaches))  # its tables keep most of what came before
        self._sees_back = max(reaches) > 1
        self._placement: Int32Array = np.zeros(0, dtype=np.int32)
        self._digest_at: list[bytes] = []

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        super().allocate_kv(num_blocks, block_size)
        self._block_size = block_size
        self._placement = np.arange(num_blocks + 1, dtype=np.int32)
        if self._seed is not None:
            self._placement[1:] = np.random.default_rng(self._seed).permutation(self._placement[1:])
        self._digest_at = [b""] * ((num_blocks + 1) * block_size)

    def forward(self, batch: ForwardBatch) -> Float32Array:
        digests = self._note_tokens(batch)
        first, *others = [self._placed(group) for group in batch.groups]
        logits = self.inner.forward(
            replace(batch, slots=first.slots, block_table=first.block_table, other_groups=tuple(others))
        )
        for token, values in zip(batch.logit_tokens.tolist(), logits, strict=True):
            self._ledger.note(digests[token], _digest(values))
        return logits

    def _note_tokens(self, batch: ForwardBatch) -> list[bytes]:
        """For each token of the batch the digest of its sequence up to it; that is noted for its slot."""
        size = self._block_size
        group = batch.groups[self._group]
        rows = np.repeat(np.arange(len(batch.context_len)), np.diff(batch.query_start))
        before = np.maximum(batch.positions - 1, 0)
        if self._sees_back:
            places = (group.block_table[rows, before // size] * size + before % size).tolist()
        digests = []
        for i, (position, slot) in enumerate(zip(batch.positions.tolist(), group.slots.tolist(), strict=True)):
            if not position:
                known = b""
            else:  # windows of a single token see nothing of what came before but how much it was
                known = self._digest_at[places[i]] if self._sees_back else position.to_bytes(4, "little")
            self._digest_at[slot] = _digest(batch.token_ids[i : i + 1], known)
            digests.append(self._digest_at[slot])
        return digests

    def _placed(self, group: GroupBlocks) -> GroupBlocks:
        size = self._block_size
        slots = self._placement[group.slots // size] * size + group.slots % size
        return GroupBlocks(slots, self._placement[group.block_table])


def measure_determinism(
    model: str | None,
    matrix: Matrix,
    *,
    dtype: str,
    executor: str = "auto",
    make_executor: MakeExecutor = create_executor,
) -> dict[str, Any]:
    """Runs every case. `dtype` and `executor` as in `EngineOptions`.

    Raises `NoriaError` when a case did not do what it is there for.
    """
    files = open_model(model, report=logger.info)
    tokenizer = load_tokenizer(files.tokenizer)
    prompts = matrix.prompts(files.config.vocab_size)
    ledger = Ledger()
    windows = group_layers([files.config.window(layer) for layer in range(files.config.num_layers)]).windows
    longest = matrix.longest_prompt + matrix.num_new_tokens
    if unused := sorted({window for window in windows if window is not None and window >= longest}):
        logger.warning(
            "no sequence is longer than the model's window of %d tokens, which says nothing about it: take a "
            "--longest-prompt above that",
            unused[-1],
        )
    by_case: dict[str, int] = {}
    num_cases = 0
    for threads, cases in itertools.groupby(matrix.cases(), key=lambda case: case.threads):
        loaded: Executor | None = None
        for case in cases:
            case_options = case.options(matrix, dtype, executor, windows)
            loaded = loaded or make_executor(files, case_options)
            before = ledger.num_different
            _run_case(case, files, tokenizer, loaded, case_options, prompts, matrix, ledger)
            if ledger.is_first_case and len(ledger.first) != len(prompts) * matrix.num_new_tokens:
                raise NoriaError("two of the random sequences are the same: nothing can be told from them")
            ledger.is_first_case = False
            num_cases += 1
            if ledger.num_different > before:
                by_case[str(case)] = ledger.num_different - before
            logger.info("%s: %d different", case, ledger.num_different - before)
        logger.info("all cases on %d threads are done", threads)
    return {
        "model": files.name,
        "dtype": dtype,
        "sequences": len(prompts),
        "cases": num_cases,
        "compared": ledger.num_compared,
        "different": ledger.num_different,
        "different_by_case": by_case,
    }


def _run_case(
    case: Case,
    files: ModelFiles,
    tokenizer: Tokenizer,
    executor: Executor,
    options: EngineOptions,
    prompts: Sequence[tuple[int, ...]],
    matrix: Matrix,
    ledger: Ledger,
) -> None:
    recording = RecordingExecutor(executor, ledger, seed=case.budget if case.shuffled else None)
    assembled = join(files, tokenizer, recording, options)
    requests = [WorkloadRequest(prompt, matrix.num_new_tokens) for prompt in prompts]
    num_preemptions = num_cached_tokens = 0
    # The second time prompts are found in the cache, the longest first: where memory is short and windows make room for
    # others, only it is sure to be there, if it came alone into an empty cache just before.
    rounds = [requests, requests[-1:], requests[::-1]] if case.warm else [requests]
    for number, ordered in enumerate(rounds):
        if number == 1 and case.preempted:
            assembled.core.reset_prefix_cache()
        for together in [ordered] if case.batched else [[request] for request in ordered]:
            run = run_workload(assembled, together)
            if errors := [timeline.error for timeline in run.timelines if timeline.error is not None]:
                raise NoriaError(f"{case}: {errors[0]}")
            num_preemptions += run.num_preemptions
            num_cached_tokens += sum(timeline.num_cached_tokens for timeline in run.timelines)
    _check_happened(case, assembled, num_preemptions, num_cached_tokens)


def _check_happened(case: Case, assembled: Assembled, num_preemptions: int, num_cached_tokens: int) -> None:
    expectations: Iterable[tuple[bool, str]] = (
        (case.preempted and not num_preemptions, "nothing was preempted"),
        (case.warm and not num_cached_tokens, "nothing was found in the cache"),
        (not case.warm and num_cached_tokens > 0, "something was found in the cache"),
    )
    for is_broken, what in expectations:
        if is_broken:
            blocks = assembled.scheduler_config.num_blocks
            raise NoriaError(f"{case}: {what} ({blocks} blocks); take more or longer sequences")


def _digest(values: Int32Array | Float32Array, known: bytes = b"") -> bytes:
    return hashlib.blake2b(known + np.ascontiguousarray(values).tobytes(), digest_size=16).digest()
