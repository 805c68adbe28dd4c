"""OpenVINO GenAI: the same answers alone, among others, and a second time? What `noria bench determinism --url` asks
servers, for an engine without one. The last line of output is one JSON object.

Usage: python openvino_determinism.py MODEL.gguf [PROMPTS [NEW_TOKENS]]      (24 and 16 by default)
"""

import json
import random
import sys

from openvino_pipeline import Stream, open_pipeline, run


def main(model_path: str, num_prompts: int = 24, new_tokens: int = 16) -> None:
    numbers = random.Random(1)
    prompts = [[numbers.randrange(100, 40_000) for _ in range(1 + 8 * i)] for i in range(num_prompts)]
    pipeline = open_pipeline(model_path, prefix_caching=True)

    def alone() -> list[Stream]:
        streams = [Stream(prompt, new_tokens) for prompt in prompts]
        for stream in streams:
            run(pipeline, [stream], logprobs=True)
        return streams

    def together() -> list[Stream]:
        streams = [Stream(prompt, new_tokens) for prompt in prompts]
        run(pipeline, streams, logprobs=True)
        return streams

    first = alone()
    by_round = {}
    different = 0
    for name, answers in {"alone, again": alone(), "together": together(), "together, again": together()}.items():
        pairs = list(zip(first, answers, strict=True))
        by_round[name] = {
            "tokens": sum(a.token_ids != b.token_ids for a, b in pairs),
            "logprobs": sum(a.logprobs != b.logprobs for a, b in pairs),
        }
        different += sum((a.token_ids, a.logprobs) != (b.token_ids, b.logprobs) for a, b in pairs)
    result = {
        "label": "openvino-genai",
        "prompts": num_prompts,
        "compared": 3 * num_prompts,
        "different": different,
        "different_by_round": by_round,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 4:
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:]))
