"""Attach a module to the blocks of a transformer, and take it off again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headstart.backbones import Backbone, Prefix, evaluating, run_body, some, unused
from headstart.errors import HeadstartError
from headstart.modules.adapter import adapters
from headstart.modules.blocks import Detachable, blocks_of, linear_in, projections_of, stacks_of, widths
from headstart.modules.key_values import key_values
from headstart.modules.lora import lora
from headstart.modules.mask import masks
from headstart.modules.prompts import prompts

# What each kind needs of a body, and what to train where the body does not have it.
_LAYERS = "a network that calls its projections to queries and values as layers", "'adapter'"
_NEEDS = {
    "lora": _LAYERS,
    "mask": _LAYERS,
    "adapter": ("blocks that hand on hidden states of one width", "'lora'"),
    "prefix": ("a causal language model that can go on from a cache of keys and values", "'lora'"),
    "vpt": ("blocks of one width that take any number of tokens (no rotary positions, no windows)", "'lora'"),
}


@dataclass(frozen=True, eq=False)
class Attached:
    """A module on a body: its parameters by name, how to take it off, and how many blocks come before it."""

    kind: str
    parameters: Mapping[str, nn.Parameter]
    detach: Callable[[], object]
    depth: int


def attach(kind: str, backbone: Backbone, settings: Mapping[str, Any], seed: int) -> Attached:
    """Put a new module on the body; its parameters depend on the seed alone, and its outputs are the body's own.

    settings: rank, alpha_lora, rslora and targets of LoRA, the bottleneck of adapters, tokens of prompts and prefixes.
    ``blocks`` puts the module on so many of the last blocks; None, or nothing, on all.
    """
    blocks = blocks_of(backbone.core)
    if not blocks:
        raise HeadstartError(f"{backbone.name} has no transformer blocks for a {kind}; set train to 'all' or 'head'")
    depth = depth_of(backbone, settings.get("blocks"), 1)
    targets = _targets(backbone, blocks, depth, settings.get("targets"))
    width = widths(backbone.core.get_submodule(projections_of(backbone.core)[0]))[1]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "lora":
            sizes = settings["rank"], settings["alpha_lora"], bool(settings.get("rslora"))
            parameters, detach = lora(backbone.core, targets, *sizes)
        elif kind == "mask":
            parameters, detach = masks(backbone.body, backbone.core, targets, settings["density"], seed)
        elif kind == "adapter":
            parameters, detach = adapters(backbone.body, blocks[depth:], width, settings["bottleneck"])
        elif kind == "prefix":
            parameters, detach = _prefix(backbone, settings["tokens"])
        else:
            read = stacks_of(backbone.core)[0]  # a decoder's tokens are those that it writes
            parameters, detach = prompts(backbone.body, read[depth:], width, settings["tokens"])
    try:
        _check(kind, backbone, parameters)
    except BaseException:
        detach()
        raise
    return Attached(kind, parameters, detach, depth)


def _targets(backbone: Backbone, blocks: list[nn.Module], depth: int, wanted: str | Sequence[str] | None) -> list[str]:
    """Names of the layers that a LoRA or a mask is on: behind ``depth`` blocks, those that are wanted."""
    core = backbone.core
    names = None if isinstance(wanted, str) else wanted
    targets = projections_of(core) if wanted is None else linear_in(core, names)
    if depth or wanted is not None:  # what is no block, such as the vocabulary, is no target
        inside = {id(module) for block in blocks[depth:] for module in block.modules()}
        targets = [name for name in targets if id(core.get_submodule(name)) in inside]
    if not targets:
        there = dict.fromkeys(name.rpartition(".")[2] for name in linear_in(blocks[-1], None))
        raise HeadstartError(
            f"targets: no linear layer in the blocks of {backbone.name} is called {' or '.join(names or ())}; they "
            f"are called {', '.join(there)}; or set 'all-linear'"
        )
    return targets


def _check(kind: str, backbone: Backbone, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse a module that a body cannot run with, or that has parameters which the features do not depend on."""
    if torch.is_inference_mode_enabled():  # no graph is built, and nothing is trained
        return
    try:
        missed = unused(backbone, parameters)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:  # of the body's own code
        problem = f"a forward pass with it fails ({str(error).partition(chr(10))[0]})"
    else:
        if not missed:
            return
        problem = f"the features do not depend on {some(missed)}"
    raise _unfit(kind, backbone, problem)


def _unfit(kind: str, backbone: Backbone, problem: str) -> HeadstartError:
    needs, instead = _NEEDS[kind]
    return HeadstartError(
        f"{kind} does not work on {backbone.name}: {problem}. It needs {needs}; set train to {instead}, 'all' or 'head'"
    )


def _prefix(backbone: Backbone, tokens: int) -> Detachable:
    try:
        return key_values(backbone.body, backbone.core, tokens)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):  # of the body's own code
        raise _unfit("prefix", backbone, "it has none") from None


def depth_of(backbone: Backbone, wanted: int | None, least: int = 0) -> int:
    """How many of a body's blocks come before the last ``wanted``."""
    count, parts = len(blocks_of(backbone.core)), len(stacks_of(backbone.core))
    if wanted is not None and parts > 1:
        raise HeadstartError(
            f"{backbone.name} has an encoder and a decoder, and its last {wanted} blocks cannot be trained alone; "
            "leave blocks out, for all of both"
        )
    if wanted is not None and not least <= wanted <= count:
        raise HeadstartError(
            f"{backbone.name} has {count} blocks, and what trains is to be in the last {wanted}; set blocks to a "
            f"number from {least} to {count}, or leave it out for all"
        )
    return 0 if wanted is None else count - wanted


def prefix_of(backbone: Backbone, depth: int) -> Prefix | None:
    """The first ``depth`` blocks of a body, and the layer that follows them; None where they are no blocks."""
    blocks = blocks_of(backbone.core)
    following = blocks[depth] if depth < len(blocks) else _behind(backbone, blocks[-1]) if blocks else None
    return Prefix(backbone, blocks[:depth], following) if depth and following else None


def _behind(backbone: Backbone, last: nn.Module) -> nn.Module:
    """The module that runs after the last block, on what that hands on."""
    called: list[nn.Module] = []
    handles = [
        each.register_forward_pre_hook(lambda module, given: called.append(module), prepend=True)
        for each in backbone.body.modules()
    ]
    try:
        with evaluating(backbone.body), torch.no_grad():
            run_body(backbone.body, backbone.sample())
    finally:
        for handle in handles:
            handle.remove()
    inside = set(last.modules())
    after = called[max(number for number, module in enumerate(called) if module in inside) + 1 :]
    if not after:
        raise HeadstartError(f"no layer of {backbone.name} follows its blocks; set blocks to 1 or more")
    return after[0]


def plain_parameters(core: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a body under its own names, whatever is attached to it."""
    return {_plain(name): parameter for name, parameter in core.named_parameters() if ".lora_" not in name}


def plain_state(core: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a body under its own names, whatever is attached to it."""
    return {_plain(name): tensor for name, tensor in core.state_dict().items() if ".lora_" not in name}


def _plain(name: str) -> str:
    return name.replace(".base_layer.", ".")
