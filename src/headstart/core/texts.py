"""How close a completion is to the one in the data."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

# Of a regular expression: Chinese characters, hiragana and katakana.
_SINGLE = (
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)


def exact_match(completion: str, reference: str) -> bool:
    """Whether two texts are the same but for white space."""
    return completion.split() == reference.split()


def rouge_l(completion: str, reference: str) -> float:
    """ROUGE-L (Lin, 2004) between 0 and 1: F1 of the longest common subsequence of words, in lower case.

    Chinese and Japanese characters are words of their own; texts that match exactly score 1, without a word too.
    """
    if exact_match(completion, reference):
        return 1.0
    words, meant = _words(completion), _words(reference)
    common = _longest_common(words, meant)
    return 2 * common / (len(words) + len(meant)) if common else 0.0


def _words(text: str) -> list[str]:
    """Runs of letters, digits, underscores and the marks on them; one character each in Chinese and Japanese."""
    marked = re.sub(r"[^\w\s]", lambda found: found[0] if _is_mark(found[0]) else " ", text.lower())
    return re.findall(rf"[{_SINGLE}][^\w\s]*|(?![{_SINGLE}])\w[^\s{_SINGLE}]*", marked)


def _is_mark(character: str) -> bool:
    """Whether it is a vowel sign or an accent on the character before, and not a choice of how an emoji looks."""
    return unicodedata.category(character) in ("Mn", "Mc") and not "\ufe00" <= character <= "\ufe0f"


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
