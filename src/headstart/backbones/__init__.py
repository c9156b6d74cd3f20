"""f(x): load a pre-trained body, cut its head off, extract features, cache them."""

from headstart.backbones.backbone import Backbone, run_body
from headstart.backbones.extract import embed, extract
from headstart.backbones.inputs import Inputs
from headstart.backbones.registry import BACKBONES, load_backbone

__all__ = ["BACKBONES", "Backbone", "Inputs", "embed", "extract", "load_backbone", "run_body"]
