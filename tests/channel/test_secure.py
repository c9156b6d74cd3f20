"""Secure sums against plain integer sums, against masks recomputed here, and against every message they must refuse."""

import math
import struct
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.channel.fixed import from_fixed, to_fixed
from headstart.channel.secure import STEPS, SecureClient, SecureSum
from headstart.channel.secure.shamir import combine
from headstart.core.message import Message
from headstart.errors import HeadstartError, MessageError

Values = dict[str, np.ndarray]
SHAPES = {"sums": (3, 5), "count": (), "nothing": (0, 4), "bias": (7,)}
NUMBERS = (3, 11, 12, 40, 41)


def drawn(number: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Values:
    rng = np.random.default_rng(number)
    return {name: np.asarray(rng.normal(scale=100.0, size=shape)) for name, shape in shapes.items()}


def plain(values: list[Values], bits: int = 24) -> Values:
    """The sum in Python's own integers, of `round` (half to even, as np.rint) of exact products."""
    return {
        name: np.array(
            [math.ldexp(sum(round(float(x) * 2**bits) for x in column), -bits) for column in zip(*flat, strict=True)]
        ).reshape(values[0][name].shape)
        for name in values[0]
        for flat in [[value[name].ravel() for value in values]]
    }


class Federation:
    """A server and its clients, driven exchange by exchange, every message and state through bytes."""

    def __init__(self, numbers: tuple[int, ...], threshold: int, shapes: Any = SHAPES, session: str = "s") -> None:
        self.shapes = shapes
        self.server = SecureSum(session, numbers, threshold, shapes)
        self.states = {n: SecureClient(session, n, len(numbers), threshold).to_message().to_bytes() for n in numbers}
        self.values = {n: drawn(n, shapes) for n in numbers}

    def client(self, number: int) -> SecureClient:
        return SecureClient.from_message(Message.from_bytes(self.states[number]))

    def answer(self, number: int, instruction: Message | None = None) -> Message:
        step = self.server.step
        instruction = Message.from_bytes((instruction or self.server.instructions()[number]).to_bytes())
        client = self.client(number)
        if step == "keys":
            answer = client.keys()
        elif step == "shares":
            answer = client.share(instruction)
        elif step == "masked":
            answer = client.mask(instruction, self.values[number])
        else:
            answer = client.reveal(instruction)
        self.states[number] = client.to_message().to_bytes()
        return Message.from_bytes(answer.to_bytes())

    def exchange(self, silent: Collection[int] = ()) -> dict[int, Message]:
        answers = {number: self.answer(number) for number in self.server.waiting if number not in silent}
        for number, message in answers.items():
            self.server.receive(number, message)
        self.server.next()
        return answers

    def until(self, step: str | None) -> "Federation":
        while self.server.step != step:
            self.exchange()
        return self

    def expected(self) -> Values:
        return plain([self.values[number] for number in self.server.heard])


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
    assert federation.server.heard == NUMBERS
    assert federation.server.dropped() == {}
    assert min(array.min() for array in federation.values[3].values() if array.size) < 0


def test_total_worked_out_by_hand() -> None:
    server = SecureSum(b"\x00\xff", [0, 1, 2], 3, {"x": (3,)}, bits=1)
    clients = [SecureClient(b"\x00\xff", n, 3, 3, bits=1) for n in (0, 1, 2)]
    values = [np.array([0.25, 0.75, -1.5]), np.array([0.3, 2.0, 1.0]), np.array([0.0, 0.0, -4.0])]
    for step in STEPS:
        for n, told in server.instructions().items():
            answers: dict[str, Callable[[], Message]] = {
                "keys": clients[n].keys,
                "shares": lambda n=n, told=told: clients[n].share(told),
                "masked": lambda n=n, told=told: clients[n].mask(told, {"x": values[n]}),
                "reveal": lambda n=n, told=told: clients[n].reveal(told),
            }
            server.receive(n, answers[step]())
        server.next()
    # Halves: 0.25 is 0.5 halves, to the even 0; 0.75 is 1.5, to 2; 0.3 is 0.6, to 1.
    np.testing.assert_array_equal(server.total()["x"], [0.5, 3.0, -4.5])


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
    assert set(server.heard) == (set(numbers) if step == "reveal" else set(numbers) - gone)
    assert same(server.total(), federation.expected())


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
    for step in STEPS:
        left = {n for n in left if fate[n] != step}
        if len(left) < threshold:
            with pytest.raises(HeadstartError, match=f"^{len(left)} of {count} clients are left, {threshold} are"):
                federation.exchange(silent=set(numbers) - left)
            return
        federation.exchange(silent=set(numbers) - left)
    assert server.heard == tuple(n for n in numbers if fate[n] in ("reveal", "stays"))
    assert server.dropped() == {n: step for n, step in fate.items() if step != "stays"}
    assert same(server.total(), federation.expected())


def test_opening_needs_only_threshold_answers_and_gives_the_same_every_time() -> None:
    federation = Federation(NUMBERS, 4).until("reveal")
    federation.exchange(silent={3})
    first = federation.server.total()
    first["bias"][:] = 0
    assert same(federation.server.total(), federation.expected())


def test_objects_kept_in_memory_give_what_states_in_bytes_give() -> None:
    server = SecureSum("s", NUMBERS, 4, SHAPES)
    clients = {n: SecureClient("s", n, 5, 4) for n in NUMBERS}
    for n in NUMBERS:
        server.receive(n, clients[n].keys())
    server.next()
    for n, told in server.instructions().items():
        server.receive(n, clients[n].share(told))
    server.next()
    for n, told in server.instructions().items():
        server.receive(n, clients[n].mask(told, drawn(n)))
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
    first, second = (federation.client(11).mask(told, federation.values[11]) for _ in range(2))
    assert first.to_bytes() == second.to_bytes()


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
    # Beside what grows with the others: keys, a check value, the own share; own keys and numbers in the lists.
    assert up == 800 + 64 + 112 * others + 32 + 20
    assert down == 172 * others + 72 + 8


# The masks


def stream(key: bytes, length: int) -> np.ndarray:
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * length)), dtype=np.uint64)


def hkdf(secret: bytes, info: bytes) -> bytes:
    return HKDF(SHA256(), 32, b"s", b"headstart secure sum " + info).derive(secret)


def pair_mask(state: Message, mine: int, other: int, length: int) -> np.ndarray:
    """What `mine` adds for `other`, from the state of `mine` before it masks."""
    numbers = state.arrays["numbers"].tolist()
    public = {n: state.arrays["mask_keys"][numbers.index(n)].tobytes() for n in (mine, other)}
    secret = X25519PrivateKey.from_private_bytes(state.arrays["mask_secret"].tobytes())
    agreed = secret.exchange(X25519PublicKey.from_public_bytes(public[other]))
    low, high = sorted((mine, other))
    info = b"mask" + struct.pack("<q", low) + public[low] + struct.pack("<q", high) + public[high]
    mask = stream(hkdf(agreed, info), length)
    return mask if mine == low else np.uint64(0) - mask


def self_mask(state: Message, mine: int, length: int) -> np.ndarray:
    return stream(hkdf(state.arrays["seed"].tobytes(), b"self" + struct.pack("<q", mine)), length)


def flat(message: Message) -> np.ndarray:
    return np.concatenate([message.arrays[name].ravel() for name in sorted(message.arrays)]).view(np.uint64)


def chi_square(values: np.ndarray) -> float:
    """Of the bytes against a uniform law: mean 255, standard deviation 22.6."""
    counts = np.bincount(np.frombuffer(values.tobytes(), np.uint8), minlength=256)
    expected = counts.sum() / 256
    return float(((counts - expected) ** 2 / expected).sum())


UNIFORM = 400.0  # more than six standard deviations above the mean
LARGE = {"w": (19, 1000), "b": (30,), "s": ()}  # more than two blocks of the key stream
SIZE = 19031


def test_masks_are_the_ones_recomputed_here() -> None:
    federation = Federation((2, 5, 9), 3, LARGE).until("masked")
    states = {n: Message.from_bytes(data) for n, data in federation.states.items()}
    for number, others in {2: (5, 9), 5: (2, 9), 9: (2, 5)}.items():
        masked = flat(federation.answer(number))
        for other in others:
            masked = masked - pair_mask(states[number], number, other, SIZE)
        masked = masked - self_mask(states[number], number, SIZE)
        wanted = [np.rint(federation.values[number][name].ravel() * 2**24) for name in ("b", "s", "w")]
        np.testing.assert_array_equal(masked.view(np.int64), np.concatenate(wanted))
    np.testing.assert_array_equal(
        pair_mask(states[2], 2, 5, SIZE) + pair_mask(states[5], 5, 2, SIZE), np.zeros(SIZE, np.uint64)
    )


def test_masked_values_look_uniform_and_differ_between_sums_of_the_same_input() -> None:
    first, second = (Federation((2, 5, 9), 3, LARGE).until("masked").exchange() for _ in range(2))
    for number in (2, 5, 9):
        a, b = flat(first[number]), flat(second[number])
        assert (a != b).all()
        assert chi_square(a) < UNIFORM
        assert chi_square(a - b) < UNIFORM
    assert chi_square(drawn(2, LARGE)["w"]) > UNIFORM


def test_neither_the_self_mask_nor_the_pair_masks_alone_uncover_values() -> None:
    federation = Federation((2, 5, 9), 3, LARGE).until("masked")
    state = Message.from_bytes(federation.states[5])
    masked = flat(federation.answer(5))
    own, low, high = self_mask(state, 5, SIZE), pair_mask(state, 5, 2, SIZE), pair_mask(state, 5, 9, SIZE)
    # The server after `reveal` of a sum with client 5 knows `own`; with client 2 on its side also `low`. Had client 5
    # been reported missing it would know `low` and `high`.
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


def test_values_that_could_overflow_are_refused_with_the_largest_allowed() -> None:
    limit = 2.0**62 - 2**9  # the largest float64 not above (2**63 - 1) // 2
    assert to_fixed({"x": np.array(limit)}, 2, 0)["x"] == 2**62 - 2**9
    with pytest.raises(
        HeadstartError, match=r"'x' reaches 4.611686018427388e\+18 in size; with 2 clients and 0 fractional"
    ):
        to_fixed({"x": np.array([-(2.0**62)])}, 2, 0)
    allowed = ((2**63 - 1) // 5 // 2**8 * 2**8) / 2**24  # float64 is spaced by 2**8 there
    fixed = to_fixed({"y": np.array([allowed, -allowed])}, 5, 24)["y"]
    assert int(fixed[0]) * 5 < 2**63
    assert int(fixed[1]) * 5 >= -(2**63)
    with pytest.raises(HeadstartError, match=f"array 'y' .* largest value allowed is {allowed!r}"):
        to_fixed({"y": np.array(allowed * 1.0001)}, 5, 24)
    with pytest.raises(HeadstartError, match="array 'y'"):
        to_fixed({"y": np.array([1e308])}, 5, 24)


def test_the_largest_values_of_all_clients_do_not_overflow() -> None:
    federation = Federation((0, 1, 2), 3, {"x": (2,)})
    largest = math.nextafter(float((2**63 - 1) // 3), 0) / 2**24
    federation.values = {n: {"x": np.array([largest, -largest])} for n in (0, 1, 2)}
    federation.until(None)
    assert same(federation.server.total(), federation.expected())
    assert federation.server.total()["x"][0] == pytest.approx(3 * largest)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"x": np.array([1.0, np.nan])}, "array 'x' holds NaN or infinity"),
        ({"x": np.array(-np.inf)}, "array 'x' holds NaN or infinity"),
        ({"x": np.ones(2, np.float32)}, "array 'x' is float32"),
        ({"x": np.ones(2, np.int64)}, "array 'x' is int64"),
        ({}, "at least one array"),
    ],
)
def test_values_that_cannot_be_summed_are_refused_and_the_client_can_still_answer(
    values: Values, sentence: str
) -> None:
    federation = Federation((0, 1, 2), 3, {"x": (2,)}).until("masked")
    client, told = federation.client(0), federation.server.instructions()[0]
    before = client.to_message().to_bytes()
    with pytest.raises(HeadstartError, match=sentence):
        client.mask(told, values)
    assert client.to_message().to_bytes() == before
    federation.until(None)
    assert same(federation.server.total(), federation.expected())


def test_fixed_point_is_rounded_once_each_way() -> None:
    assert to_fixed({"x": np.array([0.5, 1.5, -2.5, 0.75])}, 2, 0)["x"].tolist() == [0, 2, -2, 1]
    assert from_fixed(np.array([2**53 + 3, -1, 0]), 52).tolist() == [(2**53 + 4) / 2**52, -(2.0**-52), 0.0]


# Settings


@pytest.mark.parametrize(
    ("clients", "threshold", "bits", "sentence"),
    [
        (3, 2, 24, r"from 3 \(more than two thirds\) to 3, not 2"),
        (5, 3, 24, r"from 4 \(more than two thirds\) to 5, not 3"),
        (6, 4, 24, r"from 5 \(more than two thirds\) to 6, not 4"),
        (5, 6, 24, "not 6"),
        (2, 2, 24, "at least 3 clients"),
        (4, 3, 53, "from 0 to 52, not 53"),
        (4, 3, -1, "from 0 to 52, not -1"),
    ],
)
def test_settings_are_refused(clients: int, threshold: int, bits: int, sentence: str) -> None:
    with pytest.raises(HeadstartError, match=sentence):
        SecureClient("s", 0, clients, threshold, bits)
    with pytest.raises(HeadstartError, match=sentence):
        SecureSum("s", range(clients), threshold, {"x": ()}, bits)


def test_names_of_sums_and_clients_are_refused() -> None:
    with pytest.raises(HeadstartError, match="session name"):
        SecureClient("", 0, 3, 3)
    for number in (-1, 2**63, True, "1", 1.0):
        with pytest.raises(HeadstartError, match="whole number"):
            SecureClient("s", number, 3, 3)
        with pytest.raises(HeadstartError, match="whole numbers"):
            SecureSum("s", [0, 5, number], 3, {"x": ()})
    with pytest.raises(HeadstartError, match="different"):
        SecureSum("s", [0, 1, 1], 3, {"x": ()})
    with pytest.raises(HeadstartError, match="at least one array"):
        SecureSum("s", [0, 1, 2], 3, {})


def test_a_state_that_is_none_is_refused() -> None:
    client = SecureClient("s", 0, 3, 3).to_message()
    shared = Message.from_bytes(Federation((0, 1, 2), 3).until("masked").states[0])
    for bad in (
        Message(),
        altered(client, step="other"),
        altered(client, number="x"),
        altered(client, session="zz"),
        altered(client, mask_secret=None),
        altered(client, mask_secret=np.zeros(31, np.uint8)),
        altered(shared, seed=None),
        altered(shared, numbers=np.array([0, 1])),
    ):
        with pytest.raises(MessageError):
            SecureClient.from_message(bad)
    with pytest.raises(HeadstartError, match="threshold"):
        SecureClient.from_message(altered(client, threshold=1))


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
    ("shares", lambda m: altered(m, parts=m.arrays["parts"][:-1]), "shape"),
    ("shares", lambda m: altered(m, parts=m.arrays["parts"][:, :-1]), "shape"),
    ("shares", lambda m: altered(m, parts=m.arrays["parts"].astype(np.float64)), "float64, not uint8"),
    ("shares", lambda m: altered(m, check=m.arrays["check"][:5]), "shape"),
    ("shares", lambda m: altered(m, recipients=np.array([3, 12, 40, 42])), "not all other clients"),
    ("shares", lambda m: altered(m, recipients=np.array([3, 11, 12, 40])), "not all other clients"),
    ("shares", lambda m: altered(m, recipients=np.array([12, 3, 40, 41])), "rising"),
    ("shares", lambda m: altered(m, recipients=np.array([-3, 12, 40, 41])), "rising"),
    ("masked", lambda m: altered(m, sums=m.arrays["sums"].T), r"\[5, 3\], not \[3, 5\]"),
    ("masked", lambda m: altered(m, sums=m.arrays["sums"].astype(np.float64)), "float64, not int64"),
    ("masked", lambda m: altered(m, count=m.arrays["count"].reshape(1)), "shape"),
    ("reveal", lambda m: altered(m, seed_shares=m.arrays["seed_shares"][1:]), "shape"),
    ("reveal", lambda m: altered(m, key_shares=np.zeros((1, 36), np.uint8)), "shape"),
    ("reveal", lambda m: altered(m, seed_shares=m.arrays["seed_shares"].astype(np.int32)), "int32, not uint8"),
]


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
    ("shares", lambda m: altered(m, share_keys=with_row(m.arrays["share_keys"], 3, 0)), "client 40 is not usable"),
    ("masked", lambda m: altered(m, senders=np.array([3, 12, 40, 42])), r"clients \[42\]"),
    ("masked", lambda m: altered(m, senders=np.array([3, 11, 12, 40])), r"clients \[11\]"),
    ("masked", lambda m: altered(m, senders=np.array([12, 3, 40, 41])), "rising"),
    ("masked", lambda m: altered(m, senders=np.array([3]), parts=m.arrays["parts"][:1]), "2 clients .* 4 are needed"),
    ("masked", lambda m: altered(m, parts=m.arrays["parts"][:3]), "shape"),
    ("masked", lambda m: altered(m, parts=flipped(m.arrays["parts"], (0, 0))), "part from client 3 "),
    ("masked", lambda m: altered(m, parts=flipped(m.arrays["parts"], (2, 40))), "part from client 40 "),
    ("masked", lambda m: altered(m, parts=flipped(m.arrays["parts"], (3, 75))), "part from client 41 "),
    ("masked", lambda m: altered(m, parts=m.arrays["parts"][[0, 1, 3, 2]]), "part from client 40 "),
    ("reveal", lambda m: lists(m, [3, 11, 12, 40, 41], [12]), r"both secrets of clients \[12\]"),
    ("reveal", lambda m: lists(m, [3, 11, 12], [40]), "not the clients that sent parts"),
    ("reveal", lambda m: lists(m, [3, 11, 12, 40], [41, 42]), "not the clients that sent parts"),
    ("reveal", lambda m: lists(m, [3, 12, 40, 41], [11]), "has sent its values"),
    ("reveal", lambda m: lists(m, [3, 11], [12, 40, 41]), "2 clients .* 4 are needed"),
    ("reveal", lambda m: lists(m, [11, 11, 12], [3, 40, 41]), "rising"),
]


def cut(message: Message, rows: list[int]) -> Message:
    return Message({name: array[rows] for name, array in message.arrays.items()}, message.scalars)


def with_row(array: np.ndarray, row: int, value: int) -> np.ndarray:
    array = array.copy()
    array[row] = value
    return array


def lists(message: Message, survivors: list[int], missing: list[int]) -> Message:
    return altered(message, survivors=np.array(survivors), missing=np.array(missing, dtype=np.int64))


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
            "masked": lambda: client.mask(request, federation.values[11]),
            "reveal": lambda: client.reveal(request),
        }[step]()
    assert client.to_message().to_bytes() == before
    federation.until(None)
    assert same(federation.server.total(), federation.expected())


def test_a_client_reveals_for_one_list_only_even_when_rebuilt() -> None:
    federation = Federation(NUMBERS, 4).until("reveal")
    told = federation.server.instructions()[11]
    first = federation.answer(11)
    assert federation.answer(11).to_bytes() == first.to_bytes()
    with pytest.raises(MessageError, match="another list of survivors"):
        federation.answer(11, lists(told, [3, 11, 12, 40], [41]))
    assert first.arrays["seed_shares"].shape == (5, 20)
    assert first.arrays["key_shares"].shape == (0, 36)


def test_a_client_answers_in_turn_and_once() -> None:
    federation = Federation(NUMBERS, 4).until("shares")
    told = federation.server.instructions()[11]
    client = federation.client(11)
    assert client.keys().to_bytes() == client.keys().to_bytes()
    with pytest.raises(MessageError, match="next exchange is 'shares'"):
        client.mask(told, federation.values[11])
    client.share(told)
    for again in (client.keys, lambda: client.share(told), lambda: client.reveal(told)):
        with pytest.raises(MessageError, match="next exchange is 'masked'; this request is out of turn"):
            again()
    federation.until("masked")
    told, client = federation.server.instructions()[11], federation.client(11)
    client.mask(told, federation.values[11])
    with pytest.raises(MessageError, match="next exchange is 'reveal'"):
        client.mask(told, federation.values[11])


@pytest.mark.parametrize("setting", ["threshold", "bits"])
def test_clients_with_other_settings_cannot_read_each_others_parts(setting: str) -> None:
    federation = Federation(NUMBERS, 4)
    odd = Message.from_bytes(federation.states[12])
    federation.states[12] = altered(odd, **{setting: int(odd.scalars[setting]) + 1}).to_bytes()
    federation.until("masked")
    with pytest.raises(MessageError, match="part from client 12 was not made for this client and sum"):
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
