"""Small trainable modules on a frozen transformer: LoRA, adapters, prompts. Attached and detached without a trace."""

from headstart.modules.attach import Attached, attach, plain_parameters, plain_state

__all__ = ["Attached", "attach", "plain_parameters", "plain_state"]
