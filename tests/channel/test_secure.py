"""Secure sums against plain integer sums, against masks recomputed here, and against every message they must refuse."""

import math
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.channel.fixed import exponents_of, fractional_bits, from_fixed, largest_exponents, to_fixed
from headstart.channel.secure import STEPS, Identity, SecureClient, SecureSum, client, server
from headstart.channel.secure.shamir import combine
from headstart.core.message import Message
from headstart.errors import HeadstartError, MessageError

Values = dict[str, np.ndarray]
SHAPES = {"sums": (3, 5), "count": (), "nothing": (0, 4), "bias": (7,)}
NUMBERS = (3, 11, 12, 40, 41)


@pytest.fixture
def agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """All five exchanges, as among more than 50 clients: survivors are agreed on even where nobody is missing."""
    for side in (client, server):
        monkeypatch.setattr(side, "LARGEST_CLIQUE", 0)


def drawn(number: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Values:
    rng = np.random.default_rng(number)
    return {name: np.asarray(rng.normal(scale=100.0, size=shape)) for name, shape in shapes.items()}


def plain(values: list[Values], clients: int, everybody: list[Values] | None = None) -> Values:
    """The sum in Python's own integers, of `round` (half to even, as np.rint) of exact products.

    everybody: those whose exponents count, who sent keys.
    """
    total = {}
    for name, first in values[0].items():
        largest = max(float(np.abs(value[name]).max(initial=0.0)) for value in everybody or values)
        exponent = -1072 if not largest else 16 * math.ceil(math.frexp(largest)[1] / 16)
        scale = Fraction(2) ** (63 - clients.bit_length() - exponent)
        columns = zip(*[value[name].ravel().tolist() for value in values], strict=True)
        exact = [float(sum(round(Fraction(x) * scale) for x in column) / scale) for column in columns]
        total[name] = np.array(exact).reshape(first.shape)
    return total


def member(number: int, clients: int, threshold: int, values: Values | None = None, session: str = "s") -> SecureClient:
    """A client with the keys of a simulation."""
    identity = Identity.derived(session.encode(), number)
    return SecureClient(session, clients, threshold, identity, {"x": np.zeros(())} if values is None else values)


class Federation:
    """A server and its clients, driven exchange by exchange, every message and state through bytes."""

    def __init__(
        self,
        numbers: tuple[int, ...],
        threshold: int,
        shapes: Any = SHAPES,
        session: str = "s",
        values: dict[int, Values] | None = None,
        integers: Collection[str] = (),
    ) -> None:
        self.shapes = shapes
        self.server = SecureSum(session, numbers, threshold, shapes, integers)
        self.session, self.numbers = session, numbers
        self.values = values or {n: drawn(n, shapes) for n in numbers}
        self.states = {
            n: member(n, len(numbers), threshold, self.values[n], session).to_message().to_bytes() for n in numbers
        }

    def client(self, number: int) -> SecureClient:
        identity = Identity.derived(self.session.encode(), number)
        return SecureClient.from_message(Message.from_bytes(self.states[number]), identity)

    def answer(self, number: int, instruction: Message | None = None) -> Message:
        step = self.server.step
        instruction = Message.from_bytes((instruction or self.server.instructions()[number]).to_bytes())
        client = self.client(number)
        if step == "keys":
            answer = client.keys()
        elif step == "shares":
            answer = client.share(instruction)
        elif step == "masked":
            answer = client.mask(instruction)
        elif step == "agree":
            answer = client.agree(instruction)
        else:
            answer = client.reveal(instruction)
        self.states[number] = client.to_message().to_bytes()
        return Message.from_bytes(answer.to_bytes())

    def exchange(self, silent: Collection[int] = ()) -> dict[int, Message]:
        told, waiting = self.server.instructions(), self.server.waiting
        answers = {number: self.answer(number, told[number]) for number in waiting if number not in silent}
        for number, message in answers.items():
            self.server.receive(number, message)
        self.server.next()
        return answers

    def until(self, step: str | None) -> "Federation":
        while self.server.step != step:
            self.exchange()
        return self

    def expected(self) -> Values:
        listed = [self.values[number] for number in self.numbers if self.server.dropped().get(number) != "keys"]
        return plain([self.values[number] for number in self.server.survivors], len(self.numbers), listed)


def same(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].shape == b[n].shape and a[n].dtype == b[n].dtype == np.float64 and np.array_equal(a[n], b[n]) for n in a
    )


def altered(message: Message, **changes: Any) -> Message:
    """A copy with arrays (or, where they are no arrays, scalars) replaced; None removes."""
    arrays, scalars = dict(message.arrays), dict(message.scalars)
    for name, value in changes.items():
        table: dict[str, Any] = arrays if name in arrays or isinstance(value, np.ndarray) else scalars
        table[name] = value
        if value is None:
            del table[name]
    return Message(arrays, scalars)


def flipped(array: np.ndarray, index: tuple[int, ...]) -> np.ndarray:
    array = array.copy()
    array[index] ^= 1
    return array


# The sum


def test_total_is_exactly_the_sum_of_the_fixed_point_integers() -> None:
    federation = Federation(NUMBERS, 4).until(None)
    assert same(federation.server.total(), federation.expected())
    assert federation.server.survivors == NUMBERS
    assert federation.server.dropped() == {}
    assert min(array.min() for array in federation.values[3].values() if array.size) < 0


def test_total_worked_out_by_hand() -> None:
    values = [np.array([0.25, 0.75, -1.5]), np.array([0.3, 2.0, 1.0]), np.array([0.0, 0.0, -4.0])]
    values = [np.ldexp(value, 60) for value in values]
    server = SecureSum(b"\x00\xff", [0, 1, 2], 3, {"x": (3,)})
    identities = [Identity.derived(b"\x00\xff", number) for number in range(3)]
    clients = [SecureClient(b"\x00\xff", 3, 3, one, {"x": x}) for one, x in zip(identities, values, strict=True)]
    for n in range(3):
        server.receive(n, clients[n].keys())
    server.next()
    for n, told in server.instructions().items():
        server.receive(n, clients[n].mask(told))
    server.next()
    # 4 · 2**60 is 2**62, whose exponent of 63 goes up to 64: 63 - 2 - 64 = -3 places, so steps of 8.
    steps = [sum(round(Fraction(float(value[i])) / 8) for value in values) for i in range(3)]
    np.testing.assert_array_equal(server.total()["x"], [8.0 * step for step in steps])
    np.testing.assert_array_equal(server.total()["x"][1:], np.ldexp([2.75, -4.5], 60))


@pytest.mark.usefixtures("agreement")
@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("step", STEPS)
def test_as_many_as_the_threshold_allows_may_drop_out_in_any_exchange(step: str, lost: int) -> None:
    numbers = (*NUMBERS, 50, 51)
    federation = Federation(numbers, 5)
    gone = set(numbers[1 : 1 + lost])
    federation.until(step).exchange(silent=gone)
    federation.until(None)
    server = federation.server
    assert server.dropped() == dict.fromkeys(gone, step)
    assert set(server.survivors) == (set(numbers) if step in ("agree", "reveal") else set(numbers) - gone)
    assert same(server.total(), federation.expected())


@pytest.mark.usefixtures("agreement")
@pytest.mark.parametrize("step", STEPS)
def test_one_dropout_too_many_is_said_and_the_exchange_stays_open(step: str) -> None:
    federation = Federation(NUMBERS, 4).until(step)
    with pytest.raises(HeadstartError, match=r"^3 of 5 clients are left, 4 are needed to open the sum$"):
        federation.exchange(silent=set(NUMBERS[3:]))
    assert federation.server.step == step
    with pytest.raises(HeadstartError, match="not open yet"):
        federation.server.total()
    federation.exchange(silent={41})
    federation.until(None)
    assert same(federation.server.total(), federation.expected())


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_pattern_of_dropouts(data: st.DataObject) -> None:
    count = data.draw(st.integers(3, 7))
    threshold = data.draw(st.integers(2 * count // 3 + 1, count))
    numbers = tuple(sorted(data.draw(st.sets(st.integers(0, 2**63 - 1), min_size=count, max_size=count))))
    fate = {n: data.draw(st.sampled_from([*STEPS, *["stays"] * 6])) for n in numbers}
    federation = Federation(numbers, threshold, {"b": (2,), "a": (1, 3)})
    server, left = federation.server, set(numbers)
    while (step := server.step) is not None:
        left = {n for n in left if fate[n] != step}
        if len(left) < threshold:
            with pytest.raises(HeadstartError, match=f"^{len(left)} of {count} clients are left, {threshold} are"):
                federation.exchange(silent=set(numbers) - left)
            return
        federation.exchange(silent=set(numbers) - left)
    lost = {"keys", "masked"} if threshold == count else {"keys", "shares", "masked"}
    assert server.survivors == tuple(n for n in numbers if fate[n] not in lost)
    silent = any(fate[n] == "masked" for n in numbers)
    lost |= set() if threshold == count else {"agree", "reveal"} if silent else {"reveal"}
    assert server.dropped() == {n: step for n, step in fate.items() if step in lost}
    assert same(server.total(), federation.expected())


def test_opening_needs_only_threshold_answers_and_gives_the_same_every_time() -> None:
    federation = Federation(NUMBERS, 4).until("reveal")
    federation.exchange(silent={3})
    first = federation.server.total()
    first["bias"][:] = 0
    assert same(federation.server.total(), federation.expected())


@pytest.mark.usefixtures("agreement")
def test_objects_kept_in_memory_give_what_states_in_bytes_give() -> None:
    server = SecureSum("s", NUMBERS, 4, SHAPES)
    clients = {n: member(n, 5, 4, drawn(n)) for n in NUMBERS}
    for n in NUMBERS:
        server.receive(n, clients[n].keys())
    server.next()
    for n, told in server.instructions().items():
        server.receive(n, clients[n].share(told))
    server.next()
    for n, told in server.instructions().items():
        server.receive(n, clients[n].mask(told))
    server.next()
    for n, told in server.instructions().items():
        server.receive(n, clients[n].agree(told))
    server.next()
    for n, told in server.instructions().items():
        server.receive(n, clients[n].reveal(told))
    server.next()
    assert server.step is None
    assert server.instructions() == {}
    assert server.waiting == ()
    assert same(server.total(), Federation(NUMBERS, 4).until(None).server.total())


def test_one_state_gives_one_masked_answer() -> None:
    federation = Federation(NUMBERS, 4).until("masked")
    told = federation.server.instructions()[11]
    first, second = (federation.client(11).mask(told) for _ in range(2))
    assert first.to_bytes() == second.to_bytes()


@pytest.mark.usefixtures("agreement")
def test_what_a_client_sends_and_gets_is_as_large_as_said() -> None:
    count = 12
    federation = Federation(tuple(range(count)), 9, {"x": (100,)})
    up = down = 0
    for _ in STEPS:
        told = federation.server.instructions()[0]
        answer = federation.exchange()[0]
        down += sum(array.nbytes for array in told.arrays.values())
        up += sum(array.nbytes for array in answer.arrays.values())
    others = count - 1
    # Beside what grows with the others: keys, an exponent, three signatures, a check value, the own share; the client's
    # own row in the lists.
    assert up == 800 + 64 + 4 + 192 + 112 * others + 32 + 20
    assert down == (140 + 92 + 80 + 72) * others + 140 + 8 + 8 + 72


# The masks


def stream(key: bytes, length: int) -> np.ndarray:
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * length)), dtype=np.uint64)


def hkdf(secret: bytes, info: bytes) -> bytes:
    return HKDF(SHA256(), 32, b"s", b"headstart secure sum 3 " + info).derive(secret)


def pair_mask(state: Message, mine: int, other: int, length: int) -> np.ndarray:
    """What `mine` adds for `other`, from the state of `mine` before it masks."""
    numbers = state.arrays["group"].tolist()
    public = {n: state.arrays["mask_keys"][numbers.index(n)].tobytes() for n in (mine, other)}
    secret = X25519PrivateKey.from_private_bytes(state.arrays["mask_secret"].tobytes())
    agreed = secret.exchange(X25519PublicKey.from_public_bytes(public[other]))
    low, high = sorted((mine, other))
    info = (
        b"mask"
        + state.arrays["list_digest"].tobytes()
        + struct.pack("<q", low)
        + public[low]
        + struct.pack("<q", high)
        + public[high]
    )
    mask = stream(hkdf(agreed, info), length)
    return mask if mine == low else np.uint64(0) - mask


def self_mask(state: Message, mine: int, length: int) -> np.ndarray:
    return stream(hkdf(state.arrays["seed"].tobytes(), b"self" + struct.pack("<q", mine)), length)


def flat(message: Message) -> np.ndarray:
    names = [name for name in sorted(message.arrays) if name.startswith("value.")]
    return np.concatenate([message.arrays[name].ravel() for name in names]).view(np.uint64)


def chi_square(values: np.ndarray) -> float:
    """Of the bytes against a uniform law: mean 255, standard deviation 22.6."""
    counts = np.bincount(np.frombuffer(values.tobytes(), np.uint8), minlength=256)
    expected = counts.sum() / 256
    return float(((counts - expected) ** 2 / expected).sum())


UNIFORM = 400.0  # more than six standard deviations above the mean
LARGE = {"w": (19, 1000), "b": (30,), "s": ()}  # more than two blocks of the key stream
SIZE = 19031


def test_masks_are_the_ones_recomputed_here() -> None:
    federation = Federation((2, 5, 9, 14), 3, LARGE).until("masked")
    states = {n: Message.from_bytes(data) for n, data in federation.states.items()}
    for number, others in {2: (5, 9, 14), 5: (2, 9, 14), 9: (2, 5, 14), 14: (2, 5, 9)}.items():
        masked = flat(federation.answer(number))
        for other in others:
            masked = masked - pair_mask(states[number], number, other, SIZE)
        masked = masked - self_mask(states[number], number, SIZE)
        places = dict.fromkeys(("b", "s", "w"), 63 - 3 - 16)  # values of hundreds, four clients
        wanted = [np.rint(federation.values[number][name].ravel() * 2.0 ** places[name]) for name in places]
        np.testing.assert_array_equal(masked.view(np.int64), np.concatenate(wanted))
    np.testing.assert_array_equal(
        pair_mask(states[2], 2, 5, SIZE) + pair_mask(states[5], 5, 2, SIZE), np.zeros(SIZE, np.uint64)
    )


def test_masked_values_look_uniform_and_differ_between_sums_of_the_same_input() -> None:
    first, second = (Federation((2, 5, 9, 14), 3, LARGE).until("masked").exchange() for _ in range(2))
    for number in (2, 5, 9, 14):
        a, b = flat(first[number]), flat(second[number])
        assert (a != b).all()
        assert chi_square(a) < UNIFORM
        assert chi_square(a - b) < UNIFORM
    assert chi_square(drawn(2, LARGE)["w"]) > UNIFORM


def test_neither_the_self_mask_nor_the_pair_masks_alone_uncover_values() -> None:
    federation = Federation((2, 5, 9, 14), 3, LARGE).until("masked")
    state = Message.from_bytes(federation.states[5])
    masked = flat(federation.answer(5)) - pair_mask(state, 5, 14, SIZE)
    own, low, high = self_mask(state, 5, SIZE), pair_mask(state, 5, 2, SIZE), pair_mask(state, 5, 9, SIZE)
    # Client 14 is on the server's side. After `reveal` of a sum with client 5 it knows `own`; with client 2 on its side
    # also `low`. Had client 5 been reported missing it would know `low` and `high`.
    for known in (own, own + low, low, low + high, high):
        assert chi_square(masked - known) < UNIFORM
    assert chi_square(masked - own - low - high) > UNIFORM


def test_fewer_shares_than_the_threshold_do_not_give_the_seed() -> None:
    federation = Federation(NUMBERS, 4).until("masked")
    seed = Message.from_bytes(federation.states[12]).arrays["seed"].tobytes()
    federation.exchange()
    states = [Message.from_bytes(federation.states[number]) for number in NUMBERS]
    shares = np.stack([state.arrays["secrets"][2, :20] for state in states])[None]
    assert combine(np.array([[2, 3, 4, 5]]), shares[:, 1:5], 16) == [seed]
    assert combine(np.array([[1, 3, 4, 5]]), shares[:, [0, 2, 3, 4]], 16) == [seed]
    assert combine(np.array([[2, 3, 4]]), shares[:, 1:4], 16) != [seed]


def test_the_server_sees_parts_only_encrypted_and_secrets_leave_the_state_when_used() -> None:
    federation = Federation(NUMBERS, 4).until("shares")
    fresh = Message.from_bytes(federation.states[11])
    federation.exchange()
    shared = Message.from_bytes(federation.states[11])
    told = federation.server.instructions()[3].to_bytes()
    federation.exchange()
    opened = Message.from_bytes(federation.states[3]).arrays["secrets"]
    assert all(row.tobytes()[:20] not in told and row.tobytes()[20:] not in told for row in opened)
    kept = federation.states[11]
    for secret in (fresh.arrays["mask_secret"], fresh.arrays["share_secret"], shared.arrays["seed"]):
        assert secret.tobytes() not in kept


# Values


def test_exponents_are_those_of_the_largest_values_rounded_up_to_sixteen() -> None:
    values = {
        "one": np.array([0.25, -1.0]),  # 1 is 0.5 · 2**1
        "below": np.array(-0.99),  # below 2**0
        "large": np.array([3.0, 70000.0]),  # below 2**17
        "small": np.array([1e-10]),  # below 2**-33
        "none": np.zeros((0, 3)),
        "zero": np.zeros(4),
        "tiny": np.array(5e-324),
        "huge": np.array(1.7e308),
        "whole": np.array([3, 4]),
    }
    assert exponents_of(values) == {
        "one": 16, "below": 0, "large": 32, "small": -32, "none": -1072, "zero": -1072, "tiny": -1072, "huge": 1024
    }  # fmt: skip
    assert largest_exponents([{"a": 16, "b": -32}, {"a": 0, "b": 0}, {}]) == {"a": 16, "b": 0}


@settings(max_examples=200, deadline=None)
@given(st.floats(-1e300, 1e300), st.integers(3, 10**6))
def test_as_many_binary_places_as_fit_for_all_clients(value: float, clients: int) -> None:
    values = {"x": np.array([value, -value])}
    exponents = exponents_of(values)
    fixed = to_fixed(values, exponents, clients)["x"].tolist()
    assert fixed[0] * clients < 2**63
    assert fixed[1] * clients >= -(2**63)
    bits = fractional_bits(exponents["x"], clients)
    assert clients * Fraction(2) ** (exponents["x"] + bits + 2) > 2**63  # two places more could overflow
    found = from_fixed({"x": np.array(fixed)}, exponents, clients)["x"]
    # Sixteen bits to the next exponent, and those that count the clients, are what is lost of 63.
    near = abs(value) * 2.0 ** (-63 + 16 + clients.bit_length()) + 5e-324
    assert abs(found[0] - value) <= near or value == 0


def test_the_largest_values_of_all_clients_do_not_overflow() -> None:
    largest = math.nextafter(2.0**16, 0)
    for count in (3, 4, 7, 8):
        values = {n: {"x": np.array([largest, -largest])} for n in range(count)}
        federation = Federation(tuple(range(count)), count, {"x": (2,)}, values=values).until(None)
        assert same(federation.server.total(), federation.expected())
        assert federation.server.total()["x"][0] == pytest.approx(count * largest)


def test_values_of_any_size_keep_their_digits() -> None:
    """A Gram matrix of features around 1e-5 would be nothing in 24 binary places."""
    for scale in (1e-300, 1e-10, 1.0, 1e25):
        values = {n: {"x": scale * np.random.default_rng(n).normal(size=4)} for n in NUMBERS}
        federation = Federation(NUMBERS, 4, {"x": (4,)}, values=values).until(None)
        np.testing.assert_allclose(
            federation.server.total()["x"], sum(value["x"] for value in values.values()), rtol=1e-10
        )


def test_the_exponents_of_everybody_that_sent_keys_count() -> None:
    values = {n: {"x": np.array([1.0 if n else 1e30])} for n in range(5)}
    federation = Federation(tuple(range(5)), 4, {"x": (1,)}, values=values)
    federation.until("masked").exchange(silent={0})
    assert federation.until(None).server.total()["x"] == 0  # client 0 left, and its scale stayed
    assert same(federation.server.total(), federation.expected())


def test_whole_numbers_are_added_as_they_are() -> None:
    big = 2**61 + 1
    values: Any = {n: {"n": np.array([big - n, -n]), "x": np.array(0.5)} for n in range(3)}
    federation = Federation((0, 1, 2), 3, {"n": (2,), "x": ()}, values=values, integers=["n"])
    answers = federation.exchange()
    assert all(answer.arrays["exponents"].tolist() == [0] for answer in answers.values())
    total = federation.until(None).server.total()
    assert total["n"].dtype == np.int64
    assert total["n"].tolist() == [3 * big - 3, -3]
    assert total["x"] == 1.5


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"x": np.array([1.0, np.nan])}, "array 'x' holds NaN or infinity"),
        ({"x": np.array(-np.inf)}, "array 'x' holds NaN or infinity"),
        ({"x": np.ones(2, np.float32)}, "array 'x' is float32"),
        ({"x": np.array([0, -(2**62)])}, "array 'x' holds 4611686018427387904, which 3 clients cannot add"),
        ({}, "at least one array"),
    ],
)
def test_values_that_cannot_be_summed_are_refused(values: Values, sentence: str) -> None:
    with pytest.raises(HeadstartError, match=sentence):
        member(0, 3, 3, values)


def test_fixed_point_is_rounded_once_each_way() -> None:
    # Exponent 64 and three clients: 63 - 2 - 64 places, so steps of 8, and halves go to the even.
    assert to_fixed({"x": np.array([4.0, 12.0, -20.0, 6.0])}, {"x": 64}, 3)["x"].tolist() == [0, 2, -2, 1]
    found = from_fixed({"x": np.array([2**53 + 3, -1, 0])}, {"x": 0}, 3)["x"]
    assert found.tolist() == [(2**53 + 4) / 2**61, -(2.0**-61), 0.0]
    with pytest.raises(HeadstartError, match=r"array 'x' holds values of 2\*\*0 or more"):
        to_fixed({"x": np.array([1.0])}, {"x": 0}, 3)


# Settings


@pytest.mark.parametrize(
    ("clients", "threshold", "sentence"),
    [
        (3, 2, r"from 3 \(more than two thirds\) to 3, not 2"),
        (5, 3, r"from 4 \(more than two thirds\) to 5, not 3"),
        (6, 4, r"from 5 \(more than two thirds\) to 6, not 4"),
        (5, 6, "not 6"),
        (2, 2, "at least 3 clients"),
    ],
)
def test_settings_are_refused(clients: int, threshold: int, sentence: str) -> None:
    with pytest.raises(HeadstartError, match=sentence):
        member(0, clients, threshold)
    with pytest.raises(HeadstartError, match=sentence):
        SecureSum("s", range(clients), threshold, {"x": ()})


def test_names_of_sums_and_clients_are_refused() -> None:
    with pytest.raises(HeadstartError, match="session name"):
        member(0, 3, 3, session="")
    identity = Identity.derived(b"s", 0)
    for number in (-1, 2**63, True, "1", 1.0):
        with pytest.raises(HeadstartError, match="whole number"):
            SecureClient("s", 3, 3, replace(identity, number=number), {"x": np.zeros(())})  # type: ignore[arg-type]
        with pytest.raises(HeadstartError, match="whole number"):
            SecureSum("s", [0, 5, number], 3, {"x": ()})
    with pytest.raises(HeadstartError, match="different"):
        SecureSum("s", [0, 1, 1], 3, {"x": ()})
    with pytest.raises(HeadstartError, match="at least one array"):
        SecureSum("s", [0, 1, 2], 3, {})


def test_a_state_that_is_none_is_refused() -> None:
    client, identity = member(0, 3, 3).to_message(), Identity.derived(b"s", 0)
    shared = Message.from_bytes(Federation((0, 1, 2, 3), 3).until("masked").states[0])
    for bad in (
        Message(),
        altered(client, step="other"),
        altered(client, number="x"),
        altered(client, session="zz"),
        altered(client, mask_secret=None),
        altered(client, mask_secret=np.zeros(31, np.uint8)),
        altered(shared, seed=None),
        altered(shared, group=np.array([0, 1])),
    ):
        with pytest.raises(MessageError):
            SecureClient.from_message(bad, identity)
    with pytest.raises(HeadstartError, match="threshold"):
        SecureClient.from_message(altered(client, threshold=1), identity)
    with pytest.raises(MessageError, match="of client 0, not of client 1"):
        SecureClient.from_message(client, Identity.derived(b"s", 1))


# What the server refuses

LOW_ORDER = np.zeros(32, np.uint8)
ANY_STEP: list[tuple[Callable[[Message], Message], str]] = [
    (lambda m: altered(m, session=b"other".hex()), "another session"),
    (lambda m: altered(m, session=None), "another session"),
    (lambda m: altered(m, step="total"), "'total'"),
    (lambda m: altered(m, sender=12), "from client 12, not 11"),
    (lambda m: altered(m, sender=None), "from client None, not 11"),
    (lambda m: altered(m, extra=np.zeros(1)), r"\['extra'\] do not belong"),
    (lambda m: altered(m, **{sorted(m.arrays)[0]: None}), "missing"),
    (lambda m: Message({}, m.scalars), "missing"),
]
SERVER_REFUSES: list[tuple[str, Callable[[Message], Message], str]] = [
    *((step, change, sentence) for step in STEPS for change, sentence in ANY_STEP),
    ("keys", lambda m: altered(m, mask_key=m.arrays["mask_key"][:31]), r"\[31\], not \[32\]"),
    ("keys", lambda m: altered(m, share_key=m.arrays["share_key"].astype(np.int64)), "int64, not uint8"),
    ("keys", lambda m: altered(m, share_key=LOW_ORDER), "'share_key' is not a usable"),
    ("keys", lambda m: altered(m, mask_key=LOW_ORDER), "'mask_key' is not a usable"),
    ("keys", lambda m: altered(m, mask_key=m.arrays["share_key"]), "'mask_key' is a public key that was sent before"),
    ("keys", lambda m: altered(m, exponents=m.arrays["exponents"][1:]), "shape"),
    ("keys", lambda m: altered(m, exponents=m.arrays["exponents"] + np.int32(1)), "multiples of 16"),
    ("keys", lambda m: altered(m, exponents=m.arrays["exponents"] * 0 + np.int32(1040)), "multiples of 16"),
    ("keys", lambda m: altered(m, signature=m.arrays["signature"][1:]), "shape"),
    ("agree", lambda m: altered(m, signature=m.arrays["signature"][1:]), "shape"),
    ("shares", lambda m: altered(m, parts=m.arrays["parts"][:-1]), "shape"),
    ("shares", lambda m: altered(m, parts=m.arrays["parts"][:, :-1]), "shape"),
    ("shares", lambda m: altered(m, parts=m.arrays["parts"].astype(np.float64)), "float64, not uint8"),
    ("shares", lambda m: altered(m, check=m.arrays["check"][:5]), "shape"),
    ("shares", lambda m: altered(m, recipients=np.array([3, 12, 40, 42])), "not the client's neighbours"),
    ("shares", lambda m: altered(m, recipients=np.array([3, 11, 12, 40])), "not the client's neighbours"),
    ("shares", lambda m: altered(m, recipients=np.array([12, 3, 40, 41])), "rising"),
    ("shares", lambda m: altered(m, recipients=np.array([-3, 12, 40, 41])), "rising"),
    ("masked", lambda m: altered(m, **{"value.sums": m.arrays["value.sums"].T}), r"\[5, 3\], not \[3, 5\]"),
    ("masked", lambda m: altered(m, **{"value.sums": m.arrays["value.sums"].astype(np.float64)}), "float64, not int64"),
    ("masked", lambda m: altered(m, **{"value.count": m.arrays["value.count"].reshape(1)}), "shape"),
    ("masked", lambda m: altered(m, signature=m.arrays["signature"][1:]), "shape"),
    ("reveal", lambda m: altered(m, seed_shares=m.arrays["seed_shares"][1:]), "shape"),
    ("reveal", lambda m: altered(m, key_shares=np.zeros((1, 36), np.uint8)), "shape"),
    ("reveal", lambda m: altered(m, seed_shares=m.arrays["seed_shares"].astype(np.int32)), "int32, not uint8"),
]


@pytest.mark.usefixtures("agreement")
@pytest.mark.parametrize(("step", "change", "sentence"), SERVER_REFUSES)
def test_the_server_refuses_malformed_answers_and_goes_on(
    step: str, change: Callable[[Message], Message], sentence: str
) -> None:
    federation = Federation(NUMBERS, 4).until(step)
    good = federation.answer(11)
    with pytest.raises(MessageError, match=sentence):
        federation.server.receive(11, change(good))
    assert federation.server.waiting == NUMBERS
    federation.server.receive(11, good)
    federation.until(None)
    assert same(federation.server.total(), federation.expected())


@pytest.mark.usefixtures("agreement")
@pytest.mark.parametrize("step", STEPS)
def test_the_server_refuses_strangers_duplicates_and_the_late(step: str) -> None:
    federation = Federation(NUMBERS, 4).until(step)
    server = federation.server
    answers = {number: federation.answer(number) for number in NUMBERS}
    with pytest.raises(MessageError, match="client 7 is not asked"):
        server.receive(7, answers[3])
    with pytest.raises(MessageError, match="from client 3, not 11"):
        server.receive(11, answers[3])
    for number in NUMBERS[:4]:
        server.receive(number, answers[number])
    with pytest.raises(MessageError, match=f"client 3 has answered the exchange '{step}' already"):
        server.receive(3, answers[3])
    server.next()
    with pytest.raises(MessageError, match=r"not asked|no exchange"):
        server.receive(41, answers[41])
    federation.until(None)
    assert same(server.total(), federation.expected())
    with pytest.raises(HeadstartError, match="no exchange"):
        server.next()


def test_the_server_refuses_the_keys_of_another_client() -> None:
    federation = Federation(NUMBERS, 4)
    stolen = federation.answer(3)
    federation.server.receive(3, stolen)
    with pytest.raises(MessageError, match="sent before"):
        federation.server.receive(11, altered(stolen, sender=11))


@pytest.mark.parametrize(
    ("step", "lost", "change", "sentence"),
    [
        ("reveal", set(), lambda m: {"seed_shares": flipped(m.arrays["seed_shares"], (2, 0))}, "client 12's seed"),
        ("reveal", {41}, lambda m: {"key_shares": flipped(m.arrays["key_shares"], (0, 31))}, "client 41's mask key"),
        ("shares", set(), lambda m: {"check": flipped(m.arrays["check"], (0,))}, "client 11's seed"),
    ],
)
def test_wrong_shares_are_found_out(step: str, lost: set[int], change: Any, sentence: str) -> None:
    federation = Federation(NUMBERS, 4)
    while federation.server.step is not None:
        if federation.server.step == step:
            good = federation.answer(11)
            federation.server.receive(11, altered(good, **change(good)))
        federation.exchange(silent=lost if federation.server.step == "masked" else set())
    with pytest.raises(MessageError, match=sentence):
        federation.server.total()


# What a client refuses

CLIENT_ANY_STEP: list[tuple[Callable[[Message], Message], str]] = [
    (lambda m: altered(m, session=b"other".hex()), "another session"),
    (lambda m: altered(m, step="keys"), "'keys'"),
    (lambda m: altered(m, extra=np.zeros(1)), "do not belong"),
    (lambda m: altered(m, **{sorted(m.arrays)[0]: None}), "missing"),
]
CLIENT_REFUSES: list[tuple[str, Callable[[Message], Message], str]] = [
    *((step, change, sentence) for step in STEPS[1:] for change, sentence in CLIENT_ANY_STEP),
    ("shares", lambda m: cut(m, [0, 2, 3, 4]), "client 11 is not among"),
    ("shares", lambda m: cut(m, [0, 1]), "2 clients are listed .* between 4 and 5"),
    ("shares", lambda m: cut(m, [0, 1, 2, 3, 3]), "rising"),
    ("shares", lambda m: altered(m, mask_keys=m.arrays["mask_keys"][:4]), "shape"),
    ("shares", lambda m: altered(m, mask_keys=m.arrays["mask_keys"][[0, 0, 2, 3, 4]]), "the same"),
    ("shares", lambda m: altered(m, mask_keys=m.arrays["share_keys"]), "the same"),
    ("shares", lambda m: altered(m, mask_keys=m.arrays["mask_keys"][[1, 0, 2, 3, 4]]), "are not its own"),
    ("shares", lambda m: altered(m, share_keys=m.arrays["share_keys"][[1, 0, 2, 3, 4]]), "are not its own"),
    (
        "shares",
        lambda m: altered(m, share_keys=with_row(m.arrays["share_keys"], 3, 0)),
        "client 40 are not signed",
    ),
    ("masked", lambda m: altered(m, sharers=np.array([3, 11, 12, 40, 42])), r"clients \[42\]"),
    ("masked", lambda m: altered(m, sharers=np.array([3, 12, 40, 41])), "client 11 has sent parts and is not among"),
    ("masked", lambda m: altered(m, sharers=np.array([12, 3, 11, 40, 41])), "rising"),
    ("masked", lambda m: altered(m, sharers=np.array([3, 11]), parts=m.arrays["parts"][:1]), "2 clients .* 4 are"),
    ("masked", lambda m: altered(m, sharers=np.array([3, 11, 12, 40])), "shape"),
    ("masked", lambda m: altered(m, parts=m.arrays["parts"][:3]), "shape"),
    ("masked", lambda m: altered(m, parts=flipped(m.arrays["parts"], (0, 0))), "part from client 3 "),
    ("masked", lambda m: altered(m, parts=flipped(m.arrays["parts"], (2, 40))), "part from client 40 "),
    ("masked", lambda m: altered(m, parts=flipped(m.arrays["parts"], (3, 75))), "part from client 41 "),
    ("masked", lambda m: altered(m, parts=m.arrays["parts"][[0, 1, 3, 2]]), "part from client 40 "),
    ("shares", lambda m: altered(m, exponents=m.arrays["exponents"][:, 1:]), "shape"),
    ("shares", lambda m: altered(m, exponents=m.arrays["exponents"] + np.int32(8)), "multiples of 16"),
    ("shares", lambda m: altered(m, exponents=m.arrays["exponents"] + np.int32(16)), "client 3 are not signed by it"),
    ("agree", lambda m: altered(m, survivors=np.array([3, 12, 40, 41])), "has sent its values"),
    ("agree", lambda m: altered(m, survivors=np.array([3, 11])), "2 clients .* 4 are needed"),
    ("agree", lambda m: altered(m, survivors=np.array([3, 11, 12, 40, 42])), r"clients \[42\] .* sent no parts"),
    ("agree", lambda m: altered(m, survivors=np.array([11, 11, 12, 40])), "rising"),
    ("agree", lambda m: altered(m, signatures=m.arrays["signatures"][[1, 0, 2, 3]]), r"\[3, 12\] have not signed"),
    ("agree", lambda m: altered(m, signatures=m.arrays["signatures"][:3]), "shape"),
    (
        "agree",
        lambda m: altered(m, signers=m.arrays["signers"][:3], signatures=m.arrays["signatures"][:3]),
        r"clients \[41\] have not signed that the same clients have sent parts",
    ),
    ("reveal", lambda m: cut(m, [0, 1, 2]), "3 survivors have signed the list of survivors, 4 are needed"),
    ("reveal", lambda m: cut(m, [0, 1, 2, 2, 3]), "rising"),
    ("reveal", lambda m: altered(m, signatures=m.arrays["signatures"][[1, 0, 2, 3, 4]]), "3 survivors have signed"),
]


def cut(message: Message, rows: list[int]) -> Message:
    return Message({name: array[rows] for name, array in message.arrays.items()}, message.scalars)


def with_row(array: np.ndarray, row: int, value: int) -> np.ndarray:
    array = array.copy()
    array[row] = value
    return array


@pytest.mark.usefixtures("agreement")
@pytest.mark.parametrize(("step", "change", "sentence"), CLIENT_REFUSES)
def test_a_client_refuses_malformed_requests_and_goes_on(
    step: str, change: Callable[[Message], Message], sentence: str
) -> None:
    federation = Federation(NUMBERS, 4).until(step)
    before = federation.states[11]
    client = federation.client(11)
    request = change(federation.server.instructions()[11])
    with pytest.raises(MessageError, match=sentence):
        {
            "shares": lambda: client.share(request),
            "masked": lambda: client.mask(request),
            "agree": lambda: client.agree(request),
            "reveal": lambda: client.reveal(request),
        }[step]()
    assert client.to_message().to_bytes() == before
    federation.until(None)
    assert same(federation.server.total(), federation.expected())


@pytest.mark.usefixtures("agreement")
def test_a_client_signs_one_list_and_reveals_for_it_only() -> None:
    federation = Federation(NUMBERS, 4).until("agree")
    told = federation.server.instructions()[11]
    federation.answer(11)
    with pytest.raises(MessageError, match="next exchange is 'reveal'"):
        federation.client(11).agree(altered(told, survivors=np.array([3, 11, 12, 40])))
    federation = Federation(NUMBERS, 4).until("reveal")
    first = federation.answer(11)
    assert federation.answer(11).to_bytes() == first.to_bytes()
    assert first.arrays["seed_shares"].shape == (5, 20)
    assert first.arrays["key_shares"].shape == (0, 36)


@pytest.mark.usefixtures("agreement")
def test_a_signature_that_is_none_does_not_keep_the_sum_from_opening() -> None:
    federation = Federation(NUMBERS, 4).until("agree")
    good = federation.answer(11)
    federation.server.receive(11, altered(good, signature=flipped(good.arrays["signature"], (5,))))
    federation.until(None)
    assert same(federation.server.total(), federation.expected())


def test_a_client_answers_in_turn_and_once() -> None:
    federation = Federation(NUMBERS, 4).until("shares")
    told = federation.server.instructions()[11]
    client = federation.client(11)
    assert client.keys().to_bytes() == client.keys().to_bytes()
    with pytest.raises(MessageError, match="next exchange is 'shares'"):
        client.mask(told)
    client.share(told)
    for again in (client.keys, lambda: client.share(told), lambda: client.agree(told), lambda: client.reveal(told)):
        with pytest.raises(MessageError, match="next exchange is 'masked'; this request is out of turn"):
            again()
    federation.until("masked")
    told, client = federation.server.instructions()[11], federation.client(11)
    client.mask(told)
    with pytest.raises(MessageError, match="next exchange is 'agree'"):
        client.mask(told)


@pytest.mark.parametrize("setting", ["threshold", "clients"])
def test_clients_with_other_settings_do_not_accept_each_other(setting: str) -> None:
    federation = Federation(NUMBERS, 4)
    odd = Message.from_bytes(federation.states[12])
    federation.states[12] = altered(odd, step="masked", **{setting: 5 if setting == "threshold" else 4}).to_bytes()
    federation.until("shares")
    with pytest.raises(MessageError, match="the keys listed for client 12 are not signed by it for this sum"):
        federation.answer(11)


def test_parts_of_another_session_do_not_decrypt_under_the_name_of_this_one() -> None:
    federation = Federation(NUMBERS, 4, session="first")
    states = dict(federation.states)
    federation.until("masked")
    other = Federation(NUMBERS, 4, session="second")
    # The same secret keys in both sums, as if a node had been rolled back.
    second = b"second".hex()
    other.states = {n: altered(Message.from_bytes(s), session=second).to_bytes() for n, s in states.items()}
    other.until("masked")
    replayed = altered(federation.server.instructions()[11], session=second)
    with pytest.raises(MessageError, match="part from client 3 was not made for this client and sum"):
        other.answer(11, replayed)
    other.until(None)
    assert same(other.server.total(), other.expected())
