"""f(x): load a pre-trained body, cut its head off, extract features, cache them."""

from headstart.backbones.backbone import Backbone, moved, run_body, some, taken, unused
from headstart.backbones.extract import embed, embed_rows, extract
from headstart.backbones.inputs import Inputs
from headstart.backbones.language import rows_read
from headstart.backbones.prefix import Prefix, Prefixed, evaluating
from headstart.backbones.registry import (
    BACKBONES,
    hold_backbones,
    load_backbone,
    load_backbones,
    register_backbone,
)

__all__ = [
    "BACKBONES",
    "Backbone",
    "Inputs",
    "Prefix",
    "Prefixed",
    "embed",
    "embed_rows",
    "evaluating",
    "extract",
    "hold_backbones",
    "load_backbone",
    "load_backbones",
    "moved",
    "register_backbone",
    "rows_read",
    "run_body",
    "some",
    "taken",
    "unused",
]
