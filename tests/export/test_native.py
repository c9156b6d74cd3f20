"""Vision models with a head of ours in the classifier that `transformers` has for them."""

from typing import Any

import pytest
import torch
import transformers

from headstart.export.modeling_headstart import Head, pooled
from headstart.export.native import native

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
AUTO = "AutoModelForImageClassification"
LABELS = {"id2label": {0: "cat", 1: "dog", 2: "owl"}, "label2id": {"cat": 0, "dog": 1, "owl": 2}}


@pytest.mark.parametrize(
    ("kind", "settings", "pooling"),
    [
        ("vit", {"image_size": 32, "patch_size": 8, **TINY}, "cls"),
        ("dinov2", {"image_size": 32, "patch_size": 8, **TINY}, "cls"),
        ("resnet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}, "mean"),
        ("mobilenet_v2", {"image_size": 32, "depth_multiplier": 0.35}, "mean"),
    ],
)
def test_the_head_is_the_classifier(kind: str, settings: dict[str, Any], pooling: str) -> None:
    torch.manual_seed(0)
    core = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **settings)).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        features = pooled(core(pixel_values=images).last_hidden_state, pooling, None)
    head = Head(features.shape[1], 0, (), 3).requires_grad_(False)
    made = native(AUTO, core, core.state_dict(), head, pooling, LABELS)
    with torch.inference_mode():
        torch.testing.assert_close(made(pixel_values=images).logits, head(features), atol=1e-6, rtol=1e-5)
    assert made.config.id2label == LABELS["id2label"]


def test_other_heads_are_none_of_theirs() -> None:
    core = transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **TINY)).eval()
    for head in (
        Head(16, 4, (), 3),
        Head(16, 0, (4,), 3),
        Head(16, 0, (), 3, longest=1.0),
        Head(16, 0, (), 3, centres=2),
    ):
        assert native(AUTO, core, core.state_dict(), head, "cls", LABELS) is None
