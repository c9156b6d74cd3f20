"""Language models that choose: how likely each of some continuations is after a prompt."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headstart.backbones.backbone import Backbone, cannot_load
from headstart.backbones.completions import CompletionTransform
from headstart.backbones.quantised import as_floats, how_to_load
from headstart.backbones.transforms import TextTransform
from headstart.config.recipe import Model
from headstart.errors import HeadstartError

# Log-likelihoods in one pass for all candidates may differ from those one by one by no more than rounding.
_TOLERANCE = 1e-3

# Of which part of a sequence a token is, where it is of no candidate.
_PROMPT, _PADDING = -1, -2

# What configurations call how far a token's attention goes back: Mistral's and Gemma's, GPT-Neo's, Llama 4's.
_WINDOWS = ("sliding_window", "window_size", "attention_chunk_size")


class _After(nn.Module):
    """A causal language model: the log-likelihood of every candidate after a prompt, in one pass.

    The prompt is read once. Behind it come the candidates, each without its last token, which nothing follows; none of
    them sees another one. Candidates of a single token add nothing to the prompt; they are compared with each other
    alone, since what the rest of the vocabulary takes of them cancels between classes.
    """

    def __init__(self, model: Any, candidates: Sequence[Sequence[int]]) -> None:
        super().__init__()
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
        window = getattr(config, "sliding_window", None) if "sliding_attention" in kinds else None
        self.window, self.by_kind = (window if window and window > 0 else None), len(kinds) > 1
        self.encoder, self.count = model, len(candidates)
        tails = [(number, depth, token) for number, c in enumerate(candidates) for depth, token in enumerate(c[:-1])]
        self.owner, self.depth, self.tails = torch.tensor(tails, dtype=torch.long).reshape(-1, 3).T
        # A token is read off the prompt's last position where it is a candidate's first, or off the one before it.
        place = {(number, depth): 1 + at for at, (number, depth, _) in enumerate(tails)}
        read = [(n, place.get((n, d - 1), 0), token) for n, c in enumerate(candidates) for d, token in enumerate(c)]
        self.read = torch.tensor(read, dtype=torch.long).T

    def forward(self, inputs: Tensor, mask: Tensor, *_: Tensor) -> Tensor:
        """Token ids and mask [B, L], padded on the right → [B, C]."""
        lengths, device = mask.sum(dim=1, keepdim=True), inputs.device
        behind = lengths + torch.arange(len(self.tails), device=device)
        places = torch.cat([lengths - 1, behind], 1)
        given = {"input_ids": inputs, "attention_mask": mask}
        if len(self.tails):
            given = self._packed(inputs, lengths, behind)
        owner, place, token = self.read.to(device)
        rows = torch.arange(len(inputs), device=device)[:, None]
        with read_at(self.encoder, (rows, places)), _among(self.encoder, None if len(self.tails) else token) as order:
            logits = self.encoder(**given, use_cache=False).logits
        found: Tensor = logits.float().log_softmax(dim=-1)[:, place, token if order is None else order]
        return found.new_zeros(len(inputs), self.count).index_add(1, owner, found)

    def _packed(self, inputs: Tensor, lengths: Tensor, behind: Tensor) -> dict[str, Any]:
        """Prompt, candidates and padding as one sequence [B, N], each token's position, and who sees whom [B, 1, N, N].

        lengths: of the prompts [B, 1]; behind: the places of the candidates' tokens [B, T]. Padding comes last, so that
        a row is the same, alone or beside a longer one.
        """
        tails, owner, depth = (
            each.to(inputs.device).expand(len(inputs), -1) for each in (self.tails, self.owner, self.depth)
        )
        ids = torch.cat([inputs, torch.zeros_like(tails)], 1).scatter(1, behind, tails)
        order = torch.arange(ids.shape[1], device=inputs.device).expand_as(ids)
        prompt = order < lengths
        positions = (order * prompt).scatter(1, behind, lengths + depth)
        part = torch.where(prompt, _PROMPT, _PADDING).scatter(1, behind, owner)
        sees = (part[:, None] == _PROMPT) | (part[:, None] == part[:, :, None])
        back = positions[:, :, None] - positions[:, None]
        sees &= back >= 0
        masks: Any = _added(sees)
        if self.window is not None and self.window < ids.shape[1]:
            near = _added(sees & (back < self.window))
            masks = {"full_attention": masks, "sliding_attention": near} if self.by_kind else near
        return {"input_ids": ids, "attention_mask": masks, "position_ids": positions}


def _added(sees: Tensor) -> Tensor:
    """Who sees whom [B, N, N] → what is added to the scores of attention [B, 1, N, N]."""
    # Zero and a very negative number: some attentions add a mask rather than select by it.
    added = torch.zeros(sees.shape, device=sees.device).masked_fill(~sees, torch.finfo(torch.float32).min)
    return added[:, None]


class _Answer(nn.Module):
    """A sequence-to-sequence model: the log-likelihood of every candidate as the answer to a prompt, read once."""

    def __init__(self, model: Any, candidates: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.encoder = model
        length = max(len(each) for each in candidates)
        padded = [[*each, *[-1] * (length - len(each))] for each in candidates]
        self.tokens = torch.tensor(padded, dtype=torch.long)
        start = torch.full((len(candidates), 1), model.config.decoder_start_token_id)
        self.given = torch.cat([start, self.tokens[:, :-1].clamp(min=0)], 1)

    def forward(self, inputs: Tensor, mask: Tensor, *_: Tensor) -> Tensor:
        """Token ids and mask [B, L] → [B, C]."""
        rows, count = inputs.shape[0], len(self.tokens)
        read = self.encoder.get_encoder()(input_ids=inputs, attention_mask=mask)
        read.last_hidden_state = read.last_hidden_state.repeat_interleave(count, 0)
        given, tokens = (each.to(inputs.device).repeat(rows, 1) for each in (self.given, self.tokens))
        logits = self.encoder(
            encoder_outputs=read,
            attention_mask=mask.repeat_interleave(count, 0),
            decoder_input_ids=given,
            use_cache=False,
        ).logits
        found: Tensor = logits.float().log_softmax(dim=-1).gather(2, tokens.clamp(min=0)[:, :, None])[:, :, 0]
        return (found * (tokens >= 0)).sum(dim=1).view(rows, count)


class _Completing(nn.Module):
    """A causal language model: the negative log-likelihood of a completion after its prompt, and its tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model

    def forward(self, inputs: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        """Token ids, mask and what belongs to the completion [B, L] → [B, 2]."""
        rows, places = targets[:, 1:].nonzero(as_tuple=True)  # a token is read off the one before it
        with read_at(self.encoder, (rows, places)):
            logits = self.encoder(input_ids=inputs, attention_mask=mask, use_cache=False).logits
        losses = nn.functional.cross_entropy(logits.float(), inputs[rows, places + 1], reduction="none")
        total = losses.new_zeros(len(inputs)).index_add(0, rows, losses)
        return torch.stack([total, targets[:, 1:].sum(dim=1).to(total.dtype)], dim=1)


class _Answering(nn.Module):
    """A sequence-to-sequence model: the negative log-likelihood of a completion as the answer, and its tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model

    def forward(self, inputs: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        """Token ids, mask and what belongs to the completion [B, L] → [B, 2]."""
        prompts, counts = mask - targets, targets.sum(dim=1)
        places = prompts.sum(dim=1, keepdim=True) + torch.arange(int(counts.max()), device=inputs.device)
        there = places < mask.sum(dim=1, keepdim=True)
        answers = inputs.gather(1, places.clamp(max=inputs.shape[1] - 1))
        start = answers.new_full((len(inputs), 1), self.encoder.config.decoder_start_token_id)
        length = max(int(prompts.sum(dim=1).max()), 1)  # behind it there are completions alone
        logits = self.encoder(
            input_ids=inputs[:, :length],
            attention_mask=prompts[:, :length],
            decoder_input_ids=torch.cat([start, answers[:, :-1]], 1),
            use_cache=False,
        ).logits
        losses = nn.functional.cross_entropy(logits.float().transpose(1, 2), answers, reduction="none")
        return torch.stack([(losses * there).sum(dim=1), counts.to(losses.dtype)], dim=1)


@contextmanager
def read_at(model: Any, places: Any) -> Iterator[None]:
    """Inside, the vocabulary is read off these places of the last hidden states [B, L, d] alone."""
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda layer, given: (given[0][places],))
    try:
        yield
    finally:
        handle.remove()


class _Words:
    """The forward of a layer that reads a vocabulary off hidden states, for some of its tokens [C] alone."""

    def __init__(self, layer: nn.Linear, tokens: Tensor) -> None:
        self.layer, self.rows = layer, tokens

    def __call__(self, states: Tensor) -> Tensor:
        bias = None if self.layer.bias is None else self.layer.bias[self.rows]
        return nn.functional.linear(states, self.layer.weight[self.rows], bias)


@contextmanager
def _among(model: Any, tokens: Tensor | None) -> Iterator[Tensor | None]:
    """Inside, the vocabulary is these tokens [C] alone, in the order that it gives [C]; None: all of it."""
    layer = model.get_output_embeddings()
    if tokens is None or type(layer) is not nn.Linear:
        yield None
        return
    vars(layer)["forward"] = _Words(layer, tokens)
    try:
        yield torch.arange(len(tokens), device=tokens.device)
    finally:
        del vars(layer)["forward"]


def rows_read(layer: nn.Module, inputs: tuple[Any, ...]) -> Tensor | None:
    """Rows of a layer's parameters that its forward will read for these inputs; None: all of them."""
    forward = vars(layer).get("forward")
    ids: Tensor | None = None
    if isinstance(forward, _Words):
        ids = forward.rows
    elif type(layer) is nn.Embedding and layer.max_norm is None and forward is None and inputs:
        ids = inputs[0]
    return None if ids is None else torch.unique(ids)


def choice(place: str, model: Model, name: str) -> Backbone:
    """A causal or sequence-to-sequence model under a prompt; its features are the candidates' log-likelihoods."""
    return _choosing(*language_model(place, name, how_to_load(model)), name, model)


def _choosing(network: Any, tokenizer: Any, name: str, model: Model) -> Backbone:
    """A network that is there already, under the prompt and the label words of a model."""
    assert model.prompt is not None
    assert model.label_words is not None
    seq2seq = bool(network.config.is_encoder_decoder)
    candidates = [continuation(tokenizer, model.prompt, word, seq2seq) for word in model.label_words]
    if empty := [word for word, ids in zip(model.label_words, candidates, strict=True) if not ids]:
        raise HeadstartError(f"model.label_words: {empty} are no tokens of {name}'s vocabulary; choose other words")
    room = getattr(network.config, "max_position_embeddings", None) or tokenizer.model_max_length
    longest = min(model.max_tokens, tokenizer.model_max_length, room - max(len(each) for each in candidates))
    transform = TextTransform(tokenizer, longest, model.prompt, open=not seq2seq)
    body = (_Answer if seq2seq else _After)(network, candidates)
    if not seq2seq:
        _check(name, body, transform, candidates, model.label_words)
    count = len(candidates)
    head = np.eye(count, dtype=np.float32), np.zeros(count, np.float32)
    key = f"choice {model.prompt} {candidates} {longest} {vocabulary_key(tokenizer)}"
    under = partial(_choosing, network, tokenizer, name)
    return Backbone(name, "text", count, body, network, transform, key, False, head, "choose", under)


def generator(place: str, model: Model, name: str) -> Backbone:
    """A causal or sequence-to-sequence model that learns to complete prompts."""
    network, tokenizer = language_model(place, name, how_to_load(model))
    seq2seq = bool(network.config.is_encoder_decoder)
    if tokenizer.eos_token is None and tokenizer.sep_token is None:
        raise HeadstartError(f"model.task: the tokenizer of {name} has no token that ends a text; give it an eos_token")
    room = getattr(network.config, "max_position_embeddings", None) or tokenizer.model_max_length
    longest = min(model.max_tokens, tokenizer.model_max_length, room)
    transform = CompletionTransform(tokenizer, longest, open=not seq2seq)
    key = f"completion {transform.max_tokens} {vocabulary_key(tokenizer)}"
    head = np.zeros((1, 2), np.float32), np.zeros(1, np.float32)
    body = (_Answering if seq2seq else _Completing)(network)
    return Backbone(name, "text", 2, body, network, transform, key, False, head, "generate")


def language_model(place: str, name: str, how: Mapping[str, Any]) -> tuple[Any, Any]:
    """A causal or sequence-to-sequence model with its vocabulary, and its tokenizer; safetensors only."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False)
        auto: Any = (
            transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
        )
        network, found = auto.from_pretrained(
            place, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **how
        )
        if found["missing_keys"]:
            raise ValueError(
                "it is no causal or sequence-to-sequence language model (it has no language-model head); take one such "
                "as smollm2-135m"
            )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise cannot_load(name, error) from None
    return as_floats(network, how), tokenizer


def vocabulary_key(tokenizer: Any) -> str:
    """The same for tokenizers that make the same tokens."""
    return hashed(tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items()))


def hashed(value: Any) -> str:
    """A short name for a value that JSON can hold."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def continuation(tokenizer: Any, prompt: str, word: str, alone: bool) -> list[int]:
    """Tokens of a label word behind the end of the prompt, or alone; without those that end a text."""
    if alone:
        return list(tokenizer(word, add_special_tokens=False)["input_ids"])
    end = re.split(r"\{(?:text|second)\}", prompt)[-1] or "a"
    space = "" if end[-1].isspace() else " "
    before, whole = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (end, f"{end}{space}{word}"))
    if whole[: len(before)] == before and len(whole) > len(before):
        return list(whole[len(before) :])
    return list(tokenizer(f"{space}{word}", add_special_tokens=False)["input_ids"])


@torch.inference_mode()
def _check(
    name: str, body: Any, transform: TextTransform, candidates: Sequence[Sequence[int]], words: Sequence[str]
) -> None:
    """Refuse a model that does not keep candidates apart, or counts positions or looks back in a way of its own."""
    if max(len(each) for each in candidates) == 1:
        return
    config = body.encoder.config.get_text_config()
    made_up = "a made-up example"
    longest = max(transform.max_tokens, len(transform("", made_up))) + max(len(each) for each in candidates) - 1
    windows = [getattr(config, name, None) for name in _WINDOWS]
    short = [each for each in windows if isinstance(each, int) and 0 < each < longest]
    beyond = [" ".join(words[n % len(words)] for n in range(each)) for each in short]
    texts = [transform(text, made_up) for text in ("a", "a a a", *beyond)]
    try:
        found = body(*transform.collate(texts))
        expected = [[_alone(body.encoder, value[:, 0].tolist(), each) for each in candidates] for value in texts]
        apart = torch.allclose(found, torch.tensor(expected), rtol=_TOLERANCE, atol=_TOLERANCE)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError):  # of the model's own code
        apart = False
    if not apart:
        fit = f", or set model.max_tokens so low that prompts and words fit into {min(short)} tokens" if short else ""
        raise HeadstartError(
            f"model.label_words: {name} cannot compare words of several tokens in one pass; choose words that are "
            f"single tokens of its vocabulary{fit}"
        )


def _alone(network: Any, prompt: Sequence[int], candidate: Sequence[int]) -> float:
    """The log-likelihood of one candidate after a prompt, by the plain model."""
    ids = torch.tensor([[*prompt, *candidate]])
    logits = network(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt) - 1 : -1]
    return float(logits.float().log_softmax(-1).gather(1, torch.tensor(candidate)[:, None]).sum())
