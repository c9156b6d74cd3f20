"""SLoRA on a tiny transformer: what priming may change, what travels, and the switch to LoRA by numpy's own SVD."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from headstart.backbones import Inputs, embed
from headstart.config.recipe import Recipe
from headstart.core.ledger import Ledger, Published
from headstart.core.message import Message
from headstart.core.state import pack, unpack
from headstart.data import Dataset, Federation
from headstart.engine.client_states import ClientStates
from headstart.heads import LinearHead
from headstart.methods.slora import SLoRAState, factors
from headstart.modules import attach, plain_state
from headstart.runner.costs import paper_cost
from tests.helpers import Bench, context_of, play
from tests.methods.test_mezo import SENTENCES, WIDTH, C, N, Y, bert_backbone, bert_head

SEED = (5, 2)
WHO = np.arange(N) % 3
TARGETS = [f"encoder.layer.{layer}.attention.self.{name}" for layer in (0, 1) for name in ("query", "value")]
DENSITY = 0.3
NNZ = 19  # of 8 x 8 entries: 0.3 · 64 = 19.2


class Run:
    """A stage of SLoRA by three clients; five rounds, of which two prime."""

    def __init__(self, rank: int = 2, alpha: float = 6.0, seed: tuple[int, int] = SEED, **keys: Any) -> None:
        table = {"method": "slora", "rank": rank, "alpha_lora": alpha, "density": DENSITY, "priming": 0.4, "rounds": 5}
        table |= {"lr": 0.3, "batch_size": "full"} | keys
        self.stage: Any = Recipe.parse({"data": {"dataset": "x"}, "stages": [table]}).stages[0]
        self.backbone = bert_backbone(dropout=0.0)
        self.before = {name: value.clone() for name, value in plain_state(self.backbone.core).items()}
        self.module = attach("lora", self.backbone, {"rank": rank, "alpha_lora": alpha}, seed=5002)
        dataset = Dataset("x", ("a", "b", "c"), SENTENCES, SENTENCES)
        self.federation = Federation(dataset, WHO, None, ("ann", "bob", "cy"))
        self.context = context_of(
            self.stage, C, WIDTH, seed, 3, N, bert_head(), backbone=self.backbone, module=self.module
        )
        self.bench = Bench(self.stage, self.context)
        self.states: list[Any] = [self.bench.init()]
        self.frozen: list[bytes] = []
        self.heads: list[LinearHead] = []
        self.features: list[np.ndarray] = []
        self.ledger = Ledger.open(3)

    def play(self, rounds: int | None = None, state: Any = None, first_round: int = 0) -> "Run":
        def after(number: int, state: Any) -> None:
            self.states.append(state)
            self.frozen.append(pack(state).to_bytes())
            self.heads.append(self.bench.head(state))
            self.features.append(embed(self.backbone, SENTENCES, "x"))
            if rounds is not None and number + 1 == rounds:
                raise StopIteration

        source = Inputs(self.backbone, SENTENCES, "x")
        with TemporaryDirectory() as folder:
            states = ClientStates(Path(folder), 3, self.bench.method.client_state)
            arguments = (self.bench, self.federation, source, self.ledger, states, after)
            try:
                play(*arguments, state=state, first_round=first_round)
            except StopIteration:
                assert rounds is not None
        return self

    def published(self, rounds: int) -> Published:
        """What so many rounds cost as the thesis counts it."""
        counts, state = self.federation.counts, self.states[rounds]
        return paper_cost(self.stage, self.bench.method, self.context.tasks, WIDTH, rounds, counts, state)


def matrices(run: Run) -> dict[str, np.ndarray]:
    """What each adapted layer multiplies its input by, read off its outputs; nothing of how it is kept is used."""
    found = {}
    for target in TARGETS:
        layer = run.backbone.core.get_submodule(target)
        with torch.no_grad():
            rows = layer(torch.cat([torch.zeros(1, WIDTH), torch.eye(WIDTH)]))
        found[target] = (rows[1:] - rows[:1]).T.double().numpy()
    return found


def test_priming_changes_the_masked_entries_and_nothing_else() -> None:
    run = Run()
    start = matrices(run)
    run.play(rounds=1)
    values = run.states[-1].inner.params
    for target in TARGETS:
        changed = matrices(run)[target] - start[target]
        moved = np.abs(changed) > 1e-5
        sent = values[f"module.{target}"]
        assert sent.shape == (NNZ,)
        assert np.count_nonzero(moved) == np.count_nonzero(np.abs(sent) > 1e-5) > NNZ / 2
        np.testing.assert_allclose(changed[moved], sent[np.abs(sent) > 1e-5], atol=1e-5)  # in the order of the entries
    # The matrices themselves, and all other parameters, are those of the start bit for bit.
    for name, value in plain_state(run.backbone.core).items():
        assert torch.equal(value, run.before[name]), name
    masks = [np.flatnonzero(np.abs(matrices(run)[target] - start[target]) > 1e-5).tolist() for target in TARGETS]
    assert len({tuple(mask) for mask in masks}) == len(TARGETS)  # every matrix has a mask of its own


def test_only_masked_values_travel_while_priming_and_only_factors_after_it() -> None:
    run = Run().play()
    head = {"head.weight": (C, WIDTH), "head.bias": (C,)}
    masked = {f"module.{target}": (NNZ,) for target in TARGETS}
    low_rank: dict[str, tuple[int, ...]] = {f"module.{target}.lora_A.weight": (2, WIDTH) for target in TARGETS}
    low_rank |= {f"module.{target}.lora_B.weight": (WIDTH, 2) for target in TARGETS}
    for number, state in enumerate(run.states[:-1]):
        down = run.bench.broadcast(state, number)
        expected = head | (masked if number < 2 else low_rank)
        assert {name: array.shape for name, array in down.arrays.items()} == {
            f"model.{name}": shape for name, shape in expected.items()
        }
    # Two rounds of one kind of message each way, three of the other; arrays in float32.
    sizes = [4 * sum(int(np.prod(s)) for s in (head | part).values()) for part in (masked, low_rank)]
    data = 2 * sizes[0] + 3 * sizes[1]
    for cost in (run.ledger.bytes_up, run.ledger.bytes_down):
        assert (cost > data).all()
        assert (cost < data + 5 * 2000).all()  # names and shapes


@pytest.mark.parametrize("alpha", [2.0, 6.0])
def test_the_switch_is_the_best_approximation_of_the_change_and_restores_the_matrices(alpha: float) -> None:
    run = Run(rank=2, alpha=alpha)
    start = matrices(run)
    run.play(rounds=1)
    assert not run.states[-1].primed
    run.play(rounds=2, state=run.states[-1], first_round=1)
    state = run.states[-1]
    assert state.primed
    # Round 2 once more, with a run that never switches: the change that the switch has seen.
    longer = Run(rank=2, alpha=alpha, priming=0.8).play(rounds=2)
    assert not longer.states[-1].primed
    head = longer.states[-1].inner.params
    np.testing.assert_array_equal(state.inner.params["head.weight"], head["head.weight"])
    for target, matrix in matrices(longer).items():
        left, values, right = np.linalg.svd(matrix - start[target])
        best = (left[:, :2] * values[:2]) @ right[:2]
        b, a = (state.inner.params[f"module.{target}.lora_{name}.weight"] for name in "BA")
        np.testing.assert_allclose(alpha / 2 * b @ a, best, atol=2e-5)
        np.testing.assert_allclose(b.T @ b, a @ a.T, atol=1e-5)  # the singular values are split evenly
        assert values[2] > 1e-3  # something is lost
        # What the layer multiplies by now.
        np.testing.assert_allclose(matrices(run)[target], start[target] + best, atol=2e-5)
    for name, value in plain_state(run.backbone.core).items():
        assert torch.equal(value, run.before[name]), name
    assert not any("masks" in name for name in run.backbone.body.state_dict())


def test_at_full_rank_the_switch_changes_no_output() -> None:
    switched = Run(rank=WIDTH).play(rounds=2)
    longer = Run(rank=WIDTH, priming=0.8).play(rounds=2)
    assert switched.states[-1].primed
    assert not longer.states[-1].primed
    np.testing.assert_allclose(switched.features[-1], longer.features[-1], atol=1e-5)
    assert np.abs(switched.features[-1] - embed(bert_backbone(dropout=0.0), SENTENCES, "x")).max() > 1e-2


@pytest.mark.parametrize("rank", [3, 5, 9])  # the last is more than the matrix can have
def test_factors_of_a_matrix_of_low_rank_give_it_back(rank: int) -> None:
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(7, 3)) @ rng.normal(size=(3, 5))
    left, right = factors(matrix, rank)
    assert (left.shape, right.shape) == ((7, rank), (rank, 5))
    np.testing.assert_allclose(left @ right, matrix, atol=1e-12)


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_state_survives_its_checkpoint_in_both_parts(stop: int) -> None:
    whole = Run().play()
    cut = Run().play(rounds=stop)
    assert cut.frozen == whole.frozen[:stop]
    again = Run()
    state = unpack(SLoRAState, Message.from_bytes(cut.frozen[-1]))
    assert state.primed == (stop >= 2)
    again.play(state=state, first_round=stop)
    assert again.frozen == whole.frozen[stop:]
    np.testing.assert_array_equal(again.features[-1], whole.features[-1])
    assert len(set(whole.frozen)) == 5


@pytest.mark.parametrize("order", [(4, 1, 3, 0, 2), (0, 4, 1, 2, 1, 3)], ids=str)
def test_a_state_gives_its_own_model_whatever_was_loaded_before(order: tuple[int, ...]) -> None:
    """States 0 and 1 are of priming, 2, 3 and 4 of LoRA; what they gave in their own rounds is the reference."""
    run = Run(lr=0.3).play()
    assert [state.primed for state in run.states[1:]] == [False, True, True, True, True]
    end = run.frozen[-1]
    for number in order:
        head = run.bench.head(run.states[number + 1])
        np.testing.assert_array_equal(embed(run.backbone, SENTENCES, "x"), run.features[number])
        np.testing.assert_array_equal(head.weight, run.heads[number].weight)
    # The start, too; and the clients go on from a later state as if nobody had looked back.
    run.bench.head(run.states[0])
    np.testing.assert_allclose(embed(run.backbone, SENTENCES, "x"), embed(bert_backbone(dropout=0.0), SENTENCES, "x"))
    run.play(state=run.states[4], first_round=4)
    assert run.frozen[-1] == end


def test_without_priming_it_is_lora_by_fedavg() -> None:
    run = Run(priming=0.0).play()
    assert all(state.primed for state in run.states)
    assert not any("masks" in name for name in run.backbone.body.state_dict())
    plain = Run(priming=0.0)
    table = {"method": "fedavg", "train": "lora", "rank": 2, "alpha_lora": 6.0, "rounds": 5, "lr": 0.3}
    plain.stage = Recipe.parse({"data": {"dataset": "x"}, "stages": [table | {"batch_size": "full"}]}).stages[0]
    plain.bench = Bench(plain.stage, plain.context)
    plain.play()
    for name, value in plain.states[-1].params.items():
        np.testing.assert_array_equal(run.states[-1].inner.params[name], value, err_msg=name)
    np.testing.assert_array_equal(run.features[-1], plain.features[-1])
    published = run.published(5)
    assert published.bytes == 5 * 3 * 4 * 4 * (2 * 8 + 8 * 2)  # rounds, clients, bytes, matrices
    again = Run(priming=0.0)
    again.play(state=unpack(SLoRAState, Message.from_bytes(run.frozen[1])), first_round=2)
    assert again.frozen == run.frozen[2:]


def test_after_the_switch_lora_is_what_trains() -> None:
    run = Run(lr=0.03).play()
    assert [state.primed for state in run.states] == [False, False, True, True, True, True]
    after, end = run.states[2].inner.params, run.states[-1].inner.params
    for name, value in after.items():
        assert np.abs(end[name] - value).max() > 1e-5, name
    losses = []
    for head, features in zip(run.heads, run.features, strict=True):
        scores = head.scores(features).astype(np.float64)
        logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        losses.append(-logs[np.arange(N), Y].mean())
    assert losses[1] < losses[0]  # priming learns
    assert losses[-1] < losses[2]  # and so does LoRA


@pytest.mark.parametrize(
    ("keys", "per_round"), [({}, 3), ({"clients_per_round": 2}, 2), ({"participation": 0.1}, 1)], ids=str
)
def test_the_published_cost_by_hand(keys: dict[str, Any], per_round: int) -> None:
    """Eq. 7: two rounds of a third of four 8 × 8 matrices, three rounds of their factors of rank 2."""
    run = Run(**keys).play()
    published = run.published(5)
    assert published.bytes == per_round * 4 * (2 * 4 * NNZ + 3 * 4 * (2 * 8 + 8 * 2))
    assert run.published(1).bytes == per_round * 4 * 4 * NNZ
    assert published.forward_passes == 5 * 3 * N


def test_the_seed_of_the_run_and_the_number_of_the_stage_choose_the_entries() -> None:
    chosen = []
    for seed in ((5, 2), (5, 2), (6, 2), (5, 3)):
        found, name = matrices(Run(seed=seed).play(1)), TARGETS[0]
        chosen.append(np.flatnonzero(np.abs(found[name] - matrices(Run(seed=seed))[name]) > 1e-7).tolist())
    assert chosen[0] == chosen[1]
    assert chosen[0] != chosen[2]
    assert chosen[0] != chosen[3]
