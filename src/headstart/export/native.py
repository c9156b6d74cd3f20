"""A run's whole model as a class that `transformers` has, so that it loads without code of ours.

Images: most vision models are classified by one linear layer on the features that a run reads, and take its head.

Texts: BERT and RoBERTa are classified by the first token, through a dense layer and tanh. Small values pass tanh
unchanged, and a head on the first token is folded into the dense layer. A head on the mean of all tokens takes one more
layer behind the encoder's: with queries and keys of zero its attention is the mean over the tokens, and its output
projection is the head, scaled to drown the residual; two constants of ±B, far above that, keep its layer norms linear.
All of it is exact to about 1e-6 of the logits in float32. The encoder's own weights are not touched.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from headstart.export.modeling_headstart import Head

_LAYOUT = ("bert", "roberta", "xlm-roberta", "camembert")  # whose layers have these names and norms
_ABOVE_RESIDUAL = 1e10  # how far the largest logit is above the residual that is added to it
_ABOVE_LOGITS = 1e3  # how far the constants are above the largest logit: the square of it is the layer norm's error
_SMALL = 5e-4  # the largest value that goes through tanh: (5e-4)² / 3 is its relative error


def native(auto: str, core: Any, state: dict[str, Tensor], head: Head, pooling: str, labels: dict[str, Any]) -> Any:
    """The classifier that ``auto``, a class of `transformers`, has for ``core``; None where it has none that fits.

    state: the weights of the core, without a LoRA; labels: names of the classes and the like, for the configuration.
    Whether it computes what the run does is for the caller to check.
    """
    plain = head.waves is None and not head.hidden and head.longest is None and head.centres == 1
    if not plain or type(core.config) not in (found := getattr(transformers, auto))._model_mapping:
        return None
    config = copy.deepcopy(core.config)
    config.update(labels)
    is_mean = pooling == "mean" and hasattr(config, "num_hidden_layers")
    is_text = core.main_input_name == "input_ids"
    if is_text and is_mean:
        config.num_hidden_layers += 1
    made = found.from_config(config).eval().requires_grad_(False)
    missing, unknown = made.base_model.load_state_dict(state, strict=False)
    last = f"encoder.layer.{config.num_hidden_layers - 1}." if is_text and is_mean else "pooler."
    if not all(name.startswith((last, "pooler.")) for name in (*missing, *unknown)):
        return None
    weight, bias = head.last.weight.double(), head.last.bias
    return (_text if is_text else _image)(made, weight, bias, pooling)


def _image(made: Any, weight: Tensor, bias: Tensor, pooling: str) -> Any:
    """A head [C, d] as the last linear layer; [C, 2 d] where it reads the first token and the mean of the others."""
    last = made.classifier[-1] if isinstance(made.classifier, nn.Sequential) else made.classifier
    if not isinstance(last, nn.Linear) or last.in_features not in (weight.shape[1], 2 * weight.shape[1]):
        return None
    last.weight.zero_()
    last.weight[:, : weight.shape[1]] = weight
    last.bias.copy_(bias)
    return made


def _text(made: Any, weight: Tensor, bias: Tensor, pooling: str) -> Any:
    """A head [C, d] on the first token's state or on the mean of all, in the layers that BERT and RoBERTa have."""
    base, (count, width) = made.base_model, weight.shape
    if made.config.model_type not in _LAYOUT or pooling not in ("cls", "mean") or count + 3 > width:
        return None
    layers, is_bert = base.encoder.layer, isinstance(made.classifier, nn.Linear)
    dense, out = (base.pooler.dense, made.classifier) if is_bert else (made.classifier.dense, made.classifier.out_proj)
    norm = layers[-2 if pooling == "mean" else -1].output.LayerNorm
    length = (norm.weight.double() ** 2 + norm.bias.double() ** 2).sum().sqrt()  # of a state, about
    largest = length * weight.norm(dim=1).max()  # no logit without its bias is above it
    for each in (dense, out):
        each.weight.zero_()
        each.bias.zero_()
    if pooling == "cls":
        dense.weight[:count] = weight * (_SMALL / largest)
        out.weight[:, :count] = torch.eye(count) * (largest / _SMALL)
    else:
        passed = _mean_layer(layers[-1], weight, float(largest), float(length))
        # The layer norms take the mean over all d values away: from the logits, and from a value that was none.
        dense.weight[:count, :count], dense.weight[:count, count] = torch.eye(count), -1.0
        out.weight[:, :count] = torch.eye(count) / passed
    out.bias.copy_(bias)
    return made


def _mean_layer(layer: Any, weight: Tensor, largest: float, length: float) -> float:
    """Make a layer whose first C values, at any token, are the logits of the mean of all, times what is returned."""
    attention, (count, width) = layer.attention, weight.shape
    linear = [attention.self.query, attention.self.key, attention.self.value, attention.output.dense]
    for each in [*linear, layer.intermediate.dense, layer.output.dense]:
        each.weight.zero_()
        each.bias.zero_()
    attention.self.value.weight.copy_(torch.eye(width))
    scale = _ABOVE_RESIDUAL * length / largest
    constant = _ABOVE_LOGITS * _ABOVE_RESIDUAL * length
    attention.output.dense.weight[:count] = weight * scale
    attention.output.dense.bias[-2:] = torch.tensor([constant, -constant])
    for norm in (attention.output.LayerNorm, layer.output.LayerNorm):
        norm.weight.fill_(1.0)
        norm.bias.zero_()
    return float(scale / constant * (width / 2) ** 0.5)
