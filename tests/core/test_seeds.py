"""Random numbers that hide something: what they are drawn from, and how they are spread."""

import hmac

import numpy as np
import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB
from scipy import stats

from headstart.core.seeds import Secret, SecureGenerator, Seed, extended, generator_of

KEY = bytes(range(32))


def test_a_secret_is_the_key_of_aes_in_counter_mode() -> None:
    """HKDF as in RFC 5869, and the counter block by block."""
    extracted = hmac.digest(bytes(32), KEY, "sha256")
    key = hmac.digest(extracted, b"headstart noise 3 0 222 7" + bytes([1]), "sha256")
    blocks = b"".join(counter.to_bytes(16) for counter in range(50))
    expected = Cipher(AES(key), ECB()).encryptor().update(blocks)
    generator = Secret(KEY, (3, 0)).generator(222, 7)
    words = np.concatenate([generator.words(30), generator.words(70)])
    np.testing.assert_array_equal(words, np.frombuffer(expected, "<u8"))


def test_every_purpose_and_every_secret_has_numbers_of_its_own() -> None:
    purposes = [(), (1,), (1, 2), (12,), (1, 2, 0)]
    secrets: list[Seed] = [Secret(KEY), Secret(bytes(32))]
    first = {generator_of(secret, *purpose).permutation(60).tobytes() for secret in secrets for purpose in purposes}
    assert len(first) == len(purposes) * len(secrets)
    again = generator_of(extended(secrets[0], 1), 2).standard_normal(5)
    np.testing.assert_array_equal(again, generator_of(secrets[0], 1, 2).standard_normal(5))


def test_a_seed_is_numpys_as_ever_and_none_is_nobodys() -> None:
    np.testing.assert_array_equal(
        generator_of((3, 1), 4).standard_normal(5), np.random.default_rng([3, 1, 4]).standard_normal(5)
    )
    assert extended((3,), 1) == (3, 1)
    assert extended(None, 1) is None
    assert (generator_of(None, 1).standard_normal(5) != generator_of(None, 1).standard_normal(5)).all()


def test_a_secret_does_not_show_itself() -> None:
    assert KEY.hex() not in repr(Secret(KEY))
    assert repr(KEY) not in repr(Secret(KEY))


def test_permutations_are_all_alike() -> None:
    generator = Secret(KEY).generator()
    orders = [tuple(generator.permutation(3).tolist()) for _ in range(6000)]
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 6
    assert stats.chisquare(counts).pvalue > 1e-4


def test_normal_numbers_of_a_secret_are_normal() -> None:
    drawn = Secret(KEY).generator().normal(np.full(20_000, 3.0), 2.0)
    assert stats.kstest(drawn, stats.norm(3, 2).cdf).pvalue > 1e-4
    assert SecureGenerator().normal(np.zeros((2, 3)), 1.0).shape == (2, 3)
