"""Convolutional bodies whose parameters and buffers carry torchvision's names.

A torchvision checkpoint loads by name; only its classifier (`classifier.*` or `fc.*`) is left over. Every body maps
images [B, 3, H, W] to globally average-pooled features [B, dim] and has neither classifier nor dropout.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn


def _global_average(maps: Tensor) -> Tensor:
    """Mean over positions: [B, d, h, w] to [B, d]."""
    return maps.mean(dim=(2, 3))


def _init_fan_out(net: nn.Module) -> None:
    """He initialisation by fan-out; torch already starts batch norm at scale 1 and shift 0."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class _Fire(nn.Module):
    """Squeeze to few channels, expand by 1x1 and 3x3 side by side: [B, inputs, h, w] to [B, 2 * expand, h, w]."""

    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeeze, 1)
        self.expand1x1 = nn.Conv2d(squeeze, expand, 1)
        self.expand3x3 = nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.squeeze(x))
        return torch.relu(torch.cat([self.expand1x1(x), self.expand3x3(x)], dim=1))


class SqueezeNet11(nn.Module):
    """SqueezeNet 1.1 up to its last fire module: [B, 3, H, W] to [B, 512], H and W at least 17.

    Iandola et al., "SqueezeNet: AlexNet-level accuracy with 50x fewer parameters and <0.5MB model size", 2016
    (arXiv:1602.07360), in the authors' later version 1.1, which pools earlier and starts with 64 filters of 3x3.
    """

    dim: ClassVar[int] = 512

    def __init__(self) -> None:
        super().__init__()

        def pool() -> nn.Module:
            return nn.MaxPool2d(3, stride=2, ceil_mode=True)  # the original is a Caffe network, and Caffe rounds up

        self.features = nn.Sequential(
            *(nn.Conv2d(3, 64, 3, stride=2), nn.ReLU(), pool()),
            *(_Fire(64, 16, 64), _Fire(128, 16, 64), pool()),
            *(_Fire(128, 32, 128), _Fire(256, 32, 128), pool()),
            *(_Fire(256, 48, 192), _Fire(384, 48, 192), _Fire(384, 64, 256), _Fire(512, 64, 256)),
        )
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.kaiming_uniform_(parameter, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, 512] of the images x: [B, 3, H, W]."""
        return _global_average(self.features(x))


class _BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut: [B, inputs, h, w] to [B, outputs, ⌈h / stride⌉, ⌈w / stride⌉]."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(x)) + shortcut)


class ResNet18(nn.Module):
    """ResNet-18 up to its average pool: [B, 3, H, W] to [B, 512].

    He et al., "Deep Residual Learning for Image Recognition", CVPR 2016 (arXiv:1512.03385), with projection shortcuts
    where the shape changes (option B).
    """

    dim: ClassVar[int] = 512

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(_BasicBlock(64, 64, 1), _BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(_BasicBlock(64, 128, 2), _BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(_BasicBlock(128, 256, 2), _BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(_BasicBlock(256, 512, 2), _BasicBlock(512, 512, 1))
        _init_fan_out(self)

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, 512] of the images x: [B, 3, H, W]."""
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        return _global_average(self.layer4(self.layer3(self.layer2(self.layer1(x)))))


def _conv_bn_relu6(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6())


class _InvertedResidual(nn.Module):
    """Expand, filter per channel, project linearly: [B, inputs, h, w] to [B, outputs, ⌈h / stride⌉, ⌈w / stride⌉]."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.conv = nn.Sequential(
            *([_conv_bn_relu6(inputs, hidden, 1)] if expansion != 1 else []),
            _conv_bn_relu6(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.conv(x)
        return x + projected if self.residual else projected


class MobileNetV2(nn.Module):
    """MobileNetV2, width 1.0, up to its 1x1 convolution to 1280 channels: [B, 3, H, W] to [B, 1280].

    Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR 2018 (arXiv:1801.04381).
    """

    dim: ClassVar[int] = 1280

    def __init__(self) -> None:
        super().__init__()
        blocks: list[nn.Module] = [_conv_bn_relu6(3, 32, 3, stride=2), _InvertedResidual(32, 16, 1, expansion=1)]
        inputs = 16
        # Table 2 of the paper: channels c, repeats n, stride s of the first repeat. All these blocks expand six times.
        for channels, repeats, stride in ((24, 2, 2), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2), (320, 1, 1)):
            for repeat in range(repeats):
                blocks.append(_InvertedResidual(inputs, channels, stride if repeat == 0 else 1, expansion=6))
                inputs = channels
        self.features = nn.Sequential(*blocks, _conv_bn_relu6(inputs, self.dim, 1))
        _init_fan_out(self)

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, 1280] of the images x: [B, 3, H, W]."""
        return _global_average(self.features(x))


def _batch_norm(channels: int) -> nn.BatchNorm2d:
    """Batch norm that keeps no running statistics: every batch is normalised by its own, in evaluation too."""
    return nn.BatchNorm2d(channels, track_running_stats=False)


class SmallMobileNet(nn.Module):
    """MobileNet (version 1) for images of 32 pixels, as the FedBABU paper trains it: [B, 3, 32, 32] to [B, 1024].

    Howard et al., 2017 (arXiv:1704.04861), with a first stride of one, and batch norm without running statistics.
    """

    dim: ClassVar[int] = 1024

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1, bias=False), _batch_norm(32), nn.ReLU()]
        inputs = 32
        for outputs, stride in ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2),
                                (1024, 1)):  # fmt: skip
            layers += [nn.Conv2d(inputs, inputs, 3, stride, padding=1, groups=inputs, bias=False), _batch_norm(inputs)]
            layers += [nn.ReLU(), nn.Conv2d(inputs, outputs, 1, bias=False), _batch_norm(outputs), nn.ReLU()]
            inputs = outputs
        self.features = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, 1024] of the images x: [B, 3, H, W]."""
        return _global_average(self.features(x))


class FourConv(nn.Module):
    """Four convolutions with 64 filters, each halved by a pool, as in few-shot learning: [B, 3, 32, 32] to [B, 256].

    Batch norm keeps no running statistics (the FedBABU paper's small network).
    """

    dim: ClassVar[int] = 256

    def __init__(self) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Conv2d(inputs, 64, 3, padding=1), _batch_norm(64), nn.ReLU(), nn.MaxPool2d(2))
            for inputs in (3, 64, 64, 64)
        ]
        self.features = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2))  # which changes nothing at 32 pixels

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, 256] of the images x: [B, 3, H, W]."""
        return self.features(x).flatten(1)  # type: ignore[no-any-return]
