"""What a run's model says to prompts: greedy, or sampled from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from headstart.backbones.completions import CompletionTransform, Sampling, complete
from headstart.core.files import csv_text, write_text
from headstart.errors import HeadstartError
from headstart.export.inputs import read
from headstart.export.model import Model


def completions(
    model: Model, paths: Sequence[Path], how: Sampling, heard: Callable[[str, str], None] | None = None
) -> Iterator[tuple[str, str]]:
    """Prompts from files with their completions, one after the other: each depends on its prompt and the seed alone.

    heard: is told the prompt and each piece of its completion, as it comes.
    """
    backbone = model.store.backbone
    if backbone is None or not isinstance(backbone.transform, CompletionTransform):
        raise HeadstartError("the run's model answers in classes; leave the options of completions out")
    column = model.data.input_column
    first = column[0] if isinstance(column, tuple) else "prompt"
    names, _ = read(paths, "text", model.data.model_copy(update={"input_column": first}), 0)
    transform = backbone.transform
    for prompt in names:
        given = transform.chat_tokens([{"role": "user", "content": prompt}]) if how.chat else None
        tell = partial(heard, prompt) if heard else None
        yield prompt, complete(backbone, given or transform.prompt_tokens(prompt), how, tell)


def write_completions(path: Path, found: Sequence[tuple[str, str]]) -> None:
    """A CSV file: the prompt and its completion."""
    try:
        write_text(path, csv_text([["input", "completion"], *map(list, found)]))
    except OSError as error:
        raise HeadstartError(f"--out {path}: cannot write there: {error.strerror or error}") from None
