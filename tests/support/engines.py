"""Engines that are cheap to build in tests, and the judge's answers to hold them against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from noria.assembly import Assembled, join
from noria.config import EngineOptions
from noria.files.sources import open_model
from noria.llm import LLM
from noria.ops.reference import TorchExecutor
from noria.sampling import SamplingParams
from noria.text.tokenizer import load_tokenizer
from support.reference import Reference

NUM_JUDGED_TOKENS = 64

LLMFactory = Callable[..., LLM]


@dataclass(frozen=True)
class Judged:
    """Prompts, and transformers' greedy float32 continuations of them."""

    prompts: list[list[int]]
    answers: list[list[int]]
    neighbours: list[list[int]]


def llm_factory(path: Path, dtype: str, executor_class: type = TorchExecutor) -> LLMFactory:
    """A function that builds an LLM with given engine options around weights that are loaded once.

    Each new engine takes the executor over from the one before.
    """
    files = open_model(path)
    tokenizer = load_tokenizer(files.tokenizer)
    executor = executor_class(files, dtype=dtype)

    def build(**options: object) -> LLM:
        return LLM.from_assembled(
            join(files, tokenizer, executor, EngineOptions.from_names({"dtype": dtype, **options}))
        )

    return build


def num_preemptions(assembled: Assembled) -> int:
    return sum(len(record.plan.preempted) for record in assembled.core.records)


def judge(directory: Path, llm: LLM) -> Judged:
    """Asks transformers about the model in `directory`; the LLM's own answers only save it time."""
    reference = Reference(directory)
    prompts = reference.prompts()
    drafts = llm.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=NUM_JUDGED_TOKENS, ignore_eos=True), progress=False
    )
    answers = [
        reference.greedy(prompt, NUM_JUDGED_TOKENS, draft.outputs[0].token_ids)
        for prompt, draft in zip(prompts, drafts, strict=True)
    ]
    return Judged(prompts, answers, reference.neighbours())
