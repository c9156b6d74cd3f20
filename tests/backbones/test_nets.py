"""The convolutional bodies against the published architectures and torchvision's state-dict names."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from headstart.backbones import load_backbone
from headstart.backbones.nets import FourConv, MobileNetV2, ResNet18, SmallMobileNet, SqueezeNet11
from headstart.config.recipe import Model
from headstart.errors import HeadstartError

Body = SqueezeNet11 | ResNet18 | MobileNetV2
BODIES: list[type[Body]] = [SqueezeNet11, ResNet18, MobileNetV2]

NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


@pytest.fixture(scope="module")
def bodies() -> dict[type[Body], Body]:
    """One body of each kind in eval mode, which no test may change."""
    torch.manual_seed(0)
    return {body: body().eval() for body in BODIES}


def conv_and_norm(conv: str, norm: str) -> set[str]:
    """Names of a convolution without bias and of the batch norm that follows it."""
    return {f"{conv}.weight"} | {f"{norm}.{name}" for name in NORM}


def squeezenet_names() -> set[str]:
    convs = {"features.0"}
    for fire in (3, 4, 6, 7, 9, 10, 11, 12):
        convs |= {f"features.{fire}.{part}" for part in ("squeeze", "expand1x1", "expand3x3")}
    return {f"{conv}.{name}" for conv in convs for name in ("weight", "bias")}


def resnet_names() -> set[str]:
    names = conv_and_norm("conv1", "bn1")
    for block in (f"layer{layer}.{index}" for layer in (1, 2, 3, 4) for index in (0, 1)):
        names |= conv_and_norm(f"{block}.conv1", f"{block}.bn1") | conv_and_norm(f"{block}.conv2", f"{block}.bn2")
    for layer in (2, 3, 4):
        names |= conv_and_norm(f"layer{layer}.0.downsample.0", f"layer{layer}.0.downsample.1")
    return names


def mobilenet_names() -> set[str]:
    names = conv_and_norm("features.0.0", "features.0.1") | conv_and_norm("features.18.0", "features.18.1")
    # The first block does not expand, so that its depthwise convolution comes first.
    names |= conv_and_norm("features.1.conv.0.0", "features.1.conv.0.1")
    names |= conv_and_norm("features.1.conv.1", "features.1.conv.2")
    for conv in (f"features.{block}.conv" for block in range(2, 18)):
        names |= conv_and_norm(f"{conv}.0.0", f"{conv}.0.1") | conv_and_norm(f"{conv}.1.0", f"{conv}.1.1")
        names |= conv_and_norm(f"{conv}.2", f"{conv}.3")
    return names


@pytest.mark.parametrize(
    ("body", "torchvision_total", "classifier"),
    [
        (SqueezeNet11, 1_235_496, (512 + 1) * 1000),
        (ResNet18, 11_689_512, (512 + 1) * 1000),
        (MobileNetV2, 3_504_872, (1280 + 1) * 1000),
    ],
)
def test_parameters_are_those_of_torchvision_less_the_classifier(
    bodies: dict[type[Body], Body], body: type[Body], torchvision_total: int, classifier: int
) -> None:
    assert sum(parameter.numel() for parameter in bodies[body].parameters()) == torchvision_total - classifier


@pytest.mark.parametrize(
    ("body", "names"),
    [(SqueezeNet11, squeezenet_names()), (ResNet18, resnet_names()), (MobileNetV2, mobilenet_names())],
)
def test_state_dict_has_exactly_the_names_of_torchvision(
    bodies: dict[type[Body], Body], body: type[Body], names: set[str]
) -> None:
    assert set(bodies[body].state_dict()) == names


@pytest.mark.parametrize(
    ("body", "name", "shape"),
    [
        (SqueezeNet11, "features.0.weight", (64, 3, 3, 3)),
        (SqueezeNet11, "features.3.squeeze.weight", (16, 64, 1, 1)),
        (SqueezeNet11, "features.6.expand3x3.weight", (128, 32, 3, 3)),
        (SqueezeNet11, "features.10.squeeze.bias", (48,)),
        (SqueezeNet11, "features.12.expand1x1.weight", (256, 64, 1, 1)),
        (ResNet18, "conv1.weight", (64, 3, 7, 7)),
        (ResNet18, "bn1.running_mean", (64,)),
        (ResNet18, "layer2.0.conv1.weight", (128, 64, 3, 3)),
        (ResNet18, "layer2.0.downsample.0.weight", (128, 64, 1, 1)),
        (ResNet18, "layer2.0.downsample.1.running_var", (128,)),
        (ResNet18, "layer4.1.conv2.weight", (512, 512, 3, 3)),
        (MobileNetV2, "features.0.0.weight", (32, 3, 3, 3)),
        (MobileNetV2, "features.1.conv.0.0.weight", (32, 1, 3, 3)),
        (MobileNetV2, "features.1.conv.1.weight", (16, 32, 1, 1)),
        (MobileNetV2, "features.2.conv.0.0.weight", (96, 16, 1, 1)),
        (MobileNetV2, "features.2.conv.3.bias", (24,)),
        (MobileNetV2, "features.14.conv.1.0.weight", (576, 1, 3, 3)),
        (MobileNetV2, "features.17.conv.2.weight", (320, 960, 1, 1)),
        (MobileNetV2, "features.18.0.weight", (1280, 320, 1, 1)),
        (MobileNetV2, "features.18.1.num_batches_tracked", ()),
    ],
)
def test_torchvision_shapes(
    bodies: dict[type[Body], Body], body: type[Body], name: str, shape: tuple[int, ...]
) -> None:
    assert bodies[body].state_dict()[name].shape == shape


@pytest.mark.parametrize(("body", "dim"), [(SqueezeNet11, 512), (ResNet18, 512), (MobileNetV2, 1280)])
@pytest.mark.parametrize("size", [(224, 224), (64, 64), (32, 32), (48, 80)])
def test_features_have_one_row_per_image(
    bodies: dict[type[Body], Body], body: type[Body], dim: int, size: tuple[int, int]
) -> None:
    with torch.inference_mode():
        features = bodies[body](torch.rand(2, 3, *size))
    assert body.dim == dim
    assert features.shape == (2, dim)
    assert features.isfinite().all()


@pytest.mark.parametrize(
    ("body", "size", "maps"),
    [
        # 227 is Caffe's crop. Its pools round up: 113, 56, 28, 14; rounding down would end at 13.
        (SqueezeNet11, 227, {"features.2": (64, 56), "features.5": (128, 28), "features.12": (512, 14)}),
        (SqueezeNet11, 224, {"features.2": (64, 55), "features.5": (128, 27), "features.12": (512, 13)}),
        # Table 1 of He et al.
        (
            ResNet18,
            224,
            {"conv1": (64, 112), "layer1": (64, 56), "layer2": (128, 28), "layer3": (256, 14), "layer4": (512, 7)},
        ),
        # Table 2 of Sandler et al., where each stage's input is the output of the one before.
        (
            MobileNetV2,
            224,
            {
                **{"features.0": (32, 112), "features.1": (16, 112), "features.3": (24, 56), "features.6": (32, 28)},
                **{"features.10": (64, 14), "features.13": (96, 14), "features.16": (160, 7), "features.17": (320, 7)},
                "features.18": (1280, 7),
            },
        ),
    ],
)
def test_published_feature_maps_and_their_mean(
    bodies: dict[type[Body], Body], body: type[Body], size: int, maps: dict[str, tuple[int, int]]
) -> None:
    net = bodies[body]
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> torch.utils.hooks.RemovableHandle:
        return net.get_submodule(name).register_forward_hook(
            lambda _module, _inputs, output: seen.update({name: output})
        )

    handles = [keep(name) for name in maps]
    with torch.inference_mode():
        features = net(torch.rand(1, 3, size, size))
    for handle in handles:
        handle.remove()

    assert {name: tuple(output.shape) for name, output in seen.items()} == {
        name: (1, channels, side, side) for name, (channels, side) in maps.items()
    }
    last = seen[list(maps)[-1]]
    torch.testing.assert_close(features, nn.functional.adaptive_avg_pool2d(last, 1).flatten(1))


def test_fire_module_stacks_1x1_before_3x3_and_rectifies() -> None:
    fire = SqueezeNet11().features[3]
    with torch.inference_mode():
        for parameter in fire.parameters():
            parameter.zero_()
        fire.get_parameter("squeeze.bias").fill_(1.0)  # sixteen squeezed maps of ones
        fire.get_parameter("expand1x1.weight").fill_(0.5)  # 16 * 0.5 = 8 everywhere
        fire.get_parameter("expand3x3.weight").fill_(1.0)  # 16 * 9 = 144 inside, 16 * 4 = 64 in a corner
        fire.get_parameter("expand3x3.bias")[-1] = -200.0  # 144 - 200 < 0
        output = fire(torch.rand(1, 64, 5, 5))
    assert output.shape == (1, 128, 5, 5)
    assert (output[:, :64] == 8).all()
    assert output[0, 64, 2, 2] == 144
    assert output[0, 64, 0, 0] == 64
    assert (output[:, 127] == 0).all()


def test_resnet_shortcuts_carry_the_input_when_the_branch_is_silent() -> None:
    net = ResNet18().eval()
    x = torch.randn(2, 64, 8, 8)
    with torch.inference_mode():
        for block in (net.layer1[0], net.layer2[0]):
            block.get_parameter("bn2.weight").zero_()
        torch.testing.assert_close(net.layer1[0](x), x.clamp(min=0), rtol=0, atol=0)
        projection = torch.einsum("oi,bihw->bohw", net.get_parameter("layer2.0.downsample.0.weight")[..., 0, 0], x)
        expected = projection[..., ::2, ::2].clamp(min=0) / math.sqrt(1 + 1e-5)
        torch.testing.assert_close(net.layer2[0](x), expected)


@pytest.mark.parametrize("layer", ["layer2", "layer3", "layer4"])
def test_resnet_block_strides_in_its_first_convolution(bodies: dict[type[Body], Body], layer: str) -> None:
    net = bodies[ResNet18]
    strides = {conv: net.get_submodule(f"{layer}.0.{conv}").stride for conv in ("conv1", "conv2", "downsample.0")}
    assert strides == {"conv1": (2, 2), "conv2": (1, 1), "downsample.0": (2, 2)}


def test_mobilenet_adds_its_input_only_in_repeated_blocks() -> None:
    net = MobileNetV2().eval()
    residual = []
    with torch.inference_mode():
        for index in range(1, 18):
            block = net.features[index]
            convs = [module for module in block.modules() if isinstance(module, nn.Conv2d)]
            norm = [module for module in block.modules() if isinstance(module, nn.BatchNorm2d)][-1]
            norm.weight.zero_()  # the branch becomes 0, so that only a shortcut can answer
            x = torch.randn(1, convs[0].in_channels, 4, 4)
            output = block(x)
            if output.any():
                torch.testing.assert_close(output, x, rtol=0, atol=0)  # linear bottleneck: negative values survive
                residual.append(index)
    assert residual == [3, 5, 6, 8, 9, 10, 12, 13, 15, 16]


@pytest.mark.parametrize(
    ("body", "signed"),
    [
        (SqueezeNet11, {"features.0"}),
        (ResNet18, {"conv1"}),
        # Bottlenecks are linear: what reads one, reads negative values.
        (MobileNetV2, {"features.0.0", *(f"features.{block}.conv.0.0" for block in range(2, 18)), "features.18.0"}),
    ],
)
def test_all_other_convolutions_read_rectified_maps(
    bodies: dict[type[Body], Body], body: type[Body], signed: set[str]
) -> None:
    net = bodies[body]
    negative = set()

    def note(name: str, maps: torch.Tensor) -> None:
        if maps.min() < 0:
            negative.add(name)

    handles = [
        module.register_forward_pre_hook(lambda _module, inputs, name=name: note(name, inputs[0]))
        for name, module in net.named_modules()
        if isinstance(module, nn.Conv2d)
    ]
    with torch.inference_mode():
        features = net(torch.randn(2, 3, 64, 64))
    for handle in handles:
        handle.remove()
    assert negative == signed
    assert features.min() >= 0


@pytest.mark.parametrize("body", [ResNet18, MobileNetV2])
def test_batch_norm_has_the_settings_of_torchvision(bodies: dict[type[Body], Body], body: type[Body]) -> None:
    norms = [module for module in bodies[body].modules() if isinstance(module, nn.BatchNorm2d)]
    assert {(norm.eps, norm.momentum) for norm in norms} == {(1e-5, 0.1)}


def test_mobilenet_activations_stop_at_six(bodies: dict[type[Body], Body]) -> None:
    with torch.inference_mode():
        output = bodies[MobileNetV2].get_submodule("features.0")(100 * torch.randn(1, 3, 16, 16))
    assert output.min() == 0
    assert output.max() == 6


@pytest.mark.parametrize("body", BODIES)
def test_eval_features_do_not_depend_on_the_rest_of_the_batch(body: type[Body]) -> None:
    torch.manual_seed(1)
    net = body()
    images = torch.randn(6, 3, 64, 64)
    with torch.inference_mode():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0  # the next pass sets the running statistics to those of its batch
        net.train()(3 * images + 1)
        net.eval()
        before = {name: value.clone() for name, value in net.state_dict().items()}
        together = net(images)
        alone = torch.cat([net(image[None]) for image in images])
        among_others = net(torch.cat([100 * torch.randn(3, 3, 64, 64), images.flip(0)]))[3:].flip(0)
    scale = together.abs().max().item()
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-5 * scale)
    torch.testing.assert_close(among_others, together, rtol=1e-4, atol=1e-5 * scale)
    assert (together[0] - together[1]).abs().max() > 1e-2 * scale  # the features do tell images apart
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize(
    ("body", "name", "deviation"),
    [
        # He uniform by fan-in has standard deviation sqrt(2 / fan_in); He normal by fan-out sqrt(2 / fan_out).
        (SqueezeNet11, "features.12.expand3x3.weight", math.sqrt(2 / (64 * 9))),
        (ResNet18, "layer3.0.conv1.weight", math.sqrt(2 / (256 * 9))),
        (MobileNetV2, "features.18.0.weight", math.sqrt(2 / 1280)),
    ],
)
def test_random_initialisation_is_that_of_torchvision(
    bodies: dict[type[Body], Body], body: type[Body], name: str, deviation: float
) -> None:
    state = bodies[body].state_dict()
    assert state[name].std().item() == pytest.approx(deviation, rel=0.02)
    if body is SqueezeNet11:
        assert state[name].abs().max() <= math.sqrt(3) * deviation  # uniform: bounded by sqrt(6 / fan_in)
    else:
        assert state[name].abs().max() > 3 * deviation  # normal: has tails
    assert not any(value.any() for key, value in state.items() if key.endswith((".bias", ".running_mean")))


@pytest.mark.parametrize(
    ("body", "parameters", "dim"),
    [
        (SmallMobileNet, 3_206_976, 1024),  # as the FedBABU code counts it
        (FourConv, 3 * 64 * 9 + 64 + 3 * (64 * 64 * 9 + 64) + 4 * 128, 256),
    ],
)
def test_bodies_for_small_images(body: Any, parameters: int, dim: int) -> None:
    network = body()
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    assert not list(network.buffers())  # no running statistics
    images = torch.randn(4, 3, 32, 32)
    network.eval()
    assert network(images).shape == (4, dim)
    # Every batch is normalised by its own statistics, in evaluation too.
    assert not torch.allclose(network(images)[:2], network(images[:2]), atol=1e-3)


@pytest.mark.parametrize("name", ["mobilenet-cifar", "conv4"])
def test_small_bodies_by_name(name: str) -> None:
    backbone = load_backbone(Model(backbone=name, weights="random"))
    assert backbone.transform.size == 32
    images = torch.rand(3, 32, 32, 3) * 255
    assert backbone.body(images).shape == (3, backbone.dim)
    with pytest.raises(HeadstartError, match="comes without weights"):
        load_backbone(Model(backbone=name))
