"""Any vision or text encoder of `transformers`, from a hub id or a local folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headstart.backbones.backbone import Backbone, cannot_load, image_backbone, load_weights, needed, some
from headstart.backbones.language import choice, generator, hashed, vocabulary_key
from headstart.backbones.quantised import as_floats, how_to_load
from headstart.backbones.transforms import Normalisation, TextTransform
from headstart.config.recipe import Model
from headstart.errors import HeadstartError

# What sentence-transformers calls a pooling in the folder of a model: since its version 6, and before.
_POOLINGS = {"mean": ("mean", "mean_tokens"), "cls": ("cls", "cls_token"), "last": ("lasttoken", "lasttoken")}


class _Pooled(nn.Module):
    """A Hugging Face encoder and the pooling of its last hidden states: the first token (``cls``), the last, the mean.

    patches: how many a masked autoencoder cuts an image into; it reads them in order instead of shuffled.
    """

    def __init__(self, encoder: nn.Module, pooling: str, image: bool, patches: int = 0) -> None:
        super().__init__()
        self.encoder, self.pooling, self.image, self.patches = encoder, pooling, image, patches

    def forward(self, inputs: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Pixels [B, 3, H, W], or token ids, mask and segments [B, L] → [B, d]."""
        extra: dict[str, Tensor] = {}
        if self.image:
            if self.patches:
                extra["noise"] = torch.arange(self.patches, device=inputs.device).expand(len(inputs), -1)
            states: Tensor = self.encoder(pixel_values=inputs, **extra).last_hidden_state
            if states.dim() == 4:  # a convolutional network: [B, d, h, w]
                return states.mean(dim=(2, 3))
        else:
            if segments is not None:
                extra["token_type_ids"] = segments
            states = self.encoder(input_ids=inputs, attention_mask=mask, **extra).last_hidden_state
        if self.pooling == "cls":
            return states[:, 0]
        if self.pooling == "last":
            assert mask is not None
            last = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(dim=1)
            return states[torch.arange(len(states), device=mask.device), last]
        if mask is None:
            return states.mean(dim=1)
        weights = mask.unsqueeze(-1).to(states.dtype)
        return (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


class _Cloze(nn.Module):
    """A masked language model without its vocabulary: what it would read the hidden word off, at the mask."""

    def __init__(self, model: Any, mask_token: int) -> None:
        super().__init__()
        vocabulary = model.get_output_embeddings()
        name = next(name for name, module in model.named_modules() if module is vocabulary)
        # Not by the model's own setter: that of BERT wants a layer with a bias.
        model.set_submodule(name, nn.Identity())
        self.encoder, self.mask_token = model, mask_token

    def forward(self, inputs: Tensor, mask: Tensor, segments: Tensor | None = None) -> Tensor:
        """Token ids, mask and segments [B, L] → [B, d]."""
        extra = {} if segments is None else {"token_type_ids": segments}
        states: Tensor = self.encoder(input_ids=inputs, attention_mask=mask, **extra).logits
        return states[torch.arange(inputs.shape[0]), (inputs == self.mask_token).int().argmax(dim=1)]


def cloze(place: str, model: Model, name: str) -> Backbone:
    """A masked language model under a prompt (Gao et al., ACL 2021); the label words make its first head."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        network = transformers.AutoModelForMaskedLM.from_pretrained(
            place, use_safetensors=True, trust_remote_code=False, **how_to_load(model)
        )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise cannot_load(name, error) from None
    return _asking(as_floats(network, how_to_load(model)), network.get_output_embeddings(), tokenizer, name, model)


def _asking(network: Any, vocabulary: Any, tokenizer: Any, name: str, model: Model) -> Backbone:
    """A masked network that is there already, under the prompt and the label words of a model.

    vocabulary: the layer that reads words off its states, which the body goes without.
    """
    assert model.prompt is not None
    assert model.label_words is not None
    words = [tokenizer(" " + word, add_special_tokens=False)["input_ids"] for word in model.label_words]
    long = [word for word, ids in zip(model.label_words, words, strict=True) if len(ids) != 1]
    if tokenizer.mask_token is None:
        raise HeadstartError(f"model.prompt: the tokenizer of {name} has no mask; use a masked language model")
    if long:
        raise HeadstartError(
            f"model.label_words: {', '.join(long)} are not single tokens of {name}'s vocabulary; choose shorter words"
        )
    ids = [first for (first,) in words]
    weight = vocabulary.weight.detach()[ids].float().numpy()
    bias = np.zeros(len(ids), np.float32) if vocabulary.bias is None else vocabulary.bias.detach()[ids].float().numpy()
    body = _Cloze(network, tokenizer.mask_token_id)
    positions = getattr(network.config, "max_position_embeddings", None) or model.max_tokens
    transform = TextTransform(tokenizer, min(model.max_tokens, tokenizer.model_max_length, positions), model.prompt)
    key = f"cloze {model.prompt} {transform.max_tokens} {hashed(sorted(tokenizer.get_vocab().items()))}"
    under = partial(_asking, network, vocabulary, tokenizer, name)
    head = weight, bias
    return Backbone(name, "text", weight.shape[1], body, network, transform, key, False, head, model.task, under)


def hugging_face(place: str, model: Model, name: str) -> Backbone:
    """Any vision or text model of `transformers`, from a hub id or a local folder; safetensors only."""
    if model.task == "generate":
        return generator(place, model, name)
    if model.prompt is not None and model.label_words is not None:
        return (cloze if "{mask}" in model.prompt else choice)(place, model, name)
    import transformers
    from safetensors import SafetensorError

    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # a checkpoint's unused head is no news
    try:
        config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False)
        if model.weights == "random":
            encoder = transformers.AutoModel.from_config(config)
        else:
            encoder, found = transformers.AutoModel.from_pretrained(
                place, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **how_to_load(model)
            )
            lacking = needed(sorted(found["missing_keys"]))
            if model.weights:
                load_weights(encoder, Path(model.weights))
            elif lacking:  # they would be random
                raise HeadstartError(f"its weights are of another network: they lack {some(lacking)}")
        if config.is_encoder_decoder:  # what it makes of a text, before it answers
            encoder = encoder.get_encoder()
        encoder = as_floats(encoder, how_to_load(model))
        image = encoder.main_input_name == "pixel_values"
        tokenizer = None if image else transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        settings = _settings(place, "preprocessor_config.json" if image else "1_Pooling/config.json")
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        raise cannot_load(name, error) from None
    if config.model_type == "vit_mae":  # it would hide patches at random, in evaluation too
        config.mask_ratio = encoder.config.mask_ratio = 0.0
    # The same parameters give other features with another number of heads or another activation.
    key = hashed({k: v for k, v in config.to_diff_dict().items() if k not in ("_name_or_path", "transformers_version")})
    if tokenizer is None:
        return _vision(encoder, settings, model, key)
    pooling: str = model.pooling
    if pooling == "auto":  # what a sentence-transformers folder says; otherwise the token that has seen the others
        mode = settings.get("pooling_mode")
        named = [each for each, (new, old) in _POOLINGS.items() if mode == new or settings.get(f"pooling_mode_{old}")]
        try:
            usual = "mean" if config.is_encoder_decoder else "last" if _causal(encoder) else "cls"
            pooling = named[0] if named else usual
        except (ValueError, RuntimeError, AttributeError) as error:
            raise cannot_load(name, error) from None
    return _reading(_Pooled(encoder, pooling, image=False), config, tokenizer, name, key, model)


def _reading(body: _Pooled, config: Any, tokenizer: Any, name: str, key: str, model: Model) -> Backbone:
    """An encoder of texts that is there already, under the prompt of a model where it has one; key: of its network."""
    # Not every tokenizer knows how many positions its network has.
    positions = getattr(config, "max_position_embeddings", None) or model.max_tokens
    longest = min(model.max_tokens, tokenizer.model_max_length, positions)
    transform = TextTransform(tokenizer, longest, model.prompt, open=body.pooling == "last")
    # The tokenizer decides the ids, so it belongs to the key; two tokenizers of one size may differ.
    about = f"text {body.pooling} {longest} {vocabulary_key(tokenizer)} {key}"
    about += f" {model.prompt}" if model.prompt else ""
    under = partial(_reading, body, config, tokenizer, name, key)
    return Backbone(name, "text", config.hidden_size, body, body.encoder, transform, about, under=under)


def _causal(encoder: Any) -> bool:
    """Whether the state of a text's first token is the same whatever follows it."""
    texts = (torch.tensor([[0, following]]) for following in (1, 2))
    with torch.inference_mode():
        one, other = (encoder(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state for ids in texts)
    return torch.equal(one[:, 0], other[:, 0])


def _vision(encoder: Any, settings: Mapping[str, Any], model: Model, key: str) -> Backbone:
    size = settings.get("crop_size" if settings.get("do_center_crop") else "size") or 224
    if isinstance(size, dict):
        size = size.get("height") or size.get("shortest_edge") or 224
    size = model.image_size or size
    mean, std = settings.get("image_mean", [0.5] * 3), settings.get("image_std", [0.5] * 3)
    normalisation = Normalisation(tuple(mean), tuple(std))
    has_class_token = any(name.endswith("cls_token") for name, _ in encoder.named_parameters())
    pooling = model.pooling if model.pooling != "auto" else "cls" if has_class_token else "mean"
    patches = encoder.embeddings.patch_embeddings.num_patches if encoder.config.model_type == "vit_mae" else 0
    body = _Pooled(encoder, pooling, image=True, patches=patches)
    try:  # configurations do not agree on where they say the width
        with torch.inference_mode():
            dim = body(torch.zeros(1, 3, size, size)).shape[1]
    except (ValueError, RuntimeError, AttributeError) as error:
        raise cannot_load(f"{model.backbone} at {size} pixels", error) from None
    convolutional = not hasattr(encoder.config, "num_attention_heads")
    return image_backbone(body, dim, size, normalisation, model, convolutional, f"{pooling} {key}", encoder)


def _settings(place: str, file: str) -> Mapping[str, Any]:
    """Settings beside the weights, or none; building an image processor to ask it could need torchvision."""
    from transformers.utils.hub import cached_file

    path = cached_file(place, file, _raise_exceptions_for_missing_entries=False)
    settings: Mapping[str, Any] = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    return settings
