"""Small trainable modules on a frozen transformer: LoRA, adapters, prompts. Attached and detached without a trace."""

from headstart.modules.attach import Attached, attach, plain_parameters, plain_state
from headstart.modules.local_model import LocalModel

__all__ = ["Attached", "LocalModel", "attach", "plain_parameters", "plain_state"]
