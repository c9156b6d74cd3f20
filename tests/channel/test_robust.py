"""Clients that are not to be trusted, and clients that are not to be known: robust combiners, and DP-FedAvg."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian, get_sigma_gaussian
from scipy.stats import trim_mean

from headstart.backbones import Inputs
from headstart.channel.accounting import noise_multiplier
from headstart.channel.links import ServerNoise, median, trimmed_mean
from headstart.config.recipe import Recipe
from headstart.core.message import Message
from headstart.core.params import clipped, norm
from headstart.core.reply import Reply, Sender
from headstart.core.state import pack
from headstart.data import Examples
from headstart.errors import HeadstartError, MessageError, RecipeError
from headstart.methods import Population, Task
from headstart.modules import attach
from headstart.solvers.cohort import Cohort
from tests.helpers import Bench, cohort_of, context_of
from tests.methods.test_bodies import Normed, Plain, backbone_of
from tests.modules.test_modules import WIDTH, tiny_vit

C, D, K, PER = 4, 6, 12, 30
RNG = np.random.default_rng(0)
CENTRES = RNG.normal(size=(C, D)) * 1.2
WHO = np.repeat(np.arange(K), PER)
# Clients have mixtures of their own of the classes.
Y = np.concatenate([RNG.choice(C, PER, p=RNG.dirichlet(np.full(C, 3.0))) for _ in range(K)])
X = (CENTRES[Y] + RNG.normal(size=(K * PER, D))).astype(np.float32)
TEST_Y = RNG.integers(0, C, 1000)
TEST_X = (CENTRES[TEST_Y] + RNG.normal(size=(1000, D))).astype(np.float32)
PRIVATE = {"weighting": "uniform", "privacy": {"epsilon": 2.0, "clip": 0.5}}

Arrays = dict[str, np.ndarray]
Attack = Callable[[int, int, Arrays], Arrays]


def stage_of(**keys: Any) -> Any:
    full = {"method": "fedavg", "train": "head", "rounds": 5, "lr": 0.3, "batch_size": 10, "head_init": "zeros"} | keys
    return Recipe.parse({"data": {"dataset": "x"}, "stages": [full]}).stages[0]


def bench_of(seed: int = 0, **keys: Any) -> Bench:
    stage = stage_of(**keys)
    return Bench(stage, context_of(stage, C, D, (seed, 0), K, K * PER))


def answer(bench: Bench, state: Any, client: int, round: int = 0) -> Reply:
    rows = np.flatnonzero(client == WHO)
    (reply,) = bench.answer(cohort_of(bench, client, X, rows, Y[rows]), bench.broadcast(state, round))
    return reply


def reply_of(arrays: Arrays, scalars: dict[str, Any] | None = None, task: int = 0) -> Reply:
    given = {name: np.asarray(value, np.float32) for name, value in arrays.items()}
    message = Message(given, {"examples": 1, "steps": 1} if scalars is None else scalars)
    return Reply(np.array([0]), message, np.array([0]), np.array([0]), task=task)


def flat(vectors: Arrays) -> np.ndarray:
    return np.concatenate([np.asarray(vectors[name], np.float64).ravel() for name in sorted(vectors)])


def updates_of(replies: Iterable[Reply]) -> np.ndarray:
    """[n, P], of what was sent."""
    return np.stack([flat({n: a for n, a in r.message.arrays.items() if n.startswith("update.")}) for r in replies])


def played(attack: Attack | None = None, times: int = 5, **keys: Any) -> Any:
    """The bench, its state after the rounds, and the accuracy of the head on examples nobody trained on."""
    bench = bench_of(**keys)
    state = bench.init()
    for number in range(times):
        replies = [answer(bench, state, client, number) for client in range(K)]
        for client in range(K if attack else 0):
            arrays = attack(number, client, dict(replies[client].message.arrays))
            replies[client] = replace(replies[client], message=Message(arrays, replies[client].message.scalars))
        state = bench.after(state, replies, number)
    return bench, state, float((bench.head(state).scores(TEST_X).argmax(axis=1) == TEST_Y).mean())


def garbage(number: int, client: int, arrays: Arrays) -> Arrays:
    """One client sends large random numbers, another a thousand times its update."""
    rng = np.random.default_rng(number)
    if client == 3:
        return {name: (2e3 * rng.normal(size=array.shape)).astype(np.float32) for name, array in arrays.items()}
    return {name: 1000 * array for name, array in arrays.items()} if client == 7 else arrays


# ------------------------------------------------------------------------------------------------- robust combiners


ROBUST: dict[str, dict[str, Any]] = {
    "median": {"combine": "median"},
    "trimmed-mean": {"combine": "trimmed-mean", "trim": 0.2},
    "max_norm": {"max_norm": 0.5, "weighting": "uniform"},
}


def test_two_clients_spoil_a_mean() -> None:
    _, clean, right = played()
    _, spoilt, wrong = played(garbage)
    assert right > 0.8
    assert wrong < right - 0.15
    assert norm(spoilt.params) > 100 * norm(clean.params)


@pytest.mark.parametrize("name", ROBUST)
def test_two_clients_of_twelve_do_not_spoil_a_robust_combination(name: str) -> None:
    _, clean, right = played()
    _, state, accuracy = played(garbage, **ROBUST[name])
    assert accuracy > right - 0.04
    assert norm(state.params) < 2 * norm(clean.params)


@pytest.mark.parametrize("name", ["median", "trimmed-mean"])
def test_the_centre_stays_between_honest_updates(name: str) -> None:
    bench = bench_of(**ROBUST[name])
    state = bench.init()
    replies = [answer(bench, state, client) for client in range(K)]
    honest = updates_of(reply for client, reply in enumerate(replies) if client not in (3, 7))
    for client in (3, 7):
        arrays = garbage(0, client, dict(replies[client].message.arrays))
        replies[client] = replace(replies[client], message=Message(arrays, replies[client].message.scalars))
    moved = flat(bench.after(state, replies).params)
    assert (moved >= honest.min(axis=0)).all()
    assert (moved <= honest.max(axis=0)).all()
    sent = updates_of(replies)
    assert (np.abs(sent.mean(axis=0)) > np.abs(honest).max(axis=0)).mean() > 0.9  # where a mean would be


@pytest.mark.parametrize("server_lr", [1.0, 0.3])
@pytest.mark.parametrize(
    ("keys", "clients", "centre"),
    [
        ({"combine": "median"}, 12, lambda sent: np.median(sent, axis=0)),
        ({"combine": "median"}, 5, lambda sent: np.sort(sent, axis=0)[2]),
        ({"combine": "median"}, 2, lambda sent: sent.mean(axis=0)),
        ({"combine": "trimmed-mean", "trim": 0.25}, 12, lambda sent: trim_mean(sent, 0.25)),
        ({"combine": "trimmed-mean"}, 12, lambda sent: trim_mean(sent, 0.1)),
        ({"combine": "trimmed-mean", "trim": 0.45}, 12, lambda sent: trim_mean(sent, 0.45)),
        ({"combine": "trimmed-mean"}, 4, lambda sent: np.sort(sent, axis=0)[1:3].mean(axis=0)),
        ({"combine": "trimmed-mean"}, 3, lambda sent: np.median(sent, axis=0)),
        ({"combine": "trimmed-mean", "trim": 0.49}, 2, lambda sent: sent.mean(axis=0)),
        ({"combine": "trimmed-mean"}, 1, lambda sent: sent[0]),
    ],
)
def test_combiners_are_numpys_and_scipys(
    keys: dict[str, Any], clients: int, centre: Callable[[np.ndarray], np.ndarray], server_lr: float
) -> None:
    bench = bench_of(server_lr=server_lr, **keys)
    replies = [answer(bench, bench.init(), client) for client in range(clients)]
    state = bench.after(bench.init(), replies)
    np.testing.assert_allclose(flat(state.params), server_lr * centre(updates_of(replies)), rtol=1e-12, atol=1e-15)


def test_every_client_counts_alike_whatever_it_says_of_itself() -> None:
    """A million examples make no median."""
    bench = bench_of(combine="median")
    replies = [answer(bench, bench.init(), client) for client in range(5)]
    loud = [replace(r, message=Message(r.message.arrays, {"examples": 10 ** (2 * n), "steps": 1}))
            for n, r in enumerate(replies)]  # fmt: skip
    states = [bench.after(bench.init(), each) for each in (replies, loud)]
    np.testing.assert_array_equal(flat(states[0].params), flat(states[1].params))


@pytest.mark.parametrize("name", ROBUST)
def test_the_order_of_the_clients_is_nothing(name: str) -> None:
    bench = bench_of(**ROBUST[name])
    replies = [answer(bench, bench.init(), client) for client in range(K)]
    order = np.random.default_rng(1).permutation(K)
    one, two = (
        flat(bench.after(bench.init(), each).params) for each in (replies, [replies[client] for client in order])
    )
    if name == "max_norm":
        np.testing.assert_allclose(one, two, rtol=1e-12)
    else:
        np.testing.assert_array_equal(one, two)


def test_nothing_of_a_round_is_left_for_the_next() -> None:
    bench, state, _ = played(times=1, combine="median")
    begun = bench.channel.total()
    assert (begun.held, begun.sums, begun.weights) == ([], {}, {})
    assert {name: array.shape for name, array in pack(state).arrays.items()} == {
        "params/head.weight": (C, D), "params/head.bias": (C,),
    }  # fmt: skip
    other = bench_of(combine="median")  # which has heard nobody before
    ends = [
        each.after(at, [answer(each, at, client, 1) for client in range(4)], 1)
        for each, at in ((bench, state), (other, other.saved(state)))
    ]
    np.testing.assert_array_equal(flat(ends[0].params), flat(ends[1].params))


def test_a_refused_reply_leaves_what_was_heard() -> None:
    bench = bench_of(combine="median")
    state = bench.init()
    total = bench.total(state, [answer(bench, state, 0)])
    bad = reply_of({"update.head.weight": np.full((C, D), np.nan), "update.head.bias": np.zeros(C)})
    with pytest.raises(MessageError, match="NaN"):
        bench.add(total, state, bad)
    assert len(total.held) == total.weight("update") == 1


def one_number(*values: float, **keys: Any) -> Any:
    """The state of one weight and one bias, after a round in which clients sent these updates of the weight."""
    stage = stage_of(**keys)
    bench = Bench(stage, context_of(stage, 1, 1, clients=2 * len(values)))
    sent = [reply_of({"update.head.weight": [[value]], "update.head.bias": [-value]}) for value in values]
    return bench.after(bench.init(), sent)


def test_server_optimisers_step_along_the_median() -> None:
    # Of 0.1, 0.3 and 9 the median is 0.3.
    values, keys = (0.1, 9.0, 0.3), {"combine": "median"}
    weights = {
        method: float(one_number(*values, **keys, **more).params["head.weight"][0, 0])
        for method, more in {
            "fedavgm": {"method": "fedavgm", "server_lr": 0.5},
            "fedadam": {"method": "fedadam", "server_lr": 0.1},
            "fedadagrad": {"method": "fedadagrad", "server_lr": 0.1},
        }.items()
    }
    assert weights == pytest.approx(
        {
            "fedavgm": 0.5 * 0.3,
            "fedadam": 0.1 * 0.03 / ((0.99e-6 + 0.01 * 0.09) ** 0.5 + 1e-3),
            "fedadagrad": 0.1 * 0.3 / ((1e-6 + 0.09) ** 0.5 + 1e-3),
        },
        rel=1e-6,
    )


def test_running_statistics_are_combined_alike() -> None:
    given = [(1.0, 0.5), (2.0, 0.7), (900.0, 0.6), (4.0, 80.0)]
    for keys, mean, variance in (
        ({"combine": "median"}, 3.0, 0.65),
        ({"combine": "trimmed-mean"}, 3.0, 0.65),
        ({"combine": "mean"}, 907 / 4, 81.8 / 4),
    ):
        stage = stage_of(train="all", **keys)
        bench = Bench(stage, context_of(stage, 3, 5, backbone=backbone_of(Normed())))
        sent = []
        for one, other in given:
            values = {"statistics.body.norm.running_mean": one, "statistics.body.norm.running_var": other}
            sent.append(reply_of({n: np.full(s, values.get(n, 0.1)) for n, s in bench.method.blocks.items()}))
        statistics = bench.after(bench.init(), sent).statistics
        assert set(statistics) == {"body.norm.running_mean", "body.norm.running_var"}
        np.testing.assert_allclose(statistics["body.norm.running_mean"], np.full(4, mean), rtol=1e-6)
        np.testing.assert_allclose(statistics["body.norm.running_var"], np.full(4, variance), rtol=1e-6)


def with_tasks(**keys: Any) -> Bench:
    """Two tasks on one body that trains: three clients of the first, five of the second."""
    tasks = (Task("a", 2, Population(3, 3)), Task("b", 3, Population(5, 5)))
    stage = stage_of(train="all", **keys)
    return Bench(stage, context_of(stage, 5, 5, tasks=tasks, backbone=backbone_of(Plain())))


def sent_by(bench: Bench, task: int, value: float) -> Reply:
    return reply_of({name: np.full(shape, value) for name, shape in bench.method.expected(task).items()}, task=task)


def by_name(state: Any) -> Arrays:
    """The parameters of both tasks, those of one under names that end in its own."""
    tasks = zip("ab", state.tasks, strict=True)
    own = {f"{name}@{task}": value for task, part in tasks for name, value in part.params.items()}
    return {**state.common.params, **own}


def moved_by(bench: Bench, replies: Iterable[Reply]) -> Arrays:
    """How far a round moves each parameter."""
    begin = bench.init()
    end = by_name(bench.after(begin, replies))
    assert {name.partition("@")[2] for name in end} == {"", "a", "b"}
    return {name: end[name] - value for name, value in by_name(begin).items()}


def test_each_task_has_a_median_of_its_own() -> None:
    bench = with_tasks(combine="median")
    values = [(0, 0.1), (1, 0.2), (1, 0.3), (0, 0.5), (1, 70.0)]
    for name, moved in moved_by(bench, [sent_by(bench, task, value) for task, value in values]).items():
        # Of all five; of 0.1 and 0.5; of 0.2, 0.3 and 70.
        expected = {"": 0.3, "a": 0.3, "b": 0.3}[name.partition("@")[2]]
        np.testing.assert_allclose(moved, expected, rtol=1e-6)
    for name, moved in moved_by(bench, [sent_by(bench, task, value) for task, value in values[:4]]).items():
        expected = {"": 0.25, "a": 0.3, "b": 0.25}[name.partition("@")[2]]
        np.testing.assert_allclose(moved, expected, rtol=1e-6)


def test_max_norm_by_hand() -> None:
    bench = bench_of(max_norm=2.0, weighting="uniform")
    long, short = (np.zeros((C, D)) for _ in range(2))
    long[0, 0], short[1, 1] = 3.0, 1.5
    sent = [
        reply_of({"update.head.weight": long, "update.head.bias": [0, 4.0, 0, 0]}),  # of norm 5
        reply_of({"update.head.weight": short, "update.head.bias": np.zeros(C)}),
    ]
    state = bench.after(bench.init(), sent)
    weight = np.zeros((C, D))
    weight[0, 0], weight[1, 1] = 3.0 * 2 / 5 / 2, 1.5 / 2
    np.testing.assert_allclose(state.params["head.weight"], weight, rtol=1e-12)
    np.testing.assert_allclose(state.params["head.bias"], [0, 4.0 * 2 / 5 / 2, 0, 0], rtol=1e-12)


def test_a_client_shortens_its_own_update_and_adds_up_what_counts() -> None:
    """The dual of FedDyn is the sum of the updates on both sides: of the shortened ones."""
    free, bound = (bench_of(method="feddyn", **keys) for keys in ({}, {"max_norm": 0.2}))
    whole, short = (answer(bench, bench.init(), 4) for bench in (free, bound))
    update = updates_of([whole])[0]
    length = float(np.linalg.norm(update))
    assert length > 0.3
    np.testing.assert_allclose(updates_of([short])[0], update * 0.2 / length, rtol=1e-5)
    for name, kept in short.state.items():
        sent = short.message.arrays[name.replace("dual.", "update.")]
        np.testing.assert_allclose(kept, sent, rtol=1e-6)
    dual = bound.after(bound.init(), [short]).memory["dual"]
    for name, mean in dual.items():
        np.testing.assert_allclose(mean, short.state[f"dual.{name}"] / K, rtol=1e-6)


def test_a_short_update_is_left_alone_bit_for_bit() -> None:
    _, plain, _ = played(times=2)
    _, limited, _ = played(times=2, max_norm=1e3)
    np.testing.assert_array_equal(flat(plain.params), flat(limited.params))
    given = {"a": np.array([3.0, 4.0], np.float32)}
    assert clipped(given, 5.0)["a"] is given["a"]


def test_combiners_on_arrays_of_any_shape() -> None:
    values = RNG.normal(size=(7, 2, 3))
    np.testing.assert_array_equal(median(values), np.sort(values, axis=0)[3])
    np.testing.assert_allclose(trimmed_mean(values, 0.3), trim_mean(values, 0.3), rtol=1e-12)
    assert median(np.array([3.0, 1.0, 2.0])).shape == ()
    ranks = np.arange(100.0)
    for percent in range(1, 50):  # as many as the share says, where its product is a little less in floating point
        inside = np.full(100, np.nan)
        inside[percent : 100 - percent] = ranks[percent : 100 - percent]
        assert trimmed_mean(
            np.where(np.isnan(inside), np.sign(ranks - 50) * 1e6, ranks), percent / 100
        ) == pytest.approx(49.5)


# --------------------------------------------------------------------------------------------------------- DP-FedAvg


def zeros() -> Reply:
    return reply_of({"update.head.weight": np.zeros((C, D)), "update.head.bias": np.zeros(C)}, {})


def noise_of(bench: Bench) -> ServerNoise:
    (link,) = (link for link in bench.channel.links if isinstance(link, ServerNoise))
    return link


def test_clients_shorten_their_updates_and_say_nothing_else() -> None:
    plain, private = bench_of(weighting="uniform"), bench_of(**PRIVATE)
    free, bound = (answer(bench, bench.init(), 4).message for bench in (plain, private))
    update = flat(dict(free.arrays))
    length = np.linalg.norm(update)
    assert length > 0.6
    np.testing.assert_allclose(flat(dict(bound.arrays)), update * 0.5 / length, rtol=1e-5)
    assert set(bound.arrays) == set(free.arrays)
    assert all(array.dtype == np.float32 for array in bound.arrays.values())
    assert bound.scalars == {}


def test_the_server_shortens_what_a_client_did_not() -> None:
    bench = bench_of(**PRIVATE)
    update = np.zeros((C, D))
    update[0, :2] = 30.0, 40.0
    sent = reply_of({"update.head.weight": update, "update.head.bias": np.zeros(C)}, {})
    sums = bench.total(bench.init(), [sent]).sums
    np.testing.assert_allclose(sums["update.head.weight"], update * 0.5 / 50, rtol=1e-12)


@pytest.mark.parametrize("sampled", [None, 4])
def test_noise_on_the_sum_is_as_claimed(sampled: int | None) -> None:
    """Over seeds, with updates of zero: the noise is all there is, over the number of clients that were asked."""
    keys = PRIVATE | {"rounds": 3} | ({"clients_per_round": sampled} if sampled else {})
    noise = []
    for seed in range(300):
        bench = bench_of(seed, **keys)
        noise.append(flat(bench.after(bench.init(), [zeros()] * 2).params) * (sampled or K))
    if sampled is None:  # one client more or less moves the sum by the clip
        claimed = get_sigma_gaussian(2.0, 1e-5) * 3**0.5 * 0.5
    else:  # one in the place of another moves it by twice that
        claimed = noise_multiplier(2.0, 1e-5, 3, sampled, K) * 2 * 0.5
    values = np.array(noise)
    # 300 × 28 values: the deviation of their deviation is claimed / √(2 · 8400) = 0.8 %.
    assert values.std() == pytest.approx(claimed, rel=0.03)
    assert abs(values.mean()) < 4 * claimed / values.size**0.5
    np.testing.assert_allclose(values.std(axis=0), claimed, rtol=0.2)
    assert abs(np.corrcoef(values[:, 0], values[:, 1])[0, 1]) < 0.25
    assert np.mean(np.abs(values) < claimed) == pytest.approx(0.6827, abs=0.02)  # it is Gaussian


def test_noise_of_clients_is_as_claimed() -> None:
    """Their clipped updates are any two of length clip: 2 · clip apart, in every round, with nothing for sampling."""
    server = {"epsilon": 2.0, "clip": 0.5}
    keys = {"weighting": "uniform", "rounds": 3, "clients_per_round": 4}
    noise = []
    for seed in range(30):
        quiet, loud = (bench_of(seed, privacy=server | each, **keys) for each in ({}, {"noise": "client"}))
        for client in range(K):
            both = [flat(dict(answer(bench, bench.init(), client).message.arrays)) for bench in (loud, quiet)]
            noise.append(both[0] - both[1])
    claimed = get_sigma_gaussian(2.0, 1e-5) * 3**0.5 * 2 * 0.5
    values = np.array(noise)
    assert values.std() == pytest.approx(claimed, rel=0.03)
    assert len(np.unique(values[:, 0])) == len(values)
    bench = bench_of(privacy=server | {"noise": "client"}, **keys)
    replies = [answer(bench, bench.init(), client) for client in range(3)]
    assert all(reply.message.scalars == {} for reply in replies)
    end = bench.after(bench.init(), replies)  # a plain mean, with no noise of the server's
    np.testing.assert_allclose(flat(end.params), updates_of(replies).mean(axis=0), rtol=1e-12)


def test_an_update_that_is_not_finite_does_not_show() -> None:
    bench = bench_of(**PRIVATE)
    given = {"a": np.array([np.inf, 1.0], np.float32), "b": np.array([np.nan], np.float32)}
    sent = noise_of(bench).encode(Message(given), Sender(0, 0))
    assert {name: value.tolist() for name, value in sent.arrays.items()} == {"a": [0, 0], "b": [0]}


def test_noise_of_many_parameters_is_no_explosion() -> None:
    """The norm of the noise alone is more than ten thousand times that of the model."""
    keys = {"weighting": "uniform", "privacy": {"epsilon": 0.001, "clip": 10.0, "noise": "client"}}
    bench = bench_of(**keys)
    reply = answer(bench, bench.init(), 0)
    assert np.linalg.norm(updates_of([reply])) > 1e4
    assert bench.total(bench.init(), [reply]).weight("update") == 1


@pytest.mark.parametrize("noise", ["server", "client"])
def test_hardly_any_noise_and_a_wide_clip_are_fedavg(noise: str) -> None:
    _, plain, _ = played(weighting="uniform")
    _, private, _ = played(weighting="uniform", privacy={"epsilon": 1e12, "clip": 50.0, "noise": noise})
    np.testing.assert_allclose(flat(private.params), flat(plain.params), atol=2e-3)
    assert norm(plain.params) > 1


def test_clients_that_do_not_answer_leave_the_divisor() -> None:
    keys = {"weighting": "uniform", "privacy": {"epsilon": 1e12, "clip": 1.0}}
    bench = bench_of(**keys)
    replies = [answer(bench, bench.init(), client) for client in range(K)]
    for count in (K, 5, 1):
        end = bench.after(bench.init(), replies[:count])
        np.testing.assert_allclose(flat(end.params), updates_of(replies[:count]).sum(axis=0) / K, atol=1e-6)
    drawn = bench_of(clients_per_round=4, **keys)
    end = drawn.after(drawn.init(), replies[:3])
    np.testing.assert_allclose(flat(end.params), updates_of(replies[:3]).sum(axis=0) / 4, atol=1e-5)


def test_noise_is_the_runs_own_and_the_rounds_own() -> None:
    def noise(seed: int, round: int) -> np.ndarray:
        bench = bench_of(seed, **PRIVATE)
        state = bench.saved(bench.init())  # as after an interruption
        return flat(bench.after(state, [zeros()], round).params)

    np.testing.assert_array_equal(noise(0, 2), noise(0, 2))
    assert not np.isclose(noise(0, 2), noise(0, 3)).any()
    assert not np.isclose(noise(0, 2), noise(1, 2)).any()


@pytest.mark.parametrize("noise", ["server", "client"])
def test_the_budget_is_spent_round_by_round(noise: str) -> None:
    budget = {"epsilon": 2.0, "delta": 1e-6, "clip": 0.5, "noise": noise}
    bench = bench_of(weighting="uniform", privacy=budget, clients_per_round=None if noise == "server" else 4)
    assert bench.channel.spent(0)["epsilon"] == 0
    found = [bench.channel.spent(rounds) for rounds in range(1, 6)]
    epsilons = [each["epsilon"] for each in found]
    multiplier = found[0]["noise_multiplier"]
    assert multiplier == pytest.approx(get_sigma_gaussian(2.0, 1e-6) * 5**0.5, rel=1e-5)
    expected = [get_epsilon_gaussian(multiplier / rounds**0.5, 1e-6) for rounds in range(1, 6)]
    assert epsilons == pytest.approx(expected, rel=1e-6)
    assert epsilons == sorted(set(epsilons))
    assert 1.999 < epsilons[-1] <= 2.0
    # An example that is replaced moves a sum that its client is in or not twice as far as the client's clip.
    twice = {"server": 2, "client": 1}[noise]
    examples = [get_epsilon_gaussian(multiplier / twice / rounds**0.5, 1e-6) for rounds in range(1, 6)]
    assert [each["example_epsilon"] for each in found] == pytest.approx(examples, rel=1e-5)
    assert all(each["example_epsilon"] >= exact for each, exact in zip(found, examples, strict=True))
    numbers = ("epsilon", "noise_multiplier", "example_epsilon")
    rest = {name: value for name, value in found[-1].items() if name not in numbers}
    released = {"server": "a model after every round", "client": "every client's update in every round"}[noise]
    assert rest == {"delta": 1e-6, "unit": "client", "noise": noise, "clip": 0.5, "released": released}


def test_sampling_spends_no_more_than_the_budget() -> None:
    bench = bench_of(**(PRIVATE | {"rounds": 3, "clients_per_round": 4}))
    epsilons = [bench.channel.spent(rounds)["epsilon"] for rounds in range(4)]
    assert epsilons == sorted(set(epsilons))
    assert 1.9 < epsilons[-1] <= 2.0
    assert bench.channel.spent(3)["example_epsilon"] == epsilons[-1]  # neighbours differ by what is replaced already


def test_methods_without_privacy_have_spent_nothing() -> None:
    for keys in ({}, {"method": "fedmezo"}, {"method": "distmezo"}, {"method": "personalise"}):
        keys = keys if keys.get("method") != "personalise" else {**keys, "update": "head"}
        full = {"method": "fedavg", **({} if "update" in keys else {"train": "head"}), **keys}
        stage = Recipe.parse({"data": {"dataset": "x"}, "stages": [full]}).stages[0]
        bench = Bench(stage, context_of(stage, C, D, clients=K, examples=K * PER))
        assert [bench.channel.spent(rounds) for rounds in (0, 3)] == [None, None]


def test_noise_hides_which_tasks_were_heard_of() -> None:
    bench = with_tasks(weighting="uniform", privacy={"epsilon": 1.0, "clip": 2.0})
    quiet = moved_by(bench, [sent_by(bench, 0, 0.0)])
    # A round asks all eight clients: three of the first task, five of the second.
    divisors = {name: {"": 8, "a": 3, "b": 5}[name.partition("@")[2]] for name in quiet}
    for group in ("", "a", "b"):
        noise = [value.ravel() * divisors[n] for n, value in quiet.items() if n.partition("@")[2] == group]
        values = np.concatenate(noise)
        assert (values != 0).all()
        assert values.std() == pytest.approx(noise_of(bench).deviation, rel=0.6)
    moved = moved_by(bench, [sent_by(bench, 0, 1.0)])
    size = sum(int(np.prod(shape)) for shape in bench.method.expected(0).values())
    for name, value in moved.items():  # the update of ones, shortened as a whole to a norm of 2, and the same noise
        step = 2 / size**0.5 / divisors[name] if not name.endswith("@b") else 0.0
        np.testing.assert_allclose(value - quiet[name], step, rtol=1e-6, atol=1e-12)


def test_a_task_of_few_clients_is_divided_by_one_at_least() -> None:
    keys = {"weighting": "uniform", "rounds": 1, "privacy": {"epsilon": 1e12, "clip": 100.0}}
    bench = with_tasks(clients_per_round=2, **keys)  # on average three quarters of a client of the first task
    for name, moved in moved_by(bench, [sent_by(bench, 0, 0.5), sent_by(bench, 1, 0.5)]).items():
        divisor = {"": 2, "a": 1, "b": 2 * 5 / 8}[name.partition("@")[2]]
        total = 1.0 if "@" not in name else 0.5
        np.testing.assert_allclose(moved, total / divisor, atol=0.02)


@pytest.mark.parametrize(("key", "given"), [("privacy", PRIVATE), ("max_norm", {"max_norm": 1.0})])
def test_running_statistics_would_not_be_hidden_or_bounded(key: str, given: dict[str, Any]) -> None:
    """The attack: a client whose update is of norm one, and whose running mean is a million."""

    def build(network: Any, **keys: Any) -> None:
        stage = stage_of(**keys, **given)
        Bench(stage, context_of(stage, 3, 5, (0, 4), K, K * PER, backbone=backbone_of(network)))

    with pytest.raises(HeadstartError, match=rf"^stages\.4\.norm_statistics: with {key}, .* use 'freeze' or 'batch'$"):
        build(Normed(), train="all")
    for mode in ("freeze", "batch"):
        build(Normed(), train="all", norm_statistics=mode)
    build(Normed(), train="head")
    build(Plain(), train="all")


@pytest.mark.parametrize("noise", ["server", "client"])
def test_many_clients_at_once_are_as_private_as_one_by_one(noise: str) -> None:
    bench = bench_of(weighting="uniform", privacy={"epsilon": 5.0, "clip": 0.5, "noise": noise})
    begin = bench.init()
    everybody = Cohort(np.arange(K), X, np.arange(K * PER), Y, WHO, np.ones(K, bool), lambda name, start: np.zeros(0))
    together = bench.answer(everybody, bench.broadcast(begin))
    alone = [answer(bench, begin, client) for client in range(K)]
    np.testing.assert_allclose(updates_of(together), updates_of(alone), rtol=1e-4, atol=1e-5)


def test_slora_spends_one_budget_over_both_of_its_parts() -> None:
    keys = {"rank": 2, "alpha_lora": 6.0, "density": 0.3, "priming": 0.4, "batch_size": "full", "weighting": "uniform"}
    stage = stage_of(method="slora", train="lora", privacy={"epsilon": 4.0, "clip": 1.0}, **keys)
    backbone = tiny_vit()
    module = attach("lora", backbone, stage.module_settings, seed=3)
    context = context_of(stage, C, WIDTH, clients=3, examples=6, backbone=backbone, module=module)
    bench = Bench(stage, context)
    pictures = Examples("image", RNG.integers(0, 256, (6, 8, 8, 3), np.uint8), (), np.arange(6), Y[:6])
    source, states = Inputs(backbone, pictures, "x"), [bench.init()]
    for number in range(5):
        before, replies = states[-1], []
        for client in range(3):
            cohort = cohort_of(bench, client, source, rows := np.array([2 * client, 2 * client + 1]), Y[rows])
            replies += bench.answer(cohort, bench.broadcast(before, number))
        assert all(norm(reply.message.arrays) <= 1 + 1e-6 and not reply.message.scalars for reply in replies)
        sums = bench.total(before, replies, number).sums
        states.append(after := bench.after(before, replies, number))
        for name in before.inner.params if before.primed == after.primed else ():  # noise on all that is trained
            moved = after.inner.params[name] - before.inner.params[name]
            assert not np.isclose(3 * moved, sums[f"update.{name}"]).any()
    assert [state.primed for state in states] == [False, False, True, True, True, True]
    epsilons = [bench.channel.spent(number)["epsilon"] for number in range(6)]
    sigma = get_sigma_gaussian(4.0, 1e-5) * 5**0.5  # the three clients take part in all five rounds
    assert epsilons[0] == 0
    assert epsilons[1:] == pytest.approx([get_epsilon_gaussian(sigma / n**0.5, 1e-5) for n in range(1, 6)], rel=1e-4)
    assert epsilons[-1] <= 4.0


# ---------------------------------------------------------------------------------------------------- contradictions


UNIFORM = {"weighting": "uniform"}
BUDGET = {"privacy": {"epsilon": 1.0}}
SENTENCES: dict[str, dict[str, Any]] = {
    "combine: scaffold sends 'control', too, and nothing limits that; use another method": {
        "method": "scaffold", "combine": "median",
    },
    "max_norm: scaffold sends 'control', too, and nothing limits that; use another method": {
        "method": "scaffold", "max_norm": 1.0,
    },
    "combine: fednova sends 'steps', too, and nothing limits that; use another method": {
        "method": "fednova", "combine": "trimmed-mean",
    },
    "max_norm: fednova sends 'steps', too, and nothing limits that; use another method": {
        "method": "fednova", "max_norm": 1.0,
    },
    "combine: what feddyn's clients accumulate adds up to the mean of the updates; use 'mean'": {
        "method": "feddyn", "combine": "median",
    },
    "combine: with hide_task the server needs no more than sums; use 'mean'": {"combine": "median", "hide_task": True},
    "combine: with local-only no update travels that this could apply to; leave it out": {
        "method": "local-only", "combine": "median",
    },
    "max_norm: with centralised no update travels that this could apply to; leave it out": {
        "method": "centralised", "max_norm": 1.0,
    },
    "privacy: with centralised no update travels that this could apply to; leave it out": {
        "method": "centralised", **BUDGET,
    },
    "privacy: scaffold sends 'control', too, and nothing hides that; use another method": {
        "method": "scaffold", **UNIFORM, **BUDGET,
    },
    "privacy: fednova sends 'steps', too, and nothing hides that; use another method": {
        "method": "fednova", **UNIFORM, **BUDGET,
    },
    "privacy: feddyn's server adds up the updates of all rounds, and with them their noise; use another method": {
        "method": "feddyn", **UNIFORM, **BUDGET,
    },
    **{
        f"privacy: {method} leaves a model with each client that nothing hides; use another method": {
            "method": method, **UNIFORM, **BUDGET,
        }
        for method in ("fedper", "fedrep", "lg-fedavg", "ditto")
    },
    "combine: privacy hides a client in a sum; use 'mean'": {"combine": "median", **UNIFORM, **BUDGET},
    "weighting: with privacy every client counts alike; use 'uniform'": BUDGET,
    "share: with privacy the server cannot hold examples of the clients; leave it 0": {
        "share": 0.1, **UNIFORM, **BUDGET,
    },
    "sampling: privacy is accounted for where all clients are drawn alike; use 'clients'": {
        "sampling": "tasks", **UNIFORM, **BUDGET,
    },
}  # fmt: skip


def problems_of(stage: dict[str, Any], several: bool = False) -> list[str]:
    full = {"method": "fedavg", "train": "head"} | stage
    tasks = [{"name": name, "dataset": "x"} for name in "ab"]
    try:
        Recipe.parse({**({"tasks": tasks} if several else {"data": {"dataset": "x"}}), "stages": [full]})
    except RecipeError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize("sentence", SENTENCES)
def test_what_contradicts_robust_combiners_and_privacy(sentence: str) -> None:
    assert problems_of(SENTENCES[sentence]) == [f"stages.0.{sentence}"]


def test_noise_of_clients_shows_their_tasks() -> None:
    private = UNIFORM | {"privacy": {"epsilon": 1.0, "noise": "client"}}
    sentence = "privacy.noise: with several tasks, what a client sends shows which is its own; use 'server'"
    assert problems_of(private, several=True) == [f"stages.0.{sentence}"]
    assert problems_of(private) == []
    assert problems_of(UNIFORM | BUDGET, several=True) == []


@pytest.mark.parametrize(
    "stage",
    [
        {"method": "feddyn", "max_norm": 1.0},
        {"method": "fedadam", **UNIFORM, **BUDGET, "max_norm": 1.0},
        {"method": "per-fedavg", **UNIFORM, **BUDGET},
        {"method": "fedper", "combine": "trimmed-mean"},
        {"hide_task": True, **UNIFORM, **BUDGET},
        {"method": "scaffold", "combine": "mean"},
        {"method": "fedyolo", "train": "lora", **BUDGET},
    ],
)
def test_what_goes_together(stage: dict[str, Any]) -> None:
    assert problems_of(stage) == []


def test_a_resolved_recipe_is_a_recipe() -> None:
    """With every default written out, nothing contradicts what it did not contradict before."""
    stages = [{"train": "head", "method": "fedavg", **keys} for keys in (ROBUST["median"], PRIVATE, {"max_norm": 1.0})]
    recipe = Recipe.parse({"data": {"dataset": "x"}, "stages": stages})
    assert Recipe.parse(recipe.model_dump(exclude_none=True)) == recipe
