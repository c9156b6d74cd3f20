"""`node.toml`: what a node lets leave its machine, whatever a server or a recipe asks. The server cannot change it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from headstart.config.recipe import Recipe
from headstart.config.stage import ClosedForm, ClosedFormStage, Rounds, Table
from headstart.errors import HeadstartError


class EpsilonLimits(Table):
    """The largest ε that all answers about the data set may spend together."""

    example: PositiveFloat | None = None
    client: PositiveFloat | None = None


class NodeLimits(Table):
    """The limits of a node."""

    methods: tuple[str, ...] | None = Field(default=None, strict=False)
    """Methods that may be run; unset: all."""
    recipes: tuple[str, ...] | None = Field(default=None, strict=False)
    """Recipes that may be run, by the first 16 or more digits of their digests; unset: all that the node is given."""
    min_examples: PositiveInt = 2
    """Of a class with fewer examples here, nothing is sent in a closed form that neither noise nor secure aggregation
    hides: the sum of a class of one example is that example."""
    evaluation: bool = True
    """Whether figures of tests on this node's data may leave it."""
    epsilon: EpsilonLimits = EpsilonLimits()
    """With a limit, stages that do not promise its unit are refused: their ε is infinite."""
    delta: float = Field(default=1e-4, gt=0, lt=1)
    """Where there is a limit on ε, the largest δ of all answers together: an ε says nothing without its δ."""
    trust_server: bool = False
    """Whether a limit on ε counts noise that the server promises to add, or refuses it."""
    other_participants: bool = False
    """Whether statistics of the data may be added up again with other participants: two such sums differ by single
    nodes."""

    @classmethod
    def load(cls, path: Path) -> NodeLimits:
        """Read node.toml; all mistakes at once."""
        try:
            return cls.model_validate(tomllib.loads(path.read_text(encoding="utf-8")).get("limits", {}))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise HeadstartError(f"{path}: {error}") from None
        except ValidationError as error:
            places = {".".join(map(str, item["loc"])): item["msg"] for item in error.errors()}
            problems = "; ".join(f"limits.{place}: {message}" for place, message in places.items())
            raise HeadstartError(f"{path}: {problems}; accepted: {', '.join(cls.model_fields)}") from None

    def check(self, recipe: Recipe, digest: str) -> None:
        """Refuse a recipe that the node's owner does not allow."""
        if self.recipes is not None and not any(len(one) >= 16 and digest.startswith(one) for one in self.recipes):
            raise HeadstartError(f"node.toml: limits.recipes does not name the recipe {digest[:16]}")
        methods = [stage.method for stage in recipe.stages]
        others = sorted({method for method in methods if self.methods is not None and method not in self.methods})
        if others:
            raise HeadstartError(f"node.toml: limits.methods does not allow {', '.join(others)}")

    def applied(self, recipe: Recipe) -> Recipe:
        """The recipe, with no class of fewer examples in any closed form than is allowed."""
        stages = [
            stage.model_copy(update={"min_examples": max(stage.min_examples, self.min_examples)})
            if isinstance(stage, ClosedFormStage)
            else stage
            for stage in recipe.stages
        ]
        return recipe.model_copy(update={"stages": tuple(stages)})

    def check_stage(self, stage: ClosedForm | Rounds) -> None:
        """Refuse a stage that promises nothing where there is a limit on ε, before any example is read for it."""
        if stage.privacy is None:
            self.check_spending(stage, None, [])

    def check_statistics(self, stage: ClosedForm | Rounds) -> None:
        """Refuse sums around centres that move: an example that changes its centre is the difference of two sums."""
        if stage.trains or stage.protected or self.min_examples == 1 or stage.rows_per_class == 1:
            return
        raise HeadstartError(
            f"node.toml: limits.min_examples is {self.min_examples}, and sums of {stage.method} with several centres "
            "can differ by single examples from one iteration to the next; set secure = true or privacy in the stage, "
            "or limits.min_examples = 1"
        )

    def check_spending(self, stage: ClosedForm | Rounds, spent: Any, before: Sequence[Any]) -> None:
        """Refuse an answer after which more than the largest ε or δ would be spent.

        spent: what the stage has promised once it is answered; before: the promises of all other stages.
        """
        promises, limited = [*before, spent], False
        for unit, most in (("example", self.epsilon.example), ("client", self.epsilon.client)):
            if most is None:
                continue
            limited, after = True, sum(self.cost(each, unit) for each in promises)
            if after > most * (1 + 1e-9):
                raise HeadstartError(
                    f"node.toml: limits.epsilon.{unit} is {most:g}; with {stage.method} the node would have spent "
                    f"{after:.3g}"
                )
        after = sum(float(each["delta"]) for each in promises if each)
        if limited and after > self.delta * (1 + 1e-9):
            raise HeadstartError(
                f"node.toml: limits.delta is {self.delta:g}; with {stage.method} the δ of all promises would be "
                f"{after:.3g}"
            )

    def cost(self, spent: Any, unit: str) -> float:
        """The ε of a promise for a unit: who hides a client hides each of its examples, at a price of its own, and not
        the other way round."""
        if not spent or (spent["noise"] == "server" and not self.trust_server):
            return float("inf")
        if spent["unit"] == unit:
            return float(spent["epsilon"])
        return float(spent.get("example_epsilon", "inf")) if spent["unit"] == "client" else float("inf")
