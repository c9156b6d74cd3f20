"""Backbones small enough to check by hand; run as a program, extracts features in a process of its own."""

import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn

from headstart.backbones import Backbone, cache, extract
from headstart.backbones.transforms import ImageTransform
from headstart.data import Examples

WORDS = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "the", "cat", "sat", "Cat"]


class Means(nn.Module):
    """The mean of every colour, times a weight: bytes [B, H, W, 3] → [B, 3]; knows how many images it has seen."""

    def __init__(self, weight: float = 1.0, log: Path | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))
        self.log = log
        self.seen = 0

    def forward(self, images: Tensor) -> Tensor:
        self.seen += len(images)
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{len(images)}\n")
            time.sleep(0.1)
        return images.to(torch.float32).mean(dim=(1, 2)) * self.weight


def means_backbone(weight: float = 1.0, key: str = "means", log: Path | None = None) -> Backbone:
    body = Means(weight, log)
    return Backbone("means", "image", 3, body, body, ImageTransform(4), key)


def pictures(count: int, seed: int = 0) -> Examples:
    """Images of 4 x 4 pixels, which no transform of that size changes."""
    images = np.random.default_rng(seed).integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    return Examples("image", images, (), np.arange(count), np.zeros(count, np.int64))


def colour_means(examples: Examples) -> npt.NDArray[np.float64]:
    """What `means_backbone` gives, by numpy."""
    return np.asarray(examples.source[examples.rows], np.float64).mean(axis=(1, 2))


def tokenizer(lower: bool = False, segments: bool = True) -> transformers.PreTrainedTokenizerFast:
    """Whole words between [CLS] and [SEP]; the padding is not number 0, so that a wrong padding shows."""
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if lower:
        backend.normalizer = normalizers.Lowercase()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 0), ("[SEP]", 2)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_input_names=["input_ids", *(["token_type_ids"] if segments else []), "attention_mask"],
        **{"cls_token": "[CLS]", "pad_token": "[PAD]", "sep_token": "[SEP]", "unk_token": "[UNK]"},
    )


if __name__ == "__main__":  # OUTPUT LOG GO COUNT: extract COUNT pictures as soon as the file GO is there
    output, log, go = (Path(argument) for argument in sys.argv[1:4])
    cache.BLOCK = 4
    output.with_suffix(".ready").touch()
    while not go.exists():
        time.sleep(0.01)
    np.save(output, extract(means_backbone(log=log), pictures(int(sys.argv[4])), "pictures"))
