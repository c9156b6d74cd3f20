"""Sums in fewer exchanges: two where all have to stay, four where nobody is missing; each attack fails, and succeeds
where the check that it meets is taken out."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from headstart.channel.fixed import fractional_bits
from headstart.channel.secure import Identity, SecureClient, client
from headstart.channel.secure.protocol import pair_key
from headstart.core.message import Message
from headstart.errors import HeadstartError, MessageError
from tests.channel.test_secure import Federation, altered, chi_square, flat
from tests.channel.test_secure_attacks import CONTEXT, SESSION, SIZE, LyingServer, members, told, values_of
from tests.channel.test_secure_attacks import listed as shares
from tests.helpers import identities

# ------------------------------------------------------------------------------------------------ all of them stay


def listed(keys: dict[int, Message]) -> Message:
    """The exchange `masked` with these answers to `keys`, where all have to stay."""
    return altered(shares(keys), step="masked")


def three_of(count: int, values: Any = values_of) -> list[SecureClient]:
    """So many clients, each of which is told that it is one of three."""
    return [SecureClient(SESSION, 3, 3, one, {"x": values(one.number)}, CONTEXT) for one in identities(count)]


@pytest.mark.parametrize("count", [3, 4, 8, 60])
def test_two_exchanges_give_the_sum_of_the_fixed_point_integers(count: int) -> None:
    federation = Federation(tuple(range(count)), count, {"x": (SIZE,), "n": ()})
    down = [federation.server.instructions()[0]]
    first = federation.exchange()
    down.append(federation.server.instructions()[0])
    masked = federation.exchange()
    assert federation.server.step is None
    assert federation.server.survivors == tuple(range(count))
    total, expected = federation.server.total(), federation.expected()
    assert all(np.array_equal(total[name], expected[name]) for name in expected)
    # Keys, two exponents and a signature; values of 8 bytes. Everyone's row of these with its number.
    assert sum(array.nbytes for array in first[0].arrays.values()) == 64 + 8 + 64
    assert sum(array.nbytes for array in masked[0].arrays.values()) == 8 * (SIZE + 1)
    assert [sum(array.nbytes for array in each.arrays.values()) for each in down] == [0, count * (8 + 64 + 8 + 64)]
    kept = Message.from_bytes(federation.states[0])
    assert kept.arrays.keys() == {"survivors"}  # no secret, no values


def test_nobody_may_be_missing() -> None:
    for step in ("keys", "masked"):
        federation = Federation((0, 1, 2, 3), 4).until(step)
        with pytest.raises(HeadstartError, match=r"^3 of 4 clients are left, 4 are needed to open the sum$"):
            federation.exchange(silent={2})


def test_what_is_sent_looks_uniform_until_all_of_it_is_added() -> None:
    federation = Federation((2, 5, 9), 3, {"w": (20_000,)})
    masked = [flat(each) for each in federation.until("masked").exchange().values()]
    for size in (1, 2):
        for some in combinations(masked, size):
            assert chi_square(np.sum(some, axis=0, dtype=np.uint64)) < 400.0
    assert chi_square(np.sum(masked, axis=0, dtype=np.uint64)) > 400.0


def test_a_client_masks_once_and_keeps_nothing() -> None:
    clients = three_of(3)
    everyone = listed({number: one.keys() for number, one in enumerate(clients)})
    before = clients[0].to_message()
    assert clients[0].mask(everyone).arrays.keys() == {"value.x"}
    for again in (clients[0].mask, clients[0].share, clients[0].agree, clients[0].reveal):
        with pytest.raises(MessageError, match="next exchange is 'none'; this request is out of turn"):
            again(everyone)
    after = clients[0].to_message().to_bytes()
    assert all(array.tobytes() not in after for array in before.arrays.values())


@pytest.mark.parametrize("step", ["shares", "agree", "reveal"])
def test_a_sum_in_which_all_stay_has_no_other_exchange(step: str) -> None:
    one = three_of(3)[0]
    answers = {"shares": one.share, "agree": one.agree, "reveal": one.reveal}
    with pytest.raises(MessageError, match="next exchange is 'masked'; this request is out of turn"):
        answers[step](told(step))


def test_keys_of_another_sum_context_or_number_of_clients_are_refused() -> None:
    good = three_of(3)
    keys = {number: one.keys() for number, one in enumerate(good)}
    two, values = identities(3)[2], {"x": values_of(2)}
    for other in (
        SecureClient(b"another", 3, 3, two, values, CONTEXT),
        SecureClient(SESSION, 3, 3, two, values, b"round 6"),
        SecureClient(SESSION, 4, 4, two, values, CONTEXT),
        SecureClient(SESSION, 3, 3, Identity.derived(b"server", 2), values, CONTEXT),
    ):
        with pytest.raises(MessageError, match="the keys listed for client 2 are not signed by it for this sum"):
            good[0].mask(listed(keys | {2: other.keys()}))
    with pytest.raises(MessageError, match="2 clients are listed with their keys; between 3 and 3 are accepted"):
        good[0].mask(listed({n: keys[n] for n in (0, 1)}))
    assert good[0].mask(listed(keys)).arrays


def ring(values: Any) -> np.ndarray:
    """What four clients send, each told of a list of three: its neighbours on a ring and itself, in Python's integers.

    Masks of a pair are on either side's list; the lists, and so the exponents, differ.
    """
    clients = three_of(4, values)
    keys = {number: one.keys() for number, one in enumerate(clients)}
    lists = [sorted({(n - 1) % 4, n, (n + 1) % 4}) for n in range(4)]
    sent = [one.mask(listed({n: keys[n] for n in each})) for one, each in zip(clients, lists, strict=True)]
    return np.sum([one.arrays["value.x"].view(np.uint64) for one in sent], axis=0, dtype=np.uint64)


def test_clients_with_different_lists_have_no_total(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: one client helps the server with values so large that those of all who have it on their lists are
    rounded to nothing. The values of the one who has not are the total."""

    def values(number: int) -> np.ndarray:
        return values_of(number) if number < 3 else np.full(SIZE, 2.0**500)

    def of_client_1(total: np.ndarray) -> np.ndarray:
        large = round(2.0 ** (500 + fractional_bits(512, 3)))
        return np.ldexp((total - np.uint64(large)).view(np.int64).astype(float), -fractional_bits(16, 3))

    assert np.abs(of_client_1(ring(values)) - values_of(1)).min() > 1
    monkeypatch.setattr(client, "mask_purpose", lambda list_digest: b"mask")
    np.testing.assert_allclose(of_client_1(ring(values)), values_of(1), atol=1e-12)


def test_a_client_that_was_rolled_back_masks_another_list_with_other_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same masks the difference of the two answers would be known."""

    def both() -> np.ndarray:
        clients = [SecureClient(SESSION, 3, 3, one, {"x": np.zeros(4000)}, CONTEXT) for one in identities(4)]
        keys, state = {number: one.keys() for number, one in enumerate(clients)}, clients[0].to_message()
        sent = []
        for last in (2, 3):
            one = SecureClient.from_message(state, identities(4)[0])
            sent.append(flat(one.mask(listed({n: keys[n] for n in (0, 1, last)}))))
        secret = clients[2]._secret("mask_secret"), clients[3]._secret("mask_secret")
        public = {n: keys[n].arrays["mask_key"].tobytes() for n in keys}
        for place, n in enumerate((2, 3)):  # both of them tell the server their masks with client 0
            purpose = client.mask_purpose(digests[place])
            key = pair_key(SESSION, purpose, secret[place], (n, public[n]), (0, public[0]))
            client.add_stream(sent[place], key, -1)
        return np.asarray(sent[0] - sent[1])

    digests: list[bytes] = []
    purpose = client.mask_purpose
    monkeypatch.setattr(client, "mask_purpose", lambda digest: (digests.append(digest), purpose(digest))[1])
    assert chi_square(both()) < 400.0
    monkeypatch.setattr(client, "mask_purpose", lambda digest: b"mask")
    assert not both().any()


# --------------------------------------------------------------------------------------- nobody is missing: no `agree`


def begun(count: int, threshold: int) -> tuple[LyingServer, np.ndarray]:
    """A server that has everybody's values and signatures, and has not lied yet; and what client 0 has sent."""
    server = LyingServer(members(count, threshold), threshold)
    server.share()
    first, *_ = [server.mask(number, server.everybody) for number in server.everybody]
    return server, first


def at_once(server: LyingServer, signers: list[int] | None = None) -> Message:
    """The request to reveal with what was signed in `masked`."""
    signers = server.everybody if signers is None else signers
    return told("reveal", signers=signers, signatures=np.stack([server.signed[n] for n in signers]))


def test_agreement_is_left_out_where_nobody_is_missing() -> None:
    federation = Federation(tuple(range(5)), 4).until("masked")
    federation.exchange()
    assert federation.server.step == "reveal"
    federation.exchange(silent={3})
    assert federation.server.dropped() == {3: "reveal"}
    expected = federation.expected()
    assert all(np.array_equal(array, expected[name]) for name, array in federation.server.total().items())
    federation = Federation(tuple(range(5)), 4).until("masked")
    federation.exchange(silent={3})
    assert federation.server.step == "agree"


def test_a_client_reveals_at_once_only_where_everybody_has_signed_that_nobody_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, _ = begun(5, 4)
    forged = told("reveal", signers=server.everybody, signatures=np.stack([server.signed[0]] * 5))
    for request in (at_once(server, [0, 1, 2, 3]), forged):
        with pytest.raises(MessageError, match="next exchange is 'agree'; this request is out of turn"):
            server.clients[0].reveal(request)
    first = server.clients[0].reveal(at_once(server))
    assert [first.arrays[name].shape for name in ("seed_shares", "key_shares")] == [(5, 20), (0, 36)]
    assert server.clients[0].reveal(at_once(server)).to_bytes() == first.to_bytes()
    assert server.clients[0].agreed == 5
    monkeypatch.setattr(Identity, "signed_by", lambda *arguments: True)
    assert server.clients[1].reveal(forged).arrays["seed_shares"].shape == (5, 20)


def test_clients_that_know_of_different_senders_of_parts_reveal_nothing_at_once() -> None:
    """The server withholds the parts of one client from another, which then shares no mask with it."""
    server = LyingServer(members(5, 4), 4)
    server.share()
    for number in server.everybody:
        server.mask(number, [0, 1, 2, 3] if number == 0 else server.everybody)
    for number, signers in ((0, [0, 1, 2, 3]), (1, server.everybody)):
        with pytest.raises(MessageError, match="next exchange is 'agree'"):
            server.clients[number].reveal(at_once(server, signers))


def two_ways(rolled_back: bool) -> Any:
    """Client 0's values: its seed from those who reveal at once, its mask key from a list of survivors without it."""
    server, sent = begun(5, 4)
    states = [one.to_message() for one in server.clients]
    others = server.everybody[1:]
    seeds = {n + 1: server.clients[n].reveal(at_once(server)).arrays["seed_shares"][0] for n in others}
    if rolled_back:
        pairs = zip(states, identities(len(states)), strict=True)
        server.clients = [SecureClient.from_message(state, identity) for state, identity in pairs]
    signed = {n: server.agree(n, others) for n in others}
    request = told("reveal", signers=others, signatures=np.stack([signed[n] for n in others]))
    keys = {n + 1: server.clients[n].reveal(request).arrays["key_shares"][0] for n in others}
    return server.opened_by_key(sent, seeds, keys)


def test_who_reveals_at_once_agrees_on_no_other_list_and_the_other_way_round() -> None:
    with pytest.raises(MessageError, match="next exchange is 'reveal'; this request is out of turn"):
        two_ways(rolled_back=False)
    server, _ = begun(5, 4)
    server.agree(1, [1, 2, 3, 4])
    with pytest.raises(MessageError, match=r"^0 survivors have signed the list of survivors, 4 are needed"):
        server.clients[1].reveal(at_once(server))


def test_clients_that_forgot_what_they_revealed_would_give_a_client_away() -> None:
    np.testing.assert_allclose(two_ways(rolled_back=True), values_of(0), atol=1e-12)


def test_among_neighbours_survivors_are_always_agreed_on() -> None:
    """There fewer than the threshold open a secret: three neighbours on the server's side could open both of one."""
    federation = Federation(tuple(range(60)), 41, {"x": (2,)}).until("masked")
    answers = federation.exchange()
    assert federation.server.step == "agree"
    signatures = np.stack([answers[n].arrays["signature"] for n in range(60)])
    request = Message({"signers": np.arange(60), "signatures": signatures}, {"session": b"s".hex(), "step": "reveal"})
    with pytest.raises(MessageError, match="next exchange is 'agree'"):
        federation.client(7).reveal(request)
