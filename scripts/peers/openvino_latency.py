"""OpenVINO GenAI on one stream at a time, as `noria bench latency`. The last line of output is one JSON object.

Usage: python openvino_latency.py MODEL.gguf [PROMPT_TOKENS [NEW_TOKENS [RUNS]]]      (128, 200 and 3 by default)
"""

import json
import random
import statistics
import sys

from openvino_pipeline import Stream, gaps_s, open_pipeline, percentile, run, say, warm_up


def main(model_path: str, prompt_tokens: int = 128, new_tokens: int = 200, num_runs: int = 3) -> None:
    numbers = random.Random(1)
    streams = [
        Stream([numbers.randrange(100, 40_000) for _ in range(prompt_tokens)], new_tokens) for _ in range(num_runs)
    ]
    pipeline = open_pipeline(model_path)
    warm_up(pipeline)
    say("ready")
    for stream in streams:
        run(pipeline, [stream])
    gaps = gaps_s(streams)
    result = {
        "label": "openvino-genai",
        "runs": num_runs,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "ms_per_token": 1e3 * statistics.median(gaps),
        "ms_per_token_p99": 1e3 * percentile(gaps, 99),
        "ms_per_token_mean": 1e3 * statistics.fmean(gaps),
        "ttft_ms": 1e3 * statistics.median(stream.token_times_s[0] - stream.start_s for stream in streams),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 5:
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:]))
