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
        ("", "", 1.0),
        ("!", "!", 1.0),
        (" ...\n", "...", 1.0),
        ("!", "?", 0.0),
        ("!", "cat", 0.0),
        ("it's snake_case", "it's snake case", 2 * 2 / (3 + 4)),
        # By character: "你", "好" of four and of two.
        ("你好世界", "你好", 2 * 2 / (4 + 2)),
        # "猫", "が"; the second text has a word of Latin letters besides.
        ("猫が好き。", "catは猫が", 2 * 2 / (4 + 4)),
        # Hangul is written with spaces.
        ("나는 학교에", "나는 학교", 1 / 2),
        # Words that differ in their vowel signs alone: "की" and "का", beside "भाषा".
        ("की भाषा", "का भाषा", 1 / 2),
        ("हिन्दी भाषा", "हिन्दी", 2 * 1 / (2 + 1)),
        ("1\ufe0f\u20e3 I \u2764\ufe0f you", "1 I you \u2764\ufe0f", 1.0),
        # An accent that is a character of its own.
        ("cafe\u0301 au lait", "cafe au lait", 2 / 3),
    ],
)
def test_rouge_l(completion: str, reference: str, expected: float) -> None:
    assert rouge_l(completion, reference) == pytest.approx(expected)
    assert rouge_l(reference, completion) == pytest.approx(expected)


def test_exact_match_is_about_words_alone() -> None:
    assert exact_match(" the  cat\n", "the cat")
    assert not exact_match("The cat", "the cat")
    assert not exact_match("the cat sat", "the cat")
