"""Prompts with their completions, and chats, as tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.backbones.transforms import TextTransform
from headstart.errors import HeadstartError


@dataclass(frozen=True)
class CompletionTransform(TextTransform):
    """Tokens of a prompt and of its completion, cut to ``max_tokens``: the prompt at its beginning, if need be."""

    def __call__(self, value: Any, where: str) -> npt.NDArray[np.int64]:
        """Tokens [L, 2] of one example: their ids, and whether they belong to the completion."""
        prompt, completion = self.tokens(value, where)
        kept = completion[: self.max_tokens - 1]
        prompt = prompt[max(0, len(prompt) + len(kept) - self.max_tokens) :]
        ids = np.array([*prompt, *kept], np.int64)
        return np.stack([ids, np.arange(len(ids)) >= len(prompt)], axis=1).astype(np.int64)

    def collate(self, values: list[Any]) -> tuple[Any, ...]:
        """Padded ids, mask, and what belongs to the completion, each [B, L]."""
        return self.padded(values)

    def tokens(self, value: Any, where: str) -> tuple[list[int], list[int]]:
        """Ids of the prompt, and of the completion with the token that ends it."""
        if isinstance(value, tuple):
            return self.prompt_tokens(value[0]), [*self._plain(value[1]), self.end]
        if not value or value[-1].get("role") != "assistant":
            raise HeadstartError(f"{where}: the last of the messages is not the assistant's; end each chat with one")
        prompt, whole = self.chat_tokens(value[:-1]), self.chat_tokens(value, opens=False)
        if whole[: len(prompt)] != prompt:
            raise HeadstartError(f"{where}: the chat template writes a question anew once it has its answer")
        return prompt, whole[len(prompt) :]

    @property
    def end(self) -> int:
        """The token that ends a text."""
        found = [self.tokenizer.eos_token_id, self.tokenizer.sep_token_id]
        return int(next(token for token in found if token is not None))

    def prompt_tokens(self, prompt: str) -> list[int]:
        """Ids of a prompt that something is to follow."""
        ids = list(self.tokenizer(prompt)["input_ids"])
        return ids[:-1] if ids and ids[-1] == self.end else ids

    def chat_tokens(self, messages: Iterable[Mapping[str, str]], opens: bool = True) -> list[int]:
        """Ids of a chat by the model's own template; opens: whether the assistant is to speak next."""
        if self.tokenizer.chat_template is None:
            raise HeadstartError("the tokenizer has no chat template; give prompt and completion instead of messages")
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=opens)
        return self._plain(text)

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def is_cut(self, value: Any, where: str) -> bool:
        """Whether an example has more tokens than there is room for."""
        return sum(map(len, self.tokens(value, where))) > self.max_tokens
