"""What the OpenVINO GenAI scripts share: the pipeline, and running requests through it with their times.

These scripts run with an interpreter that has `openvino-genai`; Noria need not be installed there.
"""

import sys
import time
from dataclasses import dataclass, field

import numpy as np
import openvino
import openvino_genai


@dataclass
class Stream:
    """One request. Times are in seconds on the clock of `time.perf_counter`."""

    prompt: list[int]
    max_tokens: int
    start_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def open_pipeline(model_path: str, *, prefix_caching: bool = False) -> openvino_genai.ContinuousBatchingPipeline:
    """The limits are those that Noria has by default: 64 sequences and 512 tokens in a step. 4 GB of KV memory."""
    settings = openvino_genai.SchedulerConfig()
    settings.cache_size = 4
    settings.max_num_seqs = 64
    settings.max_num_batched_tokens = 512
    settings.enable_prefix_caching = prefix_caching
    return openvino_genai.ContinuousBatchingPipeline(model_path, settings, "CPU")


_next_id = 0


def run(pipeline: openvino_genai.ContinuousBatchingPipeline, streams: list[Stream], *, logprobs: bool = False) -> float:
    """Runs all at once, greedy, end of sequence ignored. Fills the streams in and returns the seconds it took."""
    global _next_id
    handles = []
    began_s = time.perf_counter()
    for stream in streams:
        sampling = openvino_genai.GenerationConfig()
        sampling.max_new_tokens = stream.max_tokens
        sampling.do_sample = False
        sampling.ignore_eos = True
        if logprobs:
            sampling.logprobs = 1
        prompt = openvino.Tensor(np.array([stream.prompt], dtype=np.int64))
        stream.start_s = time.perf_counter()
        handles.append(pipeline.add_request(_next_id, prompt, sampling))
        _next_id += 1
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now_s = time.perf_counter()
        for stream, handle in zip(streams, handles, strict=True):
            while handle.can_read():
                for output in handle.read().values():
                    stream.token_ids += list(output.generated_ids)
                    stream.logprobs += list(output.generated_log_probs)
                    stream.token_times_s += [now_s] * len(output.generated_ids)
    return time.perf_counter() - began_s


def warm_up(pipeline: openvino_genai.ContinuousBatchingPipeline) -> None:
    run(pipeline, [Stream(list(range(1000 + 64 * i, 1064 + 64 * i)), 8) for i in range(4)])


def percentile(values: list[float], percent: float) -> float | None:
    """The value at the nearest rank."""
    ordered = sorted(values)
    return ordered[round(percent / 100 * (len(ordered) - 1))] if ordered else None


def gaps_s(streams: list[Stream]) -> list[float]:
    """Between the tokens of each stream."""
    return [b - a for s in streams for a, b in zip(s.token_times_s, s.token_times_s[1:], strict=False)]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
