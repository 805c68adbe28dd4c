"""An LLM without a model: it continues the alphabet, one byte per token, and ends after "z"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noria.assembly import Assembled
from noria.config import EngineOptions, SchedulerConfig
from noria.core.plan import StepPlan, StepResult
from noria.core.scheduler import Scheduler
from noria.engine.client import InProcessClient
from noria.engine.core import EngineCore, Runner
from noria.fakes import ScriptedRunner
from noria.fakes.tokenizer import ByteTokenizer
from noria.files.model import ModelConfig, RopeConfig
from noria.llm import LLM

NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 64, 4, 64


def next_letter(token_ids: Sequence[int]) -> int:
    return ByteTokenizer.EOS if token_ids[-1] == ord("z") else token_ids[-1] + 1


class InterruptedRunner:
    """Executes plans until step `at`, and then does what it is told before executing that one too."""

    def __init__(self, runner: Runner, at: int, action: Any) -> None:
        self._runner, self._at, self._action = runner, at, action
        self._num_steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self._num_steps += 1
        if self._num_steps == self._at:
            self._action()
        return self._runner.execute(plan)


class FakeFiles:
    """As much of `noria.files.model.ModelFiles` as a front looks at."""

    name = "alphabet"
    path = Path("alphabet.gguf")
    format = "gguf"
    eos_token_ids = (ByteTokenizer.EOS,)
    config = ModelConfig(
        architecture="alphabet",
        vocab_size=258,
        hidden_size=1,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        rms_norm_eps=1e-5,
        max_position_embeddings=MAX_MODEL_LEN,
        rope=RopeConfig(),
    )


def alphabet(*, interrupt_at: int = 0, action: Any = None, **limits: Any) -> Assembled:
    """An assembled engine over the fake; `action` is called in step `interrupt_at`, counted from 1."""
    config = SchedulerConfig(
        **{"max_model_len": MAX_MODEL_LEN, "num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "vocab_size": 258}
        | {"eos_token_ids": FakeFiles.eos_token_ids}
        | limits
    )
    runner: Runner = ScriptedRunner(NUM_BLOCKS, BLOCK_SIZE, next_token=next_letter)
    core = EngineCore(Scheduler(config), InterruptedRunner(runner, interrupt_at, action), seed=0)
    return Assembled(
        files=FakeFiles(),  # type: ignore[arg-type]
        tokenizer=ByteTokenizer(),
        options=EngineOptions(),
        core=core,
        client=InProcessClient(core),
    )


def alphabet_llm(**options: Any) -> LLM:
    return LLM.from_assembled(alphabet(**options))


def assert_idle(llm: LLM) -> None:
    """Nothing runs, waits or holds memory."""
    core = llm.assembled.core
    assert not core.scheduler.has_unfinished
    assert core.scheduler.kv.pool.num_free_blocks == core.scheduler.config.num_blocks
    core.scheduler.check()
