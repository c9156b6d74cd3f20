"""Exact match and ROUGE-L on values worked out by hand."""

import pytest

from headstart.core.texts import exact_match, rouge_l


@pytest.mark.parametrize(
    ("completion", "reference", "expected"),
    [
        ("the cat sat", "the cat sat", 1.0),
        # Lin (2004), section 3: of "police killed the gunman" 3 words in order, or 2 of them.
        ("police kill the gunman", "police killed the gunman", 3 / 4),
        ("the gunman kill police", "police killed the gunman", 2 / 4),
        # Common: "a c"; precision 2/3, recall 2/5: F1 = 2 · 2 / (3 + 5).
        ("a b c", "a x y z c", 0.5),
        ("The, CAT!", "the cat", 1.0),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("", "", 0.0),
    ],
)
def test_rouge_l(completion: str, reference: str, expected: float) -> None:
    assert rouge_l(completion, reference) == pytest.approx(expected)
    assert rouge_l(reference, completion) == pytest.approx(expected)


def test_exact_match_is_about_words_alone() -> None:
    assert exact_match(" the  cat\n", "the cat")
    assert not exact_match("The cat", "the cat")
    assert not exact_match("the cat sat", "the cat")
