"""Prompts with their completions, and chats, as tokens; and what a model completes a prompt with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from headstart.backbones.backbone import Backbone
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

    def shown(self, value: Any, where: str) -> tuple[str, str]:
        """What the model reads of an example, tokens that were cut left out, and what it is to go on with."""
        ids, of_completion = self(value, where).T
        read, completion = (self.tokenizer.decode(ids[of_completion == part]) for part in (0, 1))
        return str(read), str(completion)

    def collate(self, values: list[Any]) -> tuple[Any, ...]:
        """Padded ids, mask, and what belongs to the completion, each [B, L]."""
        return self.padded(values)

    def tokens(self, value: Any, where: str) -> tuple[list[int], list[int]]:
        """Ids of the prompt, and of the completion with the token that ends it."""
        if isinstance(value, tuple):
            return self.prompt_tokens(value[0]), [*self._plain(value[1]), self.end]
        if not value or value[-1].get("role") != "assistant":
            raise HeadstartError(f"{where}: the last of the messages is not the assistant's; end each chat with one")
        before, text = self._chat(value[:-1]), self._chat(value, opens=False)
        prompt, whole = self._plain(before), self._plain(text)
        if whole[: len(prompt)] == prompt:
            return prompt, self._ended(whole[len(prompt) :])
        if text.startswith(before):  # the first characters of the answer would be one token with the last before it
            return prompt, self._ended(self._plain(text[len(before) :]))
        raise HeadstartError(
            f"{where}: the chat template writes a question anew once it has its answer; give prompt and completion "
            "instead of messages"
        )

    def _ended(self, completion: list[int]) -> list[int]:
        """A chat's completion without what the template writes behind the token that ends it."""
        end = self.turn_end if self.turn_end in completion else self.end
        return completion[: len(completion) - completion[::-1].index(end)] if end in completion else completion

    @property
    def end(self) -> int:
        """The token that ends a text."""
        found = [self.tokenizer.eos_token_id, self.tokenizer.sep_token_id]
        return int(next(token for token in found if token is not None))

    @cached_property
    def turn_end(self) -> int | None:
        """The special token that the chat template writes behind an answer; None: there is none."""
        from jinja2 import TemplateError

        answer = "answer"
        try:
            text = self._chat(
                [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}], False
            )
        except (HeadstartError, TemplateError):  # no template, or one that is for other conversations
            return None
        added = {number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        special = added.union(self.tokenizer.all_special_ids) - {self.tokenizer.unk_token_id}
        return next((token for token in self._plain(text.rpartition(answer)[2]) if token in special), None)

    def begun(self, prompt: Sequence[int], room: int) -> list[int]:
        """A prompt cut at its beginning to so many tokens, behind the one that begins a text; never of no tokens."""
        begin = self.tokenizer.bos_token_id
        if not prompt:
            return [self.end if begin is None else begin]
        first = list(prompt[: int(prompt[0] == begin and len(prompt) > room > 1)])
        return [*first, *prompt[max(0, len(prompt) - room + len(first)) :]]

    def prompt_tokens(self, prompt: str) -> list[int]:
        """Ids of a prompt that something is to follow."""
        ids = list(self.tokenizer(prompt)["input_ids"])
        return ids[:-1] if self.open and ids and ids[-1] == self.end else ids

    def chat_tokens(self, messages: Iterable[Mapping[str, str]], opens: bool = True) -> list[int]:
        """Ids of a chat by the model's own template; opens: whether the assistant is to speak next."""
        return self._plain(self._chat(messages, opens))

    def _chat(self, messages: Iterable[Mapping[str, str]], opens: bool = True) -> str:
        if self.tokenizer.chat_template is None:
            raise HeadstartError("the tokenizer has no chat template; give prompt and completion instead of messages")
        return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=opens))

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def is_cut(self, value: Any, where: str) -> bool:
        """Whether an example has more tokens than there is room for."""
        return sum(map(len, self.tokens(value, where))) > self.max_tokens

    def parts(self, value: Any, where: str) -> tuple[str, list[int], str]:
        """The prompt as a reader sees it and as tokens, cut to ``max_tokens``, and the completion."""
        prompt = self.tokens(value, where)[0]
        cut = self.begun(prompt, self.max_tokens)
        if isinstance(value, tuple):
            return value[0], cut, value[1]
        return str(self.tokenizer.decode(prompt)), cut, value[-1]["content"]


@dataclass(frozen=True)
class Sampling:
    """How a completion is made: so many tokens at most; temperature 0 takes the likeliest at every step."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    chat: bool = False
    """Whether a prompt is what a user says, in the model's own chat template."""


def complete(
    backbone: Backbone, prompt: Sequence[int], how: Sampling, heard: Callable[[str], None] | None = None
) -> str:
    """What a model goes on with after the tokens of a prompt; heard: is told each piece of it as it comes."""
    from transformers import GenerationConfig, TextStreamer

    transform, core = backbone.transform, cast(Any, backbone.core)
    assert isinstance(transform, CompletionTransform)
    prompt, most = _fitting(transform, core, prompt, how.max_new_tokens)
    kept = core.generation_config
    stops = kept.eos_token_id if isinstance(kept.eos_token_id, list) else [kept.eos_token_id]
    ends = sorted({each for each in (transform.end, transform.turn_end, *stops) if each is not None})
    given: dict[str, Any] = {"do_sample": False}
    if how.temperature:
        given = {"do_sample": True, "temperature": how.temperature, "top_p": how.top_p, "top_k": 0}
    settings = GenerationConfig(
        max_new_tokens=most, eos_token_id=ends, pad_token_id=transform.end, bos_token_id=kept.bos_token_id,
        decoder_start_token_id=kept.decoder_start_token_id, **given,
    )  # fmt: skip

    def without_ends(tokens: torch.Tensor) -> torch.Tensor:
        return tokens[~torch.isin(tokens, torch.tensor(ends, device=tokens.device))]

    streamer: Any = None
    if heard is not None:
        streamer = TextStreamer(transform.tokenizer, skip_prompt=True, skip_special_tokens=True)
        streamer.on_finalized_text = lambda text, stream_end=False: heard(text)
        put = streamer.put
        streamer.put = lambda tokens: put(without_ends(tokens))
    ids = torch.tensor([prompt], device=next(core.parameters()).device)
    core.generation_config = settings  # or the checkpoint's own penalties and beams fill in what a call leaves open
    try:
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(how.seed)
            made = core.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=streamer
            )
    finally:
        core.generation_config = kept
    # A sequence-to-sequence model gives its answer alone, behind the token that starts it.
    said = without_ends(made[0, len(prompt) if transform.open else 1 :])
    return str(transform.tokenizer.decode(said, skip_special_tokens=True))


def _fitting(transform: CompletionTransform, core: Any, prompt: Sequence[int], most: int) -> tuple[list[int], int]:
    """A prompt cut so that a model has room for it and for ``most`` new tokens, and how many it has room for.

    The prompt keeps half of the room of a causal model at least.
    """
    positions = getattr(core.config, "max_position_embeddings", None) or sys.maxsize
    room = min(positions, transform.tokenizer.model_max_length)
    ids = transform.begun(prompt, max(room - most, room // 2) if transform.open else room)
    return ids, min(most, positions - len(ids) if transform.open else positions)
