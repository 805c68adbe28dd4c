"""What the model tests share: tiny checkpoints written by transformers, and a driver for prompts in a paged pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers

from noria.runner.executor import Executor, Float32Array, ForwardBatch

TINY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large enough that a mistake anywhere moves the logits far beyond the tolerance
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 24
SMALL_HEADS: dict[str, Any] = {"head_dim": 16}
GEMMA: dict[str, Any] = {**SMALL_HEADS, "sliding_window": WINDOW, "query_pre_attn_scalar": 20, "pad_token_id": 0}
ARCHITECTURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, SMALL_HEADS),
    "mistral": (transformers.MistralConfig, {"sliding_window": WINDOW}),
    "gemma2": (
        transformers.Gemma2Config,
        {**GEMMA, "num_hidden_layers": 5, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 15.0},
    ),
    "gemma3": (transformers.Gemma3TextConfig, {**GEMMA, "num_hidden_layers": 7}),  # the sixth has full attention
    "phi3": (transformers.Phi3Config, {"pad_token_id": 0}),
    "smollm3": (transformers.SmolLM3Config, {"num_hidden_layers": 5, "pad_token_id": 0}),  # the fourth does not rotate
    "granite": (
        transformers.GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.6,
            "logits_scaling": 4.0,
        },
    ),
}
"""Of each architecture its configuration class, and what makes it small and different from a Llama."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 48,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.0 + 0.9 * i for i in range(8)],
    },
}


def tiny_model(architecture: str, **overrides: Any) -> transformers.PreTrainedModel:
    """A random float32 model; norms and biases are random too, so that each of them matters."""
    torch.manual_seed(7)
    config_class, small = ARCHITECTURES[architecture]
    config = config_class(**{**TINY, **small, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=_mean(architecture, name), std=0.3)
    return model


def _mean(architecture: str, name: str) -> float:
    """Of a vector's random values. Gemma's norms multiply by 1 + weight; those after a branch are larger, since else
    its scaled embedding outweighs what the layers add, and every token predicts itself."""
    if not name.endswith("norm.weight"):
        return 0.0
    if not architecture.startswith("gemma"):
        return 1.0
    return 3.0 if ".post_" in name else 0.0


def transformers_logits(model: transformers.PreTrainedModel, tokens: Sequence[int]) -> Float32Array:
    """Logits at every position: [tokens, vocab]."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0].float().numpy()


def transformers_greedy(model: transformers.PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The continuation that transformers finds most probable, each token from the whole text anew."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(transformers_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def pack(rows: Sequence[tuple[Sequence[int], int, Sequence[int]]], block_size: int, *, wanted: str) -> ForwardBatch:
    """The batch of rows (known tokens, how many of them are computed, block table): runs all that are not computed.

    `wanted`: logits of "all" new tokens, of the "last" one of each row, or of "none".
    """
    tokens, positions, slots, wanted_tokens, starts = [], [], [], [], [0]
    table = np.zeros((len(rows), max(len(blocks) for *_, blocks in rows)), dtype=np.int32)
    for row, (known, computed, blocks) in enumerate(rows):
        new = range(computed, len(known))
        tokens += [known[p] for p in new]
        positions += list(new)
        slots += [blocks[p // block_size] * block_size + p % block_size for p in new]
        starts.append(len(tokens))
        wanted_tokens += {"all": range(*starts[-2:]), "last": [starts[-1] - 1], "none": []}[wanted]
        table[row, : len(blocks)] = blocks
    arrays = [tokens, positions, slots, starts, [len(known) for known, *_ in rows]]
    return ForwardBatch(*(np.array(a, dtype=np.int32) for a in arrays), table, np.array(wanted_tokens, dtype=np.int32))


@dataclass
class PagedDriver:
    """Runs prompts through an executor, side by side, with blocks dealt in shuffled order."""

    executor: Executor
    num_blocks: int = 64
    block_size: int = 4
    seed: int = 0
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.executor.allocate_kv(self.num_blocks * len(self.executor.kv_windows), self.block_size)
        self.free = np.random.default_rng(self.seed).permutation(np.arange(1, self.num_blocks + 1)).tolist()

    def pack(self, rows: Sequence[tuple[Sequence[int], int, Sequence[int]]], *, wanted: str) -> ForwardBatch:
        """`pack`, with blocks for each of the model's groups of layers."""
        return pack(rows, self.block_size, wanted=wanted).spread(len(self.executor.kv_windows), self.block_size)

    def logits(self, prompts: Sequence[Sequence[int]], chunks: Sequence[int]) -> list[Float32Array]:
        """Logits at every position of each prompt, [tokens, vocab]; prompt i advances by `chunks[i]` tokens a step."""
        tables = [[self.free.pop() for _ in range(-(-len(p) // self.block_size))] for p in prompts]
        done = [0] * len(prompts)
        results: list[list[Float32Array]] = [[] for _ in prompts]
        while active := [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]:
            ends = {i: min(done[i] + chunks[i], len(prompts[i])) for i in active}
            rows = []
            for i in active:
                held = tables[i][: -(-ends[i] // self.block_size)]
                rows.append((prompts[i][: ends[i]], done[i], held))
            batch = self.pack(rows, wanted="all")
            logits = self.executor.forward(batch)
            for row, i in enumerate(active):
                results[i].append(logits[batch.query_start[row] : batch.query_start[row + 1]].copy())
                done[i] = ends[i]
        for table in tables:
            self.free += table
        return [np.concatenate(parts) for parts in results]


def executor_greedy(driver: PagedDriver, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """The continuations that an executor finds most probable, of all prompts side by side, one token a step."""
    num_blocks = [-(-(len(prompt) + num_tokens) // driver.block_size) for prompt in prompts]
    tables = [[driver.free.pop() for _ in range(blocks)] for blocks in num_blocks]
    known, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    for _ in range(num_tokens):
        rows = [
            (tokens, computed, table[: -(-len(tokens) // driver.block_size)])
            for tokens, computed, table in zip(known, done, tables, strict=True)
        ]
        logits = driver.executor.forward(driver.pack(rows, wanted="last"))
        done = [len(tokens) for tokens in known]
        for tokens, row in zip(known, logits, strict=True):
            tokens.append(int(row.argmax()))
    for table in tables:
        driver.free += table
    return [tokens[len(prompt) :] for tokens, prompt in zip(known, prompts, strict=True)]


def random_prompts(lengths: Sequence[int], vocab_size: int = TINY["vocab_size"], seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, n).tolist() for n in lengths]


@dataclass(frozen=True)
class Agreement:
    """How close one set of logits comes to another at the same positions."""

    mean_kl: float  # KL(reference || other), natural logarithms
    top1: float  # share of positions with the same most probable token
    max_abs: float


def agreement(reference: Float32Array, other: Float32Array) -> Agreement:
    """Compares logits [positions, vocab], some positions at a time: in float64 a large vocabulary is large."""
    total = 0.0
    for start in range(0, len(reference), 64):
        p, q = (torch.log_softmax(torch.from_numpy(x[start : start + 64]).double(), -1) for x in (reference, other))
        total += (p.exp() * (p - q)).sum().item()
    same = (reference.argmax(-1) == other.argmax(-1)).mean()
    return Agreement(total / len(reference), float(same), float(np.abs(reference - other).max()))
