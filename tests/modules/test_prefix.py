"""Modules on the last blocks alone: where they sit, and the frozen blocks before them run once for an example."""

import errno
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from headstart.backbones import Backbone, Inputs, Prefix, embed, embed_rows, load_backbone, moved, run_body
from headstart.backbones.hugging_face import _Pooled
from headstart.backbones.prefix import Prefixed, StateFile
from headstart.backbones.transforms import NORMALISATIONS, ImageInput, ImageTransform
from headstart.config.recipe import Model
from headstart.data import Examples
from headstart.errors import HeadstartError
from headstart.modules import attach, prefix_of
from headstart.modules.blocks import blocks_of
from tests.modules.test_modules import SETTINGS, WIDTH, ChannelsFirst, bert, shaken, tiny_vit, vit

KINDS = ("lora", "adapter", "vpt")
TEXTS = ["3 4 5", "6", "7 8 9 10 3 4 5 6", "5 5", "9 3 10 4", "10", "4 3 2 1 5 6 7"]
EPOCHS = [[[0, 1, 2], [3, 4], [5, 6]], [[6, 3, 0], [1, 2, 4, 5]], [[2], [5, 1], [0, 4, 3, 6, 6]]]
CPU = torch.device("cpu")


class Table:
    def __getitem__(self, rows: list[int]) -> dict[str, list[str]]:
        return {"text": [TEXTS[row] for row in rows]}


def image_backbone() -> Backbone:
    backbone = tiny_vit()
    body = ImageInput(backbone.body, NORMALISATIONS["half"]).eval()
    return replace(backbone, body=body, transform=ImageTransform(8))


BODIES = {"bert": bert, "vit": image_backbone}


def examples_of(backbone: Backbone) -> Examples:
    n = len(TEXTS)
    if backbone.kind == "text":
        return Examples("text", Table(), ("text",), np.arange(n), np.zeros(n, np.int64))
    images = np.random.default_rng(0).integers(0, 256, (n, 8, 8, 3), dtype=np.uint8)
    return Examples("image", images, (), np.arange(n), np.zeros(n, np.int64))


def inputs_of(backbone: Backbone, prefix: Prefix | None = None) -> Inputs:
    return Inputs(backbone, examples_of(backbone), "train", prefix)


def rows(batches: list[list[int]]) -> list[npt.NDArray[np.int64]]:
    return [np.array(batch, np.int64) for batch in batches]


def features(backbone: Backbone, inputs: Inputs, batches: list[list[int]]) -> list[Tensor]:
    with torch.no_grad():
        return [run_body(backbone.body, moved(batch, CPU)) for batch in inputs.batches(rows(batches))]


@contextmanager
def watched(modules: list[nn.Module]) -> Iterator[list[int]]:
    """How many examples have run through each module."""
    counts = [0] * len(modules)

    def watch(number: int) -> Any:
        def hook(module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
            counts[number] += len(inputs[0])

        return hook

    handles = [each.register_forward_hook(watch(number), with_kwargs=True) for number, each in enumerate(modules)]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def inner(backbone: Backbone) -> list[nn.Module]:
    """A layer inside of each block: a block that is skipped is called, and computes nothing."""
    return [block.get_submodule("attention") for block in blocks_of(backbone.core)]


def trace(backbone: Backbone) -> list[Any]:
    """Everything that a prefix touches while it is at work."""
    return [
        (
            name,
            module.training,
            vars(module).get("forward"),
            list(module._forward_hooks),
            list(module._forward_pre_hooks),
        )
        for name, module in backbone.body.named_modules()
    ]


# ----------------------------------------------------------------------------------------------------------- the places


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kind", [*KINDS, "mask"])
def test_without_blocks_a_module_is_on_all_of_them(kind: str, body: str) -> None:
    plain = attach(kind, BODIES[body](), SETTINGS, seed=1)
    numbers = range(3)
    names = {
        "adapter": [f"{n}.{part}.{what}" for n in numbers for part in ("down", "up") for what in ("weight", "bias")],
        "vpt": [str(n) for n in numbers],
    }
    assert plain.depth == 0
    assert len(plain.parameters) == {"adapter": 12, "vpt": 3, "lora": 12, "mask": 6}[kind]
    assert list(plain.parameters) == names.get(kind, list(plain.parameters))
    for blocks in (None, 3):
        other = attach(kind, BODIES[body](), {**SETTINGS, "blocks": blocks}, seed=1)
        assert other.depth == 0
        assert list(other.parameters) == list(plain.parameters)
        assert all(torch.equal(other.parameters[name], value) for name, value in plain.parameters.items())


@pytest.mark.parametrize("blocks", [1, 2])
def test_lora_and_masks_are_in_the_last_blocks(blocks: int) -> None:
    targets = [f"encoder.layer.{n}.attention.self.{what}" for n in range(3 - blocks, 3) for what in ("query", "value")]
    module = attach("lora", bert(), {**SETTINGS, "blocks": blocks}, seed=0)
    assert list(module.parameters) == [f"{target}.lora_{side}.weight" for target in targets for side in "AB"]
    assert module.depth == 3 - blocks
    assert list(attach("mask", bert(), {**SETTINGS, "blocks": blocks}, seed=0).parameters) == targets


def test_lora_keeps_to_the_last_of_many_blocks() -> None:
    """peft shortens a long list of targets; the block that is left out must not come back by that."""
    encoder = vit(blocks=12)
    body = _Pooled(encoder, "cls", image=True)
    module = attach(
        "lora", Backbone("v", "image", WIDTH, body, encoder, ChannelsFirst(8), "v"), {**SETTINGS, "blocks": 11}, seed=0
    )
    assert len(module.parameters) == 11 * 4
    assert module.depth == 1
    assert not [name for name, _ in blocks_of(encoder)[0].named_parameters() if "lora" in name]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_leading_blocks_compute_what_they_did(kind: str, blocks: int, body: str) -> None:
    backbone = BODIES[body]()
    (batch,) = inputs_of(backbone).batches(rows([[0, 1, 2]]))
    seen: list[list[Tensor]] = []
    hooks = [
        block.register_forward_hook(lambda _, given, out: seen[-1].append(out)) for block in blocks_of(backbone.core)
    ]
    with torch.no_grad():
        seen.append([])
        backbone.body(*batch)
        seen.append([])
        module = shaken(attach(kind, backbone, {**SETTINGS, "blocks": blocks}, seed=1))
        seen[-1].clear()  # of the pass that checks the module
        backbone.body(*batch)
    for hook in hooks:
        hook.remove()
    assert module.depth == 3 - blocks
    if kind != "lora":
        assert {name.split(".")[0] for name in module.parameters} == {str(n) for n in range(blocks)}
    for before, after in list(zip(*seen, strict=True))[: module.depth]:
        assert torch.equal(before, after)


def test_prompts_start_at_the_first_of_the_last_blocks() -> None:
    backbone = image_backbone()
    module = shaken(attach("vpt", backbone, {**SETTINGS, "blocks": 2}, seed=1))
    ((images,),) = inputs_of(backbone).batches(rows([[0, 1]]))
    with torch.no_grad():
        found = backbone.body(images)
        prompts = [parameter.clone() for parameter in module.parameters.values()]
        module.detach()
        encoder: Any = backbone.core
        first, *last = blocks_of(encoder)
        states = first(encoder.embeddings(images.permute(0, 3, 1, 2) / 127.5 - 1))
        for prompt, block in zip(prompts, last, strict=True):
            wide = block(torch.cat([states[:, :1], prompt.expand(2, -1, -1), states[:, 1:]], dim=1))
            states = torch.cat([wide[:, :1], wide[:, 5:]], dim=1)
        expected = encoder.layernorm(states)[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("blocks", [0, 4])
@pytest.mark.parametrize("kind", [*KINDS, "mask"])
def test_a_module_cannot_be_on_more_blocks_than_there_are(kind: str, blocks: int) -> None:
    backbone = bert()
    before = trace(backbone)
    with pytest.raises(HeadstartError, match=f"^bert has 3 blocks, and what trains is to be in the last {blocks};"):
        attach(kind, backbone, {**SETTINGS, "blocks": blocks}, seed=0)
    assert trace(backbone) == before


# ----------------------------------------------------------------------------------------------------------- the prefix


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_features_and_gradients_are_those_without_a_cache(kind: str, blocks: int, body: str) -> None:
    backbone = BODIES[body]()
    module = shaken(attach(kind, backbone, {**SETTINGS, "blocks": blocks}, seed=1))
    cached = inputs_of(backbone, prefix_of(backbone, module.depth))
    parameters = list(module.parameters.values())
    weights = torch.linspace(-1, 1, WIDTH) ** 3
    for epoch in EPOCHS:
        pairs = zip(inputs_of(backbone).batches(rows(epoch)), cached.batches(rows(epoch)), strict=True)
        for plain, carrying in pairs:
            assert all(torch.equal(one, other) for one, other in zip(plain, carrying, strict=True))
            outputs, gradients = [], []
            for batch in (plain, carrying):
                outputs.append(run_body(backbone.body, moved(batch, CPU)))
                gradients.append(torch.autograd.grad((outputs[-1] * weights).sum(), parameters))
            torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=1e-5)
            for one, other in zip(*gradients, strict=True):
                assert one.abs().max() > 1e-4
                torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_blocks_run_once_for_an_example(kind: str, body: str) -> None:
    backbone = BODIES[body]()
    module = shaken(attach(kind, backbone, {**SETTINGS, "blocks": 1}, seed=1))
    inputs = inputs_of(backbone, prefix_of(backbone, module.depth))
    with watched(inner(backbone)) as counts:
        first = features(backbone, inputs, EPOCHS[0])
        assert counts == [7, 7, 7]
        features(backbone, inputs, EPOCHS[1])
        features(backbone, inputs, EPOCHS[2])
        again = features(backbone, inputs, EPOCHS[0])
    assert counts == [7, 7, 7 + 7 + 8 + 7]
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_an_example_that_nobody_asks_for_is_not_computed() -> None:
    backbone = bert()
    inputs = inputs_of(backbone, prefix_of(backbone, 2))
    with watched(inner(backbone)) as counts:
        features(backbone, inputs, [[4, 4], [2, 4]])
    assert counts == [2, 2, 4]


@pytest.mark.parametrize("body", BODIES)
def test_states_are_those_behind_the_leading_blocks_and_do_not_depend_on_the_batch(body: str) -> None:
    backbone = BODIES[body]()
    module = attach("vpt", backbone, {**SETTINGS, "blocks": 1}, seed=1)
    found: list[dict[int, Tensor]] = []
    for epoch in EPOCHS[:2]:
        states = {}
        for members, batch in zip(
            epoch, inputs_of(backbone, prefix_of(backbone, module.depth)).batches(rows(epoch)), strict=True
        ):
            assert isinstance(batch, Prefixed)
            assert batch.states.dtype == torch.float32
            for number, (row, each) in enumerate(zip(members, batch.states, strict=True)):
                length = int(batch[1][number].sum()) if body == "bert" else 5  # four patches and the first token
                assert len(each) == (batch[0].shape[1] if body == "bert" else 5)
                assert not each[length:].any()
                states[row] = each[:length]
        found.append(states)
    assert all(torch.equal(found[0][row], found[1][row]) for row in range(7))
    # Independently: by hand, without a module.
    module.detach()
    encoder: Any = backbone.core
    ((first, *_),) = inputs_of(backbone).batches(rows([[2]]))
    with torch.no_grad():
        given = {"input_ids": first} if body == "bert" else {"pixel_values": first.permute(0, 3, 1, 2) / 127.5 - 1}
        expected = encoder.embeddings(**given)
        for block in blocks_of(encoder)[:2]:
            expected = block(expected)
    torch.testing.assert_close(found[0][2], expected[0], atol=1e-5, rtol=1e-5)


def test_the_model_runs_in_the_thread_of_whoever_asks() -> None:
    backbone = bert()
    inputs = inputs_of(backbone, prefix_of(backbone, 2))
    threads = set()
    backbone.core.register_forward_pre_hook(lambda module, given: threads.add(threading.get_ident()))
    for _ in range(2):
        features(backbone, inputs, EPOCHS[0])
    assert threads == {threading.get_ident()}


def test_a_prefix_has_no_dropout_while_the_body_trains() -> None:
    backbone = bert()
    module = shaken(attach("adapter", backbone, {**SETTINGS, "blocks": 1}, seed=1))
    expected = features(backbone, inputs_of(backbone), EPOCHS[0])
    blocks = blocks_of(backbone.core)
    backbone.body.train()
    blocks[0].eval()  # what is in evaluation mode stays there
    for layer in blocks[2].modules():
        if isinstance(layer, nn.Dropout):
            assert layer.p == 0.1
            layer.p = 0.0
    before = trace(backbone)
    inputs = inputs_of(backbone, prefix_of(backbone, module.depth))
    for _ in range(2):
        found = features(backbone, inputs, EPOCHS[0])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert trace(backbone) == before
    (plain, *_) = features(backbone, inputs_of(backbone), EPOCHS[0])
    assert (plain - expected[0]).abs().max() > 1e-2  # without a cache there is


def test_states_are_float32_whatever_the_precision() -> None:
    backbone = bert()
    prefix = prefix_of(backbone, 2)
    (batch,) = inputs_of(backbone).batches(rows([[2]]))
    with torch.autocast("cpu", torch.bfloat16):
        found = prefix.states(batch)
    assert torch.equal(found, prefix.states(batch))
    assert not found.requires_grad
    assert not found.is_inference()  # or they could not be used in training


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_body_is_left_without_a_trace(kind: str, body: str) -> None:
    backbone = BODIES[body]()
    module = attach(kind, backbone, {**SETTINGS, "blocks": 1}, seed=1)
    blocks = blocks_of(backbone.core)
    vars(blocks[1])["forward"] = own = blocks[1].forward  # somebody else has been here before
    before, state = trace(backbone), {name: value.clone() for name, value in backbone.body.state_dict().items()}
    prefix = prefix_of(backbone, module.depth)
    inputs = inputs_of(backbone, prefix)
    features(backbone, inputs, EPOCHS[0])
    assert trace(backbone) == before
    assert vars(blocks[1])["forward"] is own
    (batch,) = inputs.batches(rows([[0]]))
    assert isinstance(batch, Prefixed)
    with prefix.given(batch.states):
        assert trace(backbone) != before
    assert trace(backbone) == before

    def interrupt() -> None:
        with prefix.given(batch.states):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert trace(backbone) == before
    with pytest.raises(TypeError):  # a batch that the body cannot read
        prefix.states((batch[0],) * 7)
    assert trace(backbone) == before
    after = backbone.body.state_dict()
    assert all(torch.equal(after[name], value) for name, value in state.items())


class Block(nn.Module):
    """A block that takes its states by name, or returns more than them."""

    def __init__(self, returning: str) -> None:
        super().__init__()
        self.query, self.value, self.returning = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), returning

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Any:
        states = states + self.value(torch.tanh(self.query(states)))
        return {"one": (states,), "none": (states, None), "more": (states, states)}.get(self.returning, states)


class Stack(nn.Module):
    def __init__(self, returning: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(returning) for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        states = images.reshape(len(images), -1, WIDTH) / 100
        for block in self.blocks:
            if self.blocks[0].returning == "named":
                states = block(states=states, mask=None)
            else:
                output = block(states)
                assert not isinstance(output, tuple) or len(output) == (1 if block.returning == "one" else 2)
                states = output[0] if isinstance(output, tuple) else output
        return states.mean(dim=1)


def stacked(returning: str) -> Backbone:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        network = Stack(returning).eval().requires_grad_(False)
    return Backbone("stack", "image", WIDTH, network, network, ImageTransform(8), "stack")


@pytest.mark.parametrize("returning", ["states", "named", "one", "none"])
def test_blocks_may_return_tuples_and_take_their_states_by_name(returning: str) -> None:
    backbone = stacked(returning)
    module = shaken(attach("lora", backbone, {**SETTINGS, "blocks": 1}, seed=1))
    expected = features(backbone, inputs_of(backbone), EPOCHS[0])
    inputs = inputs_of(backbone, prefix_of(backbone, module.depth))
    for _ in range(2):
        for one, other in zip(features(backbone, inputs, EPOCHS[0]), expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_blocks_that_hand_on_more_than_states_cannot_be_skipped() -> None:
    backbone = stacked("more")
    module = attach("lora", backbone, {**SETTINGS, "blocks": 1}, seed=1)
    before = trace(backbone)
    with pytest.raises(HeadstartError, match=r"^the blocks of stack hand on more than hidden states, so that none "):
        features(backbone, inputs_of(backbone, prefix_of(backbone, module.depth)), EPOCHS[0])
    assert trace(backbone) == before


def test_a_block_that_never_runs_is_named() -> None:
    backbone = stacked("states")
    prefix = Prefix(backbone, blocks_of(backbone.core)[:2], nn.Identity())
    with pytest.raises(HeadstartError, match=r"^stack never runs the block behind its first 2$"):
        prefix.states((torch.zeros(1, 8, 8, 3),))


def test_the_layer_behind_all_blocks_is_found() -> None:
    backbone = image_backbone()
    inputs = inputs_of(backbone, prefix_of(backbone, 3))
    expected = features(backbone, inputs_of(backbone), EPOCHS[0])
    with watched(inner(backbone)) as counts:
        for _ in range(2):
            for one, other in zip(features(backbone, inputs, EPOCHS[0]), expected, strict=True):
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert counts == [7, 7, 7]
    with pytest.raises(HeadstartError, match=r"^no layer of stack follows its blocks; set blocks to 1 or more$"):
        prefix_of(stacked("states"), 3)


# --------------------------------------------------------------------------------------------------------- the features


@pytest.mark.parametrize("body", BODIES)
def test_embedding_through_inputs_skips_the_prefix(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["headstart.backbones.extract"], "_BATCH", 3)
    backbone = BODIES[body]()
    examples = examples_of(backbone)
    module = attach("adapter", backbone, {**SETTINGS, "blocks": 2}, seed=1)
    inputs = Inputs(backbone, examples, "test", prefix_of(backbone, module.depth))
    for epoch in range(3):  # training goes on in between
        shaken(module)
        with watched(inner(backbone)) as counts:
            found = embed_rows(backbone, inputs, np.arange(len(examples)), "test")
        assert counts == [0 if epoch else 7, 7, 7]
        np.testing.assert_allclose(found, embed(backbone, examples, "test"), atol=1e-5, rtol=1e-5)
    assert np.array_equal(embed_rows(backbone, inputs, np.arange(len(examples)), "test"), found)


def test_embedding_through_inputs_refuses_what_is_not_finite() -> None:
    backbone = bert()
    module = attach("adapter", backbone, {**SETTINGS, "blocks": 1}, seed=1)
    module.parameters["0.up.bias"].data[3] = torch.inf
    with pytest.raises(HeadstartError, match=r"^bert gives NaN or infinity on birds test; check its weights"):
        embed_rows(backbone, inputs_of(backbone, prefix_of(backbone, module.depth)), np.arange(2), "birds test")


def test_the_real_minilm() -> None:
    backbone = load_backbone(Model(backbone="all-MiniLM-L6-v2"))
    backbone.body.requires_grad_(False)
    module = attach("lora", backbone, {"rank": 4, "alpha_lora": 8.0, "blocks": 2}, seed=1)
    for parameter in module.parameters.values():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
    assert module.depth == 4
    examples = examples_of(backbone)
    inputs = Inputs(backbone, examples, "train", prefix_of(backbone, module.depth))
    backbone.body.eval()
    expected = embed(backbone, examples, "train")
    for _ in range(2):
        np.testing.assert_allclose(embed_rows(backbone, inputs, np.arange(len(examples)), "train"), expected, atol=1e-5)
    assert np.abs(expected).max() > 0.1


# -------------------------------------------------------------------------------------------------------------- on disk


def test_states_are_in_a_file_without_a_name_that_goes_with_its_owner(tmp_path: Path) -> None:
    backbone = bert()
    inputs = inputs_of(backbone, prefix_of(backbone, 2))
    features(backbone, inputs, EPOCHS[0])
    number = inputs._states._file
    assert number is not None
    lengths = sum(len(text.split()) + 2 for text in TEXTS)  # nothing is padded
    assert os.fstat(number).st_size == lengths * WIDTH * 4 + len(TEXTS) * 28  # and a record's header
    assert list((tmp_path / "cache").iterdir()) == []
    del inputs
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_a_disk_that_takes_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, place: write(file, data[:7], place))
    file, rng = StateFile(), np.random.default_rng(1)
    states = {row: rng.normal(size=(length, 3)).astype(np.float32) for row, length in ((9, 4), (2, 1), (5, 6))}
    for row, each in states.items():
        assert row not in file
        file.write(row, each)
    for row, each in reversed(states.items()):
        assert row in file
        np.testing.assert_array_equal(file.read(row), each)


def test_a_full_disk_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: Any, place: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    file = StateFile()
    with pytest.raises(HeadstartError, match=r"^cannot write hidden states to .*: No space left on device; free space"):
        file.write(0, np.zeros((2, 3), np.float32))
    assert 0 not in file


STATES = {
    9: np.arange(12, dtype=np.float32).reshape(4, 3),
    2: np.ones((1, 3), np.float32),
    0: np.full((2, 3), 7.0, "f4"),
}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A file of three examples, whose process has ended."""
    file = StateFile(tmp_path / "new" / "states.bin")
    for row, each in STATES.items():
        file.write(row, each)
    return tmp_path / "new" / "states.bin"


def test_states_stay_for_the_next_process_and_for_their_owner_alone(kept: Path) -> None:
    assert kept.stat().st_mode & 0o777 == 0o600
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    file = StateFile(kept)
    assert 1 not in file
    for row, each in STATES.items():
        assert row in file
        np.testing.assert_array_equal(file.read(row), each)
    file.write(1, STATES[9])
    assert all(row in StateFile(kept) for row in (*STATES, 1))


# A record is three numbers of eight bytes, a checksum of four, and 4 · T · 3 bytes of states: 76, 40 and 52 in all.
@pytest.mark.parametrize(
    ("harm", "left"),
    {
        "cut within states": (lambda data: data[:-1], [9, 2]),
        "cut within a header": (lambda data: data[: 76 + 40 + 27], [9, 2]),
        "cut within the first": (lambda data: data[:30], []),
        "zeros, as a disk leaves them": (lambda data: data[:76] + bytes(92), [9]),
        "a flipped bit": (lambda data: data[:80] + bytes([data[80] ^ 1]) + data[81:], [9, 0]),
        "a flipped bit of states": (lambda data: data[:110] + bytes([data[110] ^ 1]) + data[111:], [9, 0]),
        "another file": (lambda data: b"something else entirely, and long enough", []),
    }.values(),
)
def test_what_a_crash_leaves_of_states_is_computed_again(
    kept: Path, harm: Callable[[bytes], bytes], left: list[int]
) -> None:
    kept.write_bytes(harm(kept.read_bytes()))
    file = StateFile(kept)
    found = [row for row in STATES if row in file]
    assert found == left
    for row in STATES.keys() - set(found):
        file.write(row, STATES[row])
    again = StateFile(kept)
    for row, each in STATES.items():
        assert row in again
        np.testing.assert_array_equal(again.read(row), each)
