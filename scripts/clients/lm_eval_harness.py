"""EleutherAI's lm-eval: its `local-completions` against the server, and its `hf` (transformers) on the same weights.

    python -m venv /tmp/lm-eval
    /tmp/lm-eval/bin/pip install 'lm-eval[api,hf]' torch==2.13.0 accelerate gguf
    noria serve MODEL.gguf --dtype float32
    /tmp/lm-eval/bin/python scripts/clients/lm_eval_harness.py http://127.0.0.1:8000 MODEL.gguf

Nothing is fetched: tasks and questions are files that this script writes, and so is the directory that the tokenizer
and, for transformers, the float32 weights come from. Every log-likelihood must be transformers' to within 1e-3, every
verdict whether a continuation is the greedy one the same, and so every text that was generated greedily.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from common import first_model

TOLERANCE = 1e-3

CHOICES = [
    ("The capital of France is", ["Paris", "Berlin", "a small village by the sea", "42"]),
    ("Water freezes at a temperature of", ["zero degrees Celsius", "one thousand degrees", "Tuesday", "-7 °F?"]),
    ("def add(a, b):\n    return", ["a + b", "a - b", "None", "print(a)\n\nadd(1, 2)"]),
    ("Der Himmel ist", ["blau", "grün", "ein Fußball", "\u0441\u0438\u043d\u0438\u0439"]),
    ("The opposite of hot is", ["cold", "warm", "hot", "\U0001f525"]),
    ("2 + 2 =", ["4", "5", "22", "four, as everybody knows who has ever counted apples"]),
    ("\u4e2d\u56fd\u7684\u9996\u90fd\u662f", ["\u5317\u4eac", "\u4e0a\u6d77", "Beijing", "?"]),
    ("Once upon a time, there was a princess who lived in a", ["castle", "shoe", "refrigerator", "c++"]),
]
TEXTS = [
    "The quick brown fox jumps over the lazy dog. " * 8,
    "A scheduler decides, step by step, which requests compute how many tokens, and which of them wait.",
    "Grüße aus Köln, 世界! 🌍\n\n\tfor (int i = 0; i < 10; ++i) { sum += i; }\n",
]
BEGINNINGS = ["Once upon a time, there was a", "The three primary colours are", "import numpy as np\n"]

TASKS = {
    "noria_choices": (
        [{"question": question, "choices": choices, "label": 0} for question, choices in CHOICES],
        'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\n'
        "doc_to_target: label\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n",
    ),
    "noria_texts": (
        [{"text": text} for text in TEXTS],
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n",
    ),
    "noria_greedy": (
        [{"text": text} for text in BEGINNINGS],
        'output_type: generate_until\ndoc_to_text: "{{text}}"\ndoc_to_target: ""\n'
        'generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 24, do_sample: false}\n'
        "metric_list: [{metric: exact_match}]\n",
    ),
}


def write_tasks(folder: Path) -> None:
    for name, (questions, rest) in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(question) + "\n" for question in questions))
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{source}{rest}")


def write_model(gguf: Path, folder: Path) -> None:
    """What transformers' own GGUF loader makes of the file, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    model.hf_quantizer, model.is_quantized = None, False  # the weights are dequantised by now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def evaluate(folder: Path, kind: str, model_args: str) -> dict[str, list[dict]]:
    """The samples of each task, in order."""
    results = folder / kind
    command = [str(Path(sys.executable).with_name("lm_eval")), "run", "--model", kind, "--model_args", model_args,
               "--include_path", str(folder), "--tasks", ",".join(TASKS), "--batch_size", "4", "--log_samples",
               "--output_path", str(results), "--device", "cpu"]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    subprocess.run(command, check=True, env=os.environ | offline, stdout=subprocess.DEVNULL)
    samples = {}
    for name in TASKS:
        [path] = results.glob(f"**/samples_{name}_*.jsonl")
        samples[name] = sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    return samples


def values(samples: list[dict]) -> Iterator[object]:
    """Each answer of the model: (log-likelihood, is it greedy), a log-likelihood, or a text."""
    for sample in samples:
        for [answer] in sample["resps"]:
            yield answer


def main(url: str, gguf: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model_folder = folder / "model"
        write_tasks(folder)
        write_model(gguf, model_folder)
        served = (
            f"model={first_model(url)},base_url={url.rstrip('/')}/v1/completions,tokenizer={model_folder},tokenizer_backend=huggingface,"
            "num_concurrent=4,max_length=2048,max_retries=1"
        )
        found = evaluate(folder, "local-completions", served)
        expected = evaluate(folder, "hf", f"pretrained={model_folder},dtype=float32,max_length=2048")
    print(f"lm_eval {version('lm_eval')}, transformers {version('transformers')}")
    for name in ("noria_choices", "noria_texts"):
        pairs = list(zip(values(found[name]), values(expected[name]), strict=True))
        own, theirs = ([float(pair[side][0] if isinstance(pair[side], list) else pair[side]) for pair in pairs]
                       for side in (0, 1))  # fmt: skip
        differences = [abs(a - b) for a, b in zip(own, theirs, strict=True)]
        assert len(pairs) == sum(len(question.get("choices", [""])) for question in TASKS[name][0])
        assert max(differences) < TOLERANCE, list(zip(own, theirs, strict=True))
        assert all(value < 0 for value in own), own
        if name == "noria_choices":
            assert [pair[0][1] for pair in pairs] == [pair[1][1] for pair in pairs], "which are greedy"
            assert {pair[0][1] in (True, "True") for pair in pairs} == {True, False}, "both should occur"
        print(f"  ok: {name}: {len(pairs)} log-likelihoods, the largest difference {max(differences):.1e}")
    texts = list(zip(values(found["noria_greedy"]), values(expected["noria_greedy"]), strict=True))
    assert all(own == theirs for own, theirs in texts), texts
    print(f"  ok: noria_greedy: {len(texts)} texts are the same")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]).resolve())
