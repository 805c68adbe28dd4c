"""What transformers makes of the same weights: the judge of the end-to-end tests."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.prompts import CHATS, NEIGHBOURS, TEXTS


class Reference:
    """transformers with a Hugging Face directory, in float32 or bfloat16."""

    def __init__(self, directory: Path, dtype: str = "float32") -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
            self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    def prompts(self) -> list[list[int]]:
        """The token ids of all test prompts."""
        texts = [self.tokenizer(text)["input_ids"] for text in TEXTS]
        return texts + [
            self.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in CHATS
        ]

    def neighbours(self) -> list[list[int]]:
        return [self.tokenizer(text)["input_ids"] for text in NEIGHBOURS]

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The most probable continuation, one prompt at a time, going on where the model would end."""
        import torch

        with torch.inference_mode():
            inputs, cache, generated = torch.tensor([prompt]), None, []
            while len(generated) < num_tokens:
                output = self.model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = output.past_key_values
                inputs = output.logits[:, -1].argmax(-1, keepdim=True)
                generated.append(int(inputs))
        return generated

    def logits(self, tokens: Sequence[int]) -> Any:
        """[tokens, vocab_size] in float32: what the model expects after each token."""
        import torch

        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([tokens])).logits[0].float()
