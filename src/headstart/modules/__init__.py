"""Small trainable modules on a frozen transformer: LoRA, adapters, prompts. Attached and detached without a trace."""

from headstart.modules.attach import Attached, attach, depth_of, plain_parameters, plain_state, prefix_of
from headstart.modules.local_model import LocalModel

__all__ = ["Attached", "LocalModel", "attach", "depth_of", "plain_parameters", "plain_state", "prefix_of"]
