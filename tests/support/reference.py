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

    def greedy(self, prompt: Sequence[int], num_tokens: int, draft: Sequence[int] = ()) -> list[int]:
        """The most probable continuation, going on where the model would end.

        A draft saves time and changes nothing: what the model would have chosen after each of its tokens comes from one
        forward pass, and only as far as it chooses the draft itself; the rest is generated token by token.
        """
        import torch

        answer: list[int] = []
        cache = None
        with torch.inference_mode():
            inputs = [*prompt, *draft[:-1]]
            while len(answer) < num_tokens:
                output = self.model(input_ids=torch.tensor([inputs]), past_key_values=cache, use_cache=True)
                chosen = output.logits[0].argmax(-1).tolist()
                cache = output.past_key_values
                if not answer:
                    chosen = chosen[len(prompt) - 1 :]
                    num_agreed = next((i for i, token in enumerate(draft[:-1]) if chosen[i] != token), len(chosen) - 1)
                    if num_agreed + 1 < len(chosen):
                        cache.crop(num_agreed + 1 - len(chosen))  # minus the number of tokens to forget
                    chosen = chosen[: num_agreed + 1]
                answer += chosen
                inputs = answer[-1:]
        return answer

    def logits(self, tokens: Sequence[int]) -> Any:
        """[tokens, vocab_size] in float32: what the model expects after each token."""
        import torch

        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([tokens])).logits[0].float()
