"""A pre-trained encoder, the pooling of its last hidden states, and a head, as `transformers` loads an exported model.

Exports hold a copy of this file, so it needs nothing but torch and transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class Head(nn.Module):
    """Features [n, d] → logits [n, C]: a linear layer, behind rectified ones or random Fourier features where asked.

    longest: longer features are shortened to it first; centres: rows of each class, of which the best one counts.
    """

    def __init__(
        self,
        width: int,
        waves: int,
        hidden: Sequence[int],
        classes: int,
        longest: float | None = None,
        centres: int = 1,
    ) -> None:
        super().__init__()
        self.longest, self.classes, self.centres = longest, classes, centres
        self.waves = nn.Linear(width, waves) if waves else None
        self.widths = [waves or width, *hidden]
        self.hidden = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(self.widths))
        self.last = nn.Linear(self.widths[-1], classes * centres)

    def forward(self, features: Tensor) -> Tensor:
        """As headstart's `LinearHead.scores`."""
        if self.longest is not None:
            features = features * (self.longest / features.norm(dim=1, keepdim=True).clamp(min=self.longest))
        if self.waves is not None:
            lengths = torch.linalg.vector_norm(features, dim=1, keepdim=True)
            angles: Tensor = self.waves(features / torch.where(lengths > 0, lengths, 1.0))
            features = math.sqrt(2 / angles.shape[1]) * torch.cos(angles)
        for layer in self.hidden:
            features = layer(features).relu()
        logits: Tensor = self.last(features)
        if self.centres > 1:
            logits = logits.reshape(-1, self.classes, self.centres).amax(dim=2)
        return logits


class HeadstartConfig(PretrainedConfig):
    """The configuration of the encoder, how its states are pooled, and the widths of the head."""

    model_type = "headstart"

    def __init__(
        self,
        encoder: dict[str, Any] | None = None,
        pooling: str = "cls",
        width: int = 0,
        waves: int = 0,
        hidden: Sequence[int] = (),
        longest: float | None = None,
        centres: int = 1,
        **settings: Any,
    ) -> None:
        self.encoder, self.pooling, self.width, self.waves, self.hidden = encoder, pooling, width, waves, list(hidden)
        self.longest, self.centres = longest, centres
        super().__init__(**settings)


class HeadstartForClassification(PreTrainedModel):
    """Texts or images → logits [n, C]; the names of the classes are in ``config.id2label``."""

    config_class = HeadstartConfig
    base_model_prefix = "encoder"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.encoder = AutoModel.from_config(AutoConfig.for_model(**config.encoder))
        self.main_input_name = self.encoder.main_input_name
        self.head = Head(config.width, config.waves, config.hidden, config.num_labels, config.longest, config.centres)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        **_: Any,
    ) -> SequenceClassifierOutput:
        """input_ids, attention_mask, token_type_ids: [n, L], or pixel_values: [n, 3, H, W]."""
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "pixel_values": pixel_values,
        }
        states = self.encoder(**{name: value for name, value in given.items() if value is not None}).last_hidden_state
        return SequenceClassifierOutput(logits=self.head(pooled(states, self.config.pooling, attention_mask)))


def pooled(states: Tensor, pooling: str, mask: Tensor | None) -> Tensor:
    """States [n, L, d], or maps [n, d, h, w] of a convolutional network → features [n, d]."""
    if states.dim() == 4:
        return states.mean(dim=(2, 3))
    if pooling == "cls":
        return states[:, 0]
    if pooling == "last" and mask is not None:
        last = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(dim=1)
        return states[torch.arange(len(states), device=mask.device), last]
    if mask is None:
        return states.mean(dim=1)
    weights = mask.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
