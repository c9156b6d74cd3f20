"""When a reply counts and when a round does: the same rules whichever engine plays the rounds."""

from __future__ import annotations

from headstart.config.stage import ClosedForm, Rounds
from headstart.errors import HeadstartError, MessageError


def check_on_time(stage: ClosedForm | Rounds, seconds: float) -> None:
    """Refuse a reply that came after the deadline of its round."""
    if stage.deadline is not None and seconds > stage.deadline:
        raise MessageError(f"late: it took {seconds:.1f} s, and the deadline is {stage.deadline:g} s")


def check_enough(stage: ClosedForm | Rounds, round: int, good: int, asked: int, last_refusal: str) -> None:
    """Stop at a round (from 1) with fewer usable replies than the stage asks for."""
    if good < min(stage.min_replies, asked):
        last = f"; the last refusal: {last_refusal}" if last_refusal else ""
        raise HeadstartError(
            f"{stage.method}, round {round}: {good} of {asked} clients gave a usable answer, "
            f"min_replies = {stage.min_replies}{last}"
        )
