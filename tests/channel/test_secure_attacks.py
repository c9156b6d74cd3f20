"""Attacks on the protocol of secure sums: each fails, and succeeds where the check that it meets is taken out."""

from typing import Any

import numpy as np
import pytest

from headstart.channel.fixed import fractional_bits
from headstart.channel.secure import Identity, SecureClient, SecureSum, client, protocol
from headstart.channel.secure.protocol import KeyList, Terms, signed_keys
from headstart.channel.secure.shamir import combine
from headstart.core.message import Message
from headstart.errors import HeadstartError, MessageError
from tests.helpers import identities

SESSION, CONTEXT, SIZE = b"s", b"round 7", 6


def values_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).normal(size=SIZE)


def members(count: int, threshold: int, session: bytes = SESSION, context: bytes = CONTEXT) -> list[SecureClient]:
    return [
        SecureClient(session, count, threshold, one, {"x": values_of(one.number)}, context) for one in identities(count)
    ]


def told(step: str, **arrays: Any) -> Message:
    named = {name: np.asarray(each) for name, each in arrays.items()}
    return Message(named, {"session": SESSION.hex(), "step": step})


def listed(keys: dict[int, Message]) -> Message:
    """The exchange `shares` with these answers to `keys`."""
    names = {"share_keys": "share_key", "mask_keys": "mask_key", "exponents": "exponents", "signatures": "signature"}
    rows = {many: np.stack([keys[number].arrays[one] for number in sorted(keys)]) for many, one in names.items()}
    return told("shares", numbers=sorted(keys), **rows)


def values_in(masked: np.ndarray, clients: int) -> np.ndarray:
    """Integers without their masks as what the client has; its values are below 2**16."""
    return np.ldexp(masked.view(np.int64).astype(np.float64), -fractional_bits(16, clients))


# ------------------------------------------------------------------------------------------------------ swapped keys


def puppets(count: int, threshold: int) -> dict[int, SecureClient]:
    """What the server puts in the place of all clients but the first: they add zeros, and sign with other keys."""
    zeros = {"x": np.zeros(SIZE)}
    return {
        number: SecureClient(SESSION, count, threshold, Identity.derived(b"server", number), zeros, CONTEXT)
        for number in range(1, count)
    }


def surround(victim: SecureClient, count: int, threshold: int) -> np.ndarray:
    """The total of a sum in which everybody but the victim is the server."""
    sides = {0: victim} | puppets(count, threshold)
    server = SecureSum(SESSION, range(count), threshold, {"x": (SIZE,)})
    while step := server.step:
        for number, request in server.instructions().items():
            one = sides[number]
            answers = {"shares": one.share, "masked": one.mask, "agree": one.agree, "reveal": one.reveal}
            server.receive(number, one.keys() if step == "keys" else answers[step](request))
        server.next()
    return np.asarray(server.total()["x"])


def test_swapped_public_keys_are_refused() -> None:
    victim = members(5, 4)[0]
    with pytest.raises(MessageError, match="the keys listed for client 1 are not signed by it for this sum"):
        surround(victim, 5, 4)


def test_without_signatures_swapped_keys_would_give_a_client_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Identity, "signed_by", lambda *arguments: True)
    np.testing.assert_allclose(surround(members(5, 4)[0], 5, 4), values_of(0), atol=1e-12)


def replayed(session: bytes, context: bytes) -> Message:
    """The list of a sum in which client 2's signed keys are those of another sum."""
    keys = {number: one.keys() for number, one in enumerate(members(5, 4))}
    keys[2] = members(5, 4, session, context)[2].keys()
    victim = members(5, 4)[0]
    keys[0] = victim.keys()
    return victim.share(listed(keys))


@pytest.mark.parametrize(("session", "context"), [(b"another", CONTEXT), (SESSION, b"round 6")])
def test_keys_and_signature_of_another_sum_are_refused(session: bytes, context: bytes) -> None:
    with pytest.raises(MessageError, match="the keys listed for client 2 are not signed by it for this sum"):
        replayed(session, context)


def test_if_signatures_did_not_name_the_sum_keys_of_another_would_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such keys may be known: the mask key of a client that drops out is revealed."""

    def nameless(terms: Terms, context: bytes, *about: Any) -> bytes:
        return signed_keys(Terms(SESSION, terms.clients, terms.threshold), b"", *about)

    monkeypatch.setattr(client, "signed_keys", nameless)
    monkeypatch.setattr(protocol, "signed_keys", nameless)
    assert replayed(b"another", b"round 6").arrays["parts"].shape[0] == 4


@pytest.mark.parametrize("change", ["threshold", "number", "exponents", "share_key", "mask_key"])
def test_every_part_of_what_a_client_signs_is_signed(change: str) -> None:
    one = identities(5)[2]
    terms = Terms(SESSION, 5, 4)
    arrays = SecureClient(SESSION, 5, 4, one, {"x": values_of(2)}, CONTEXT).keys().arrays
    facts: dict[str, Any] = {"number": 2} | {name: arrays[name] for name in ("share_key", "mask_key", "exponents")}

    def signed(**other: Any) -> bytes:
        about = facts | other
        whole = (about["number"], about["share_key"], about["mask_key"], about["exponents"])
        return signed_keys(Terms(SESSION, 5, other.get("threshold", 4)), CONTEXT, *whole)

    signature = arrays["signature"].tobytes()
    assert one.signed_by(2, signature, signed())
    assert terms.encoded(b"a", b"bc") != terms.encoded(b"ab", b"c")
    different = {"threshold": 5, "number": 1}.get(change)
    assert not one.signed_by(2, signature, signed(**{change: facts[change] + 1 if different is None else different}))


def test_a_client_that_signs_a_useless_key_is_named() -> None:
    everybody = members(5, 4)
    keys = {number: one.keys() for number, one in enumerate(everybody)}
    zero, arrays = np.zeros(32, np.uint8), dict(keys[3].arrays)
    signed = signed_keys(Terms(SESSION, 5, 4), CONTEXT, 3, zero, arrays["mask_key"], arrays["exponents"])
    signature = np.frombuffer(identities(5)[3].sign(signed), np.uint8)
    keys[3] = Message({**arrays, "share_key": zero, "signature": signature}, keys[3].scalars)
    with pytest.raises(MessageError, match="the public key of client 3 is not usable"):
        everybody[0].share(listed(keys))


def test_a_stranger_is_refused_whatever_it_signs() -> None:
    everybody = members(5, 4)
    keys = {number: one.keys() for number, one in enumerate(everybody)}
    stranger = SecureClient(SESSION, 5, 4, Identity.derived(SESSION, 9), {"x": values_of(9)}, CONTEXT)
    keys[9] = stranger.keys()
    del keys[4]
    with pytest.raises(MessageError, match="the keys listed for client 9 are not signed by it"):
        everybody[0].share(listed(keys))


# ---------------------------------------------------------------------------------------------- two lists of survivors


class LyingServer:
    """A server that passes the keys on, and tells every client another story of who has dropped out."""

    def __init__(self, clients: list[SecureClient], threshold: int) -> None:
        self.clients, self.threshold = clients, threshold
        self.everybody = list(range(len(clients)))
        self.signed: dict[int, np.ndarray] = {}

    def share(self) -> None:
        self.keys = {number: one.keys() for number, one in enumerate(self.clients)}
        everyone = listed(self.keys)
        terms = Terms(SESSION, len(self.clients), self.threshold)
        self.purpose = protocol.mask_purpose(KeyList.of(everyone, 1).digest(terms))
        self.parts = [one.share(everyone).arrays for one in self.clients]

    def mask(self, number: int, sharers: list[int]) -> np.ndarray:
        others = [sharer for sharer in sharers if sharer != number]
        rows = [self.parts[s]["parts"][self.parts[s]["recipients"].tolist().index(number)] for s in others]
        said = self.clients[number].mask(told("masked", sharers=sharers, parts=np.stack(rows))).arrays
        self.signed[number] = said["signature"]
        return said["value.x"].view(np.uint64).copy()

    def agree(self, number: int, survivors: list[int]) -> np.ndarray:
        signatures = np.stack([self.signed[n] for n in survivors])
        request = told("agree", survivors=survivors, signers=survivors, signatures=signatures)
        return np.asarray(self.clients[number].agree(request).arrays["signature"])

    def opened(self, masked: np.ndarray, seeds: dict[int, np.ndarray], keys: dict[int, dict[int, np.ndarray]]) -> Any:
        """Client 0's values, from shares of its seed and of the mask keys of those it shares masks with, by point."""

        def rebuilt(shares: dict[int, np.ndarray], length: int) -> bytes:
            first = dict(list(shares.items())[: self.threshold])
            return combine(np.array([list(first)]), np.stack(list(first.values()))[None], length)[0]

        protocol.add_stream(masked, protocol.derive(SESSION, b"self", rebuilt(seeds, 16), 0), -1)
        mask_keys = {number: answer.arrays["mask_key"].tobytes() for number, answer in self.keys.items()}
        for other, shares in keys.items():
            secret = protocol.X25519PrivateKey.from_private_bytes(rebuilt(shares, 32))
            pair = ((other, mask_keys[other]), (0, mask_keys[0]))
            key = protocol.pair_key(SESSION, self.purpose, secret, *pair)
            protocol.add_stream(masked, key, -protocol.mask_sign(0, other))
        return values_in(masked, len(self.clients))

    def opened_by_key(self, masked: np.ndarray, seeds: dict[int, np.ndarray], key: dict[int, np.ndarray]) -> Any:
        """The same from shares of client 0's seed and of its own mask key, which gives all of its masks."""
        shares = dict(list(key.items())[: self.threshold])
        secret = combine(np.array([list(shares)]), np.stack(list(shares.values()))[None], 32)[0]
        private = protocol.X25519PrivateKey.from_private_bytes(secret)
        mask_keys = {n: self.keys[n].arrays["mask_key"].tobytes() for n in self.everybody}
        for other in self.everybody[1:]:
            pair = protocol.pair_key(SESSION, self.purpose, private, (0, mask_keys[0]), (other, mask_keys[other]))
            protocol.add_stream(masked, pair, -protocol.mask_sign(0, other))
        return self.opened(masked, seeds, {})

    def open_first(self) -> np.ndarray:
        """The values of client 0.

        It is told that only the first clients, as many as the threshold, have sent parts. Everybody else is told that
        all have, and that all of those first ones but client 0 and itself then dropped out.
        """
        group = self.everybody[: self.threshold]
        self.share()
        masked, *_ = [self.mask(n, group if n == 0 else self.everybody) for n in self.everybody]
        missing = {n: [] if n == 0 else [other for other in group[1:] if other != n] for n in self.everybody}
        lists = {n: [o for o in (group if n == 0 else self.everybody) if o not in missing[n]] for n in self.everybody}
        signed = {n: self.agree(n, lists[n]) for n in lists}
        seeds: dict[int, np.ndarray] = {}
        keys: dict[int, dict[int, np.ndarray]] = {number: {} for number in group[1:]}
        for number, one in enumerate(self.clients):
            signers = lists[number]
            request = told("reveal", signers=signers, signatures=np.stack([signed[n] for n in signers]))
            said = one.reveal(request).arrays
            seeds[number + 1] = said["seed_shares"][lists[number].index(0)]
            for row, other in enumerate(missing[number]):
                keys[other][number + 1] = said["key_shares"][row]
        return np.asarray(self.opened(masked, seeds, keys))


@pytest.mark.parametrize(("count", "low", "high"), [(5, 3, 4), (7, 4, 5), (9, 5, 7)])
def test_two_stories_about_dropouts_open_nothing(
    count: int, low: int, high: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HeadstartError, match=rf"from {high} \(more than two thirds\) to {count}, not {low}"):
        members(count, low)
    with pytest.raises(MessageError, match="have not signed that the same clients have sent parts"):
        LyingServer(members(count, high), high).open_first()
    monkeypatch.setattr(Terms, "__post_init__", lambda terms: None)
    with pytest.raises(MessageError, match="have not signed that the same clients have sent parts"):
        LyingServer(members(count, low), low).open_first()
    signed = SecureClient._signed
    monkeypatch.setattr(SecureClient, "_signed", lambda self, step: b"" if step == b"masked" else signed(self, step))
    with pytest.raises(MessageError, match=rf"^1 survivors have signed the list of survivors, {low} are needed"):
        LyingServer(members(count, low), low).open_first()


@pytest.mark.parametrize(("count", "threshold"), [(5, 3), (7, 4), (9, 5)])
def test_without_agreement_two_stories_would_open_one_clients_values(
    count: int, threshold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where little more than half of the clients suffice."""
    monkeypatch.setattr(Terms, "__post_init__", lambda terms: None)
    monkeypatch.setattr(Identity, "signed_by", lambda *arguments: True)
    np.testing.assert_allclose(LyingServer(members(count, threshold), threshold).open_first(), values_of(0), atol=1e-12)


def halves(server: LyingServer) -> list[Message]:
    """Half of the clients is told that client 8 has dropped out, half that client 7 has; each gets all signatures."""
    server.share()
    for number in server.everybody:
        server.mask(number, server.everybody)
    lists = {n: [other for other in server.everybody if other != (7 if n == 8 else 8)] for n in server.everybody}
    lists |= {n: [other for other in server.everybody if other != 7] for n in range(4)}
    signed = [server.agree(n, lists[n]) for n in server.everybody]
    said = []
    for number, one in enumerate(server.clients):
        signatures = np.stack([signed[n] for n in lists[number]])
        said.append(one.reveal(told("reveal", signers=lists[number], signatures=signatures)))
    return said


def test_halves_of_the_clients_do_not_open_two_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MessageError, match=r"^5 survivors have signed the list of survivors, 7 are needed"):
        halves(LyingServer(members(9, 7), 7))
    monkeypatch.setattr(Identity, "signed_by", lambda *arguments: True)
    said = halves(LyingServer(members(9, 7), 7))  # two lists would be open, which differ by two clients
    assert [len(answer.arrays["seed_shares"]) for answer in said] == [8] * 9


def test_clients_with_different_lists_of_keys_do_not_agree() -> None:
    """A server that leaves another client out for each half has no list that enough of them sign."""
    everybody = members(9, 7)
    server = LyingServer(everybody, 7)
    server.keys = {number: one.keys() for number, one in enumerate(everybody)}
    lists = {n: [o for o in range(9) if o != (7 if n == 8 or n < 4 else 8)] for n in range(9)}
    server.parts = [one.share(listed({o: server.keys[o] for o in lists[n]})).arrays for n, one in enumerate(everybody)]
    with pytest.raises(MessageError, match="the part from client 4 was not made for this client and sum"):
        server.mask(0, lists[0])


# -------------------------------------------------------------------------------------------------------- both secrets


def both_secrets(server: LyingServer, rolled_back: bool) -> Any:
    """Client 0's values, by a list with it and a list without it; rolled_back: clients sign from an old state."""
    server.share()
    masked, *_ = [server.mask(number, server.everybody) for number in server.everybody]
    states = [one.to_message() for one in server.clients]
    seeds: dict[int, np.ndarray] = {}
    keys: dict[int, dict[int, np.ndarray]] = {n: {} for n in server.everybody}
    for survivors in (server.everybody, server.everybody[1:]):
        if rolled_back:
            pairs = zip(states, identities(len(states)), strict=True)
            server.clients = [SecureClient.from_message(state, identity) for state, identity in pairs]
        signed = {n: server.agree(n, survivors) for n in survivors}
        request = told("reveal", signers=survivors, signatures=np.stack([signed[n] for n in survivors]))
        for n in survivors:
            said = server.clients[n].reveal(request).arrays
            if 0 in survivors:
                seeds[n + 1] = said["seed_shares"][0]
            else:
                keys[0][n + 1] = said["key_shares"][0]
    return server.opened_by_key(masked, seeds, keys[0])


def test_no_client_gives_both_secrets_of_another() -> None:
    with pytest.raises(MessageError, match="next exchange is 'reveal'; this request is out of turn"):
        both_secrets(LyingServer(members(5, 4), 4), rolled_back=False)


def test_clients_that_forgot_what_they_signed_would_give_a_client_away() -> None:
    """Why the state is on the disk before an answer leaves."""
    np.testing.assert_allclose(both_secrets(LyingServer(members(5, 4), 4), rolled_back=True), values_of(0), atol=1e-12)


# --------------------------------------------------------------------------------------------------- forged signatures


def test_forged_and_too_few_signatures_open_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    server = LyingServer(members(5, 4), 4)
    server.share()
    for number in server.everybody:
        server.mask(number, server.everybody)
    signed = [server.agree(number, server.everybody) for number in server.everybody]
    forged = told("reveal", signers=server.everybody, signatures=np.stack([signed[0]] * 5))
    with pytest.raises(MessageError, match=r"^1 survivors have signed the list of survivors, 4 are needed"):
        server.clients[0].reveal(forged)
    few = told("reveal", signers=[0, 1, 2], signatures=np.stack(signed[:3]))
    with pytest.raises(MessageError, match=r"^3 survivors have signed"):
        server.clients[0].reveal(few)
    assert server.clients[0].reveal(told("reveal", signers=[0, 1, 2, 3], signatures=np.stack(signed[:4]))).arrays
    monkeypatch.setattr(Identity, "signed_by", lambda *arguments: True)
    assert server.clients[1].reveal(forged).arrays["seed_shares"].shape == (5, 20)


def test_the_digest_of_a_list_covers_all_of_it() -> None:
    keys = {number: one.keys() for number, one in enumerate(members(4, 3))}
    message, terms = listed(keys), Terms(SESSION, 4, 3)
    found = {KeyList.of(message, 1).digest(terms)}
    for name in ("numbers", "share_keys", "mask_keys", "exponents"):
        array = message.arrays[name].copy()
        array.flat[-1] += 16
        found.add(KeyList.of(Message({**message.arrays, name: array}), 1).digest(terms))
    found |= {KeyList.of(message, 1).digest(other) for other in (Terms(b"t", 4, 3), Terms(SESSION, 4, 4))}
    assert len(found) == 7
