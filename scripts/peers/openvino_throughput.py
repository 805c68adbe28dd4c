"""OpenVINO GenAI on a workload, in process, as `noria bench throughput`. The last line of output is one JSON object.

Usage: python openvino_throughput.py MODEL.gguf WORKLOAD.jsonl

The workload has one JSON object per line with "prompt" (token ids) and "max_tokens"; all are sent at once.
"""

import json
import sys
from pathlib import Path

from openvino_pipeline import Stream, gaps_s, open_pipeline, percentile, run, say, warm_up


def main(model_path: str, workload_path: str) -> None:
    lines = [json.loads(line) for line in Path(workload_path).read_text().splitlines() if line.strip()]
    streams = [Stream(line["prompt"], line["max_tokens"]) for line in lines]
    pipeline = open_pipeline(model_path)
    warm_up(pipeline)
    say("ready")
    wall_s = run(pipeline, streams)
    num_generated = sum(len(stream.token_ids) for stream in streams)
    num_prompt = sum(len(stream.prompt) for stream in streams)
    ttft_s = [stream.token_times_s[0] - stream.start_s for stream in streams]
    per_token_s = [
        (s.token_times_s[-1] - s.token_times_s[0]) / (len(s.token_ids) - 1) for s in streams if len(s.token_ids) > 1
    ]
    result = {
        "label": "openvino-genai",
        "ok": len(streams),
        "short": sum(len(stream.token_ids) != stream.max_tokens for stream in streams),
        "wall_s": wall_s,
        "prompt_tokens": num_prompt,
        "gen_tokens": num_generated,
        "gen_tok_s": num_generated / wall_s,
        "total_tok_s": (num_generated + num_prompt) / wall_s,
        "ttft_p50": percentile(ttft_s, 50),
        "ttft_p99": percentile(ttft_s, 99),
        "tpot_p50_ms": 1e3 * percentile(per_token_s, 50),
        "tpot_p99_ms": 1e3 * percentile(per_token_s, 99),
        "itl_p99_ms": 1e3 * percentile(gaps_s(streams), 99),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
