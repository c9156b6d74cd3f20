"""The owner of a process's model: what it attaches it can take off, one by one or all; what it lends it gives back."""

import numpy as np
import pytest
import torch

from headstart.backbones import embed
from headstart.modules import LocalModel
from tests.methods.test_mezo import SENTENCES, bert_backbone

LORA = {"rank": 2, "alpha_lora": 4.0}


def features(model: LocalModel) -> np.ndarray:
    assert model.backbone is not None
    return embed(model.backbone, SENTENCES, "x")


def test_modules_come_off_in_the_reverse_order_and_leave_no_trace() -> None:
    model = LocalModel(bert_backbone(dropout=0.0))
    plain, names = features(model), list(model.state())
    lora = model.attach("lora", LORA, 0)
    model.write(lora.parameters, {name: torch.full_like(each, 0.3) for name, each in lora.parameters.items()})
    tuned = features(model)
    mask = model.attach("mask", {"density": 0.5}, 0)
    assert {name.partition(".")[0] for name in model.parameters()} == {"body", "module"}
    assert {f"module.{name}" for name in mask.parameters} <= model.parameters().keys()
    model.write(mask.parameters, {name: torch.ones_like(each) for name, each in mask.parameters.items()})
    assert np.abs(features(model) - tuned).max() > 1e-3
    model.detach(1)
    np.testing.assert_array_equal(features(model), tuned)
    assert np.abs(tuned - plain).max() > 1e-3
    model.attach("mask", {"density": 0.5}, 0)
    model.detach()
    assert model.modules == []
    assert list(model.state()) == names
    np.testing.assert_array_equal(features(model), plain)


def test_a_step_is_taken_in_place_and_a_substitute_leaves_the_parameter_alone() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    model, memory = LocalModel(), parameter.data
    model.subtract(parameter, torch.tensor([0.5, -1.0]), 2.0)
    assert parameter.tolist() == [0.0, 4.0]
    assert parameter.data_ptr() == memory.data_ptr()
    model.substitute(parameter, torch.tensor([7.0, 7.0]))
    assert parameter.tolist() == [7.0, 7.0]
    model.substitute(parameter, memory)
    assert parameter.tolist() == [0.0, 4.0]


def test_numbers_are_changed_in_place_and_in_their_order() -> None:
    straight, turned = (
        torch.nn.Parameter(torch.arange(6.0).view(2, 3)),
        torch.nn.Parameter(torch.arange(6.0).view(3, 2).T),
    )
    for parameter in (straight, turned):
        before, memory = parameter.detach().clone(), parameter.data_ptr()
        LocalModel().change(parameter, lambda values: values.add_(torch.arange(6.0)))
        assert torch.equal(parameter.detach(), before + torch.arange(6.0).view(2, 3))
        assert parameter.data_ptr() == memory


def test_only_the_named_parameters_have_gradients() -> None:
    model = LocalModel(bert_backbone(dropout=0.0))
    model.require_gradients(parameters := model.parameters(), ["body.embeddings.word_embeddings.weight"])
    wanted = [name for name, parameter in parameters.items() if parameter.requires_grad]
    assert wanted == ["body.embeddings.word_embeddings.weight"]


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_no_backbone_is_nothing_to_set(training: bool) -> None:
    model = LocalModel()
    model.set_mode(training, "batch")
    assert (model.parameters(), model.norms()) == ({}, {})
