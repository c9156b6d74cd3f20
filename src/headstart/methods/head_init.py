"""The head that a stage starts from (`head_init`): that of an earlier stage, zeros, or random values."""

from __future__ import annotations

import numpy as np

from headstart.config.stage import Rounds
from headstart.core.params import Params, Shapes
from headstart.errors import HeadstartError
from headstart.methods.base import StageContext, Task


def head_shapes(stage: Rounds, task: Task, dim: int) -> Shapes:
    """Parameters of a head on features of ``dim``: a linear layer, behind two hidden layers where it is an MLP."""
    n_classes, width = task.n_classes, stage.hidden
    if stage.personalises and task.head is not None:  # whatever head there is
        return {f"head.{name}": array.shape for name, array in task.head.parameters().items()}
    if stage.head != "mlp":
        return {"head.weight": (n_classes, dim), "head.bias": (n_classes,)}
    return {
        "head.hidden.0.weight": (width, dim),
        "head.hidden.0.bias": (width,),
        "head.hidden.1.weight": (width, width),
        "head.hidden.1.bias": (width,),
        "head.weight": (n_classes, width),
        "head.bias": (n_classes,),
    }


def head_start(stage: Rounds, context: StageContext) -> Params:
    """The head of the context's task to start from: that of an earlier stage, zeros, or random values."""
    previous, shapes = context.task.head, head_shapes(stage, context.task, context.dim)
    if stage.head_init == "previous" and previous is not None:
        # A class that was masked because no client had sent it may be learned now; a client alone learns
        # those that it has.
        mask = -np.inf if stage.personalises else 0.0
        if previous.centres > 1:
            raise HeadstartError(
                f"stages.{context.seed[1]}.head_init: the earlier stage's head has {previous.centres} centres for each "
                "class, and training needs a linear one; set centres = 1 there, head_init to random, or start to "
                "another stage"
            )
        given = previous.parameters()
        arrays = Params({f"head.{n}": np.nan_to_num(a.astype(np.float64), neginf=mask) for n, a in given.items()})
        if arrays.shapes != shapes and not context.fixed_head:
            raise HeadstartError(
                f"stages.{context.seed[1]}.head_init: the earlier stage's head has other layers than this stage's; "
                "set head_init to random, or start to another stage"
            )
        return arrays
    if stage.head_init == "zeros":
        return Params.zeros(shapes)
    rng = np.random.default_rng([0x1417, *context.seed, context.number])
    # Torch's own initialisation of a linear layer.
    widths = {name: shapes[name.replace("bias", "weight")][1] for name in shapes}
    return Params({name: rng.uniform(-1, 1, shape) / np.sqrt(widths[name]) for name, shape in shapes.items()})
