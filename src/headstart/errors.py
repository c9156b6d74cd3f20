"""What goes wrong, said so that a user can act on it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path


class HeadstartError(ValueError):
    """A mistake in a recipe, in data or in arguments: the command line shows the sentence and exits with status 2."""


class RecipeError(HeadstartError):
    """Everything that is wrong with a recipe, all at once."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        heading = "the recipe has a problem" if len(problems) == 1 else f"the recipe has {len(problems)} problems"
        super().__init__(heading + ":\n" + "\n".join(f"  - {problem}" for problem in problems))


class MessageError(HeadstartError):
    """A message that cannot be what the protocol asked for; its sender is excluded from the round."""


def first_line(error: Exception) -> str:
    """What an error of another library says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nearest(word: str, accepted: Iterable[str]) -> str:
    """A clause such as ``did you mean 'dirichlet'? accepted: iid, dirichlet``."""
    known = [str(name) for name in accepted]
    close = difflib.get_close_matches(str(word), known, n=1, cutoff=0.6)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"{guess}accepted: {', '.join(known)}"


def listed(things: Iterable[object], most: int = 10) -> str:
    """``a, b and 3 more``."""
    names = [str(thing) for thing in things]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(number: int, thing: str) -> str:
    """``1 text is``, ``2 texts are``."""
    return f"{number:,} {thing}{' is' if number == 1 else 's are'}"


def nearest_path(path: str) -> str:
    """A clause that names what is there instead of a path that is not, or else the first folder that is missing."""
    given = place = Path(os.path.expanduser(path))
    while place.parent != place and not os.path.isdir(place.parent):
        place = place.parent
    what = f"folder {place}" if place != given else str(place)
    here = f"there is no {what}" if place != Path(path) else "it is not there"
    return here + similar_path(place)


def similar_path(place: Path) -> str:
    """A clause that names what lies beside a path that is not there, under the most similar name; or nothing."""
    there = os.listdir(place.parent) if os.path.isdir(place.parent) else []
    close = [] if os.path.exists(place) else difflib.get_close_matches(place.name, there, n=1)
    return f"; did you mean {str(place.parent / close[0])!r}?" if close else ""


def no_run(path: Path) -> HeadstartError:
    """That a folder holds no run, and which of its own folders do, or what is there under a similar name."""
    runs = sorted(file.parent.name for file in path.glob("*/recipe.toml"))
    near = f"; each of these in it does: {listed(runs, 3)}" if runs else similar_path(path)
    return HeadstartError(f"{path} holds no run: there is no recipe.toml{near}")
