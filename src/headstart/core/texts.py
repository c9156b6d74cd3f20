"""How close a completion is to the one in the data."""

from __future__ import annotations

import re
from collections.abc import Sequence


def exact_match(completion: str, reference: str) -> bool:
    """Whether two texts are the same but for white space."""
    return completion.split() == reference.split()


def rouge_l(completion: str, reference: str) -> float:
    """ROUGE-L (Lin, 2004) between 0 and 1: F1 of the longest common subsequence of words, in lower case."""
    words, meant = (re.findall(r"\w+", text.lower()) for text in (completion, reference))
    common = _longest_common(words, meant)
    return 2 * common / (len(words) + len(meant)) if common else 0.0


def _longest_common(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest common subsequence."""
    lengths = [0] * (len(other) + 1)
    for word in one:
        before = 0
        for place, each in enumerate(other, 1):
            above = lengths[place]
            lengths[place] = before + 1 if word == each else max(above, lengths[place - 1])
            before = above
    return lengths[-1]
