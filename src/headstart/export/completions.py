"""What a run's model says to prompts: greedy, or sampled from a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headstart.backbones.completions import CompletionTransform
from headstart.core.files import csv_text, write_text
from headstart.errors import HeadstartError
from headstart.export.inputs import read
from headstart.export.model import Model


@dataclass(frozen=True)
class Sampling:
    """How a completion is made: so many tokens at most; temperature 0 takes the likeliest at every step."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    chat: bool = False
    """Whether a prompt is what a user says, in the model's own chat template."""


def completions(model: Model, paths: Sequence[Path], how: Sampling) -> Iterator[tuple[str, str]]:
    """Prompts from files with their completions, one after the other: each depends on its prompt and the seed alone."""
    backbone = model.body.backbone
    if backbone is None or not isinstance(backbone.transform, CompletionTransform):
        raise HeadstartError("the run's model answers in classes; leave the options of completions out")
    column = model.data.input_column
    first = column[0] if isinstance(column, tuple) else "prompt"
    names, _ = read(paths, "text", model.data.model_copy(update={"input_column": first}), 0)
    transform, core = backbone.transform, backbone.core
    sampled: dict[str, Any] = {"do_sample": False}
    if how.temperature:
        sampled = {"do_sample": True, "temperature": how.temperature, "top_p": how.top_p, "top_k": 0}
    end = transform.end
    for prompt in names:
        given = transform.chat_tokens([{"role": "user", "content": prompt}]) if how.chat else None
        ids = torch.tensor([given or transform.prompt_tokens(prompt)], device=model.body.model.device)  # type: ignore[union-attr]
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(how.seed)
            mask, length = torch.ones_like(ids), how.max_new_tokens
            made = core.generate(  # type: ignore[operator]
                input_ids=ids, attention_mask=mask, max_new_tokens=length, eos_token_id=end, pad_token_id=end, **sampled
            )
        yield prompt, str(transform.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


def write_completions(path: Path, found: Sequence[tuple[str, str]]) -> None:
    """A CSV file: the prompt and its completion."""
    try:
        write_text(path, csv_text([["input", "completion"], *map(list, found)]))
    except OSError as error:
        raise HeadstartError(f"--out {path}: cannot write there: {error.strerror or error}") from None
