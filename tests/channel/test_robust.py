"""Clients that are not to be trusted, and clients that are not to be known: robust combiners, and DP-FedAvg."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian, get_sigma_gaussian
from scipy.stats import trim_mean

from headstart.channel.accounting import noise_multiplier
from headstart.channel.robust import median, norm_of, shortened, trimmed_mean
from headstart.config.recipe import Recipe
from headstart.core.message import Message
from headstart.errors import HeadstartError, MessageError, RecipeError
from headstart.methods import Reply, Setting, TaskSetting, build
from headstart.solvers.cohort import Cohort
from tests.methods.test_bodies import Normed, Plain, backbone_of
from tests.methods.test_slora import Run

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


def method_of(seed: int = 0, clients: int = K, **keys: Any) -> Any:
    return build(stage_of(**keys), Setting(C, D, (seed, 0), clients, clients * PER))


def answer(method: Any, state: Any, client: int) -> Reply:
    rows = np.flatnonzero(client == WHO)

    def nothing(name: str, start: np.ndarray | None) -> np.ndarray:
        return np.zeros((1, *method.kept_shapes[name]), np.float32)

    cohort = Cohort(np.array([client]), X, rows, Y[rows], WHO[rows], np.array([True]), nothing)
    (reply,) = method.answer(cohort, method.instruct(state, state.round, -1))
    return reply


def reply_of(arrays: Arrays, scalars: dict[str, Any] | None = None, task: int = 0) -> Reply:
    given = {name: np.asarray(value, np.float32) for name, value in arrays.items()}
    message = Message(given, {"examples": 1, "steps": 1} if scalars is None else scalars)
    return Reply(np.array([0]), message, np.array([0]), np.array([0]), task=task)


def folded(method: Any, state: Any, replies: Iterable[Reply]) -> Any:
    for reply in replies:
        state = method.fold(state, reply)
    return state


def flat(vectors: Arrays) -> np.ndarray:
    return np.concatenate([np.asarray(vectors[name], np.float64).ravel() for name in sorted(vectors)])


def updates_of(replies: Iterable[Reply]) -> np.ndarray:
    """[n, P], of what was sent."""
    return np.stack([flat({n: a for n, a in r.message.arrays.items() if n.startswith("update.")}) for r in replies])


def played(attack: Attack | None = None, times: int = 5, **keys: Any) -> Any:
    """The method, its state after the rounds, and the accuracy of the head on examples nobody trained on."""
    method = method_of(**keys)
    state = method.open()
    for number in range(times):
        replies = [answer(method, state, client) for client in range(K)]
        for client in range(K if attack else 0):
            arrays = attack(number, client, dict(replies[client].message.arrays))
            replies[client] = replace(replies[client], message=Message(arrays, replies[client].message.scalars))
        state = method.close(folded(method, state, replies))
    return method, state, float((method.head(state).scores(TEST_X).argmax(axis=1) == TEST_Y).mean())


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
    assert norm_of(spoilt.parameters) > 100 * norm_of(clean.parameters)


@pytest.mark.parametrize("name", ROBUST)
def test_two_clients_of_twelve_do_not_spoil_a_robust_combination(name: str) -> None:
    _, clean, right = played()
    _, state, accuracy = played(garbage, **ROBUST[name])
    assert accuracy > right - 0.04
    assert norm_of(state.parameters) < 2 * norm_of(clean.parameters)


@pytest.mark.parametrize("name", ["median", "trimmed-mean"])
def test_the_centre_stays_between_honest_updates(name: str) -> None:
    method = method_of(**ROBUST[name])
    state = method.open()
    replies = [answer(method, state, client) for client in range(K)]
    honest = updates_of(reply for client, reply in enumerate(replies) if client not in (3, 7))
    for client in (3, 7):
        arrays = garbage(0, client, dict(replies[client].message.arrays))
        replies[client] = replace(replies[client], message=Message(arrays, replies[client].message.scalars))
    moved = flat(method.close(folded(method, state, replies)).parameters)
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
    method = method_of(server_lr=server_lr, **keys)
    replies = [answer(method, method.open(), client) for client in range(clients)]
    state = method.close(folded(method, method.open(), replies))
    np.testing.assert_allclose(flat(state.parameters), server_lr * centre(updates_of(replies)), rtol=1e-12, atol=1e-15)


def test_every_client_counts_alike_whatever_it_says_of_itself() -> None:
    """A million examples make no median."""
    method = method_of(combine="median")
    replies = [answer(method, method.open(), client) for client in range(5)]
    loud = [replace(r, message=Message(r.message.arrays, {"examples": 10 ** (2 * n), "steps": 1}))
            for n, r in enumerate(replies)]  # fmt: skip
    states = [method.close(folded(method, method.open(), each)) for each in (replies, loud)]
    np.testing.assert_array_equal(flat(states[0].parameters), flat(states[1].parameters))


@pytest.mark.parametrize("name", ROBUST)
def test_the_order_of_the_clients_is_nothing(name: str) -> None:
    method = method_of(**ROBUST[name])
    replies = [answer(method, method.open(), client) for client in range(K)]
    order = np.random.default_rng(1).permutation(K)
    one, two = (
        flat(method.close(folded(method, method.open(), each)).parameters)
        for each in (replies, [replies[client] for client in order])
    )
    if name == "max_norm":
        np.testing.assert_allclose(one, two, rtol=1e-12)
    else:
        np.testing.assert_array_equal(one, two)


def test_nothing_of_a_round_is_left_for_the_next() -> None:
    method, state, _ = played(times=1, combine="median")
    assert (state.heard, state.sums, state.tallies) == ((), {}, {})
    thawed = method.thaw(method.freeze(state))
    ends = [method.close(folded(method, each, [answer(method, each, c) for c in range(4)])) for each in (state, thawed)]
    np.testing.assert_array_equal(flat(ends[0].parameters), flat(ends[1].parameters))


def test_a_refused_reply_leaves_what_was_heard() -> None:
    method = method_of(combine="median")
    state = folded(method, method.open(), [answer(method, method.open(), 0)])
    bad = reply_of({"update.head.weight": np.full((C, D), np.nan), "update.head.bias": np.zeros(C)})
    with pytest.raises(MessageError, match="NaN"):
        method.fold(state, bad)
    assert len(state.heard) == 1


def one_number(*values: float, statistics: Iterable[tuple[float, float]] = (), **keys: Any) -> Any:
    """A method of one weight and one bias, after a round in which clients sent these updates of the weight."""
    method: Any = build(stage_of(**keys), Setting(1, 1, (0, 0), 2 * len(values)))
    state = method.open()
    given = list(statistics)
    if given:
        start = {"body.norm.running_mean": np.zeros(1), "body.norm.running_var": np.ones(1)}
        state = replace(state, statistics=start)
    for number, value in enumerate(values):
        arrays = {"update.head.weight": [[value]], "update.head.bias": [-value]}
        for name, entry in zip(state.statistics, given[number] if given else (), strict=True):
            arrays[f"statistics.{name}"] = [entry]
        state = method.fold(state, reply_of(arrays))
    return method.close(state)


def test_server_optimisers_step_along_the_median() -> None:
    # Of 0.1, 0.3 and 9 the median is 0.3.
    values, keys = (0.1, 9.0, 0.3), {"combine": "median"}
    weights = {
        method: float(one_number(*values, **keys, **more).parameters["head.weight"][0, 0])
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
    statistics = [(1.0, 0.5), (2.0, 0.7), (900.0, 0.6), (4.0, 80.0)]
    for keys, mean, variance in (
        ({"combine": "median"}, 3.0, 0.65),
        ({"combine": "trimmed-mean"}, 3.0, 0.65),
        ({"combine": "mean"}, 907 / 4, 81.8 / 4),
    ):
        state = one_number(0.1, 0.2, 0.3, 0.4, statistics=statistics, **keys)
        assert float(state.statistics["body.norm.running_mean"][0]) == pytest.approx(mean, rel=1e-6)
        assert float(state.statistics["body.norm.running_var"][0]) == pytest.approx(variance, rel=1e-6)


def with_tasks(**keys: Any) -> Any:
    """Two tasks on one body that trains: three clients of the first, five of the second."""
    tasks = (TaskSetting("a", 2, 3), TaskSetting("b", 3, 5))
    setting = Setting(5, 5, (0, 0), 8, 8, backbone=backbone_of(Plain()), tasks=tasks)
    return build(stage_of(train="all", **keys), setting)


def sent_by(method: Any, task: int, value: float) -> Reply:
    names = method.shared_names(task).values()
    arrays = {f"update.{name}": np.full(method.shapes[name], value) for name in names}
    return reply_of(arrays, task=task)


def test_each_task_has_a_median_of_its_own() -> None:
    method = with_tasks(combine="median")
    begin = method.open()
    values = [(0, 0.1), (1, 0.2), (1, 0.3), (0, 0.5), (1, 70.0)]
    end = method.close(folded(method, begin, [sent_by(method, task, value) for task, value in values]))
    for name in method.shapes:
        # Of all five; of 0.1 and 0.5; of 0.2, 0.3 and 70.
        expected = {"": 0.3, "a": 0.3, "b": 0.3}[name.partition("@")[2]]
        np.testing.assert_allclose(end.parameters[name] - begin.parameters[name], expected, rtol=1e-6)
    end = method.close(folded(method, begin, [sent_by(method, task, value) for task, value in values[:4]]))
    for name in method.shapes:
        expected = {"": 0.25, "a": 0.3, "b": 0.25}[name.partition("@")[2]]
        np.testing.assert_allclose(end.parameters[name] - begin.parameters[name], expected, rtol=1e-6)


def test_max_norm_by_hand() -> None:
    method = method_of(max_norm=2.0, weighting="uniform")
    long, short = (np.zeros((C, D)) for _ in range(2))
    long[0, 0], short[1, 1] = 3.0, 1.5
    sent = [
        reply_of({"update.head.weight": long, "update.head.bias": [0, 4.0, 0, 0]}),  # of norm 5
        reply_of({"update.head.weight": short, "update.head.bias": np.zeros(C)}),
    ]
    state = method.close(folded(method, method.open(), sent))
    weight = np.zeros((C, D))
    weight[0, 0], weight[1, 1] = 3.0 * 2 / 5 / 2, 1.5 / 2
    np.testing.assert_allclose(state.parameters["head.weight"], weight, rtol=1e-12)
    np.testing.assert_allclose(state.parameters["head.bias"], [0, 4.0 * 2 / 5 / 2, 0, 0], rtol=1e-12)


def test_a_short_update_is_left_alone_bit_for_bit() -> None:
    _, plain, _ = played(times=2)
    _, limited, _ = played(times=2, max_norm=1e3)
    np.testing.assert_array_equal(flat(plain.parameters), flat(limited.parameters))
    given = {"a": np.array([3.0, 4.0], np.float32)}
    assert shortened(given, 5.0)["a"] is given["a"]


def test_combiners_on_arrays_of_any_shape() -> None:
    values = RNG.normal(size=(7, 2, 3))
    np.testing.assert_array_equal(median(values), np.sort(values, axis=0)[3])
    np.testing.assert_allclose(trimmed_mean(values, 0.3), trim_mean(values, 0.3), rtol=1e-12)
    assert median(np.array([3.0, 1.0, 2.0])).shape == ()


# --------------------------------------------------------------------------------------------------------- DP-FedAvg


def zeros() -> Reply:
    return reply_of({"update.head.weight": np.zeros((C, D)), "update.head.bias": np.zeros(C)}, {})


def test_clients_shorten_their_updates_and_say_nothing_else() -> None:
    plain, private = method_of(weighting="uniform"), method_of(**PRIVATE)
    free, bound = (answer(method, method.open(), 4).message for method in (plain, private))
    update = flat(dict(free.arrays))
    norm = np.linalg.norm(update)
    assert norm > 0.6
    np.testing.assert_allclose(flat(dict(bound.arrays)), update * 0.5 / norm, rtol=1e-5)
    assert set(bound.arrays) == set(free.arrays)
    assert all(array.dtype == np.float32 for array in bound.arrays.values())
    assert bound.scalars == {}


def test_the_server_shortens_what_a_client_did_not() -> None:
    method = method_of(**PRIVATE)
    update = np.zeros((C, D))
    update[0, :2] = 30.0, 40.0
    state = method.fold(method.open(), reply_of({"update.head.weight": update, "update.head.bias": np.zeros(C)}, {}))
    np.testing.assert_allclose(state.sums["update"]["head.weight"], update * 0.5 / 50, rtol=1e-12)


@pytest.mark.parametrize("sampled", [None, 4])
def test_noise_on_the_sum_is_as_claimed(sampled: int | None) -> None:
    """Over seeds, with updates of zero: the noise is all there is, over the number of clients that were asked."""
    keys = PRIVATE | {"rounds": 3} | ({"clients_per_round": sampled} if sampled else {})
    noise = []
    for seed in range(300):
        method = method_of(seed, **keys)
        noise.append(flat(method.close(folded(method, method.open(), [zeros()] * 2)).parameters) * (sampled or K))
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
        quiet, loud = (method_of(seed, privacy=server | each, **keys) for each in ({}, {"noise": "client"}))
        for client in range(K):
            both = [flat(dict(answer(method, method.open(), client).message.arrays)) for method in (loud, quiet)]
            noise.append(both[0] - both[1])
    claimed = get_sigma_gaussian(2.0, 1e-5) * 3**0.5 * 2 * 0.5
    values = np.array(noise)
    assert values.std() == pytest.approx(claimed, rel=0.03)
    assert len(np.unique(values[:, 0])) == len(values)
    method = method_of(privacy=server | {"noise": "client"}, **keys)
    replies = [answer(method, method.open(), client) for client in range(3)]
    assert all(reply.message.scalars == {} for reply in replies)
    end = method.close(folded(method, method.open(), replies))  # a plain mean, with no noise of the server's
    np.testing.assert_allclose(flat(end.parameters), updates_of(replies).mean(axis=0), rtol=1e-12)


def test_an_update_that_is_not_finite_does_not_show() -> None:
    method = method_of(**PRIVATE)
    given = {"a": np.array([np.inf, 1.0], np.float32), "b": np.array([np.nan], np.float32)}
    assert {name: value.tolist() for name, value in method.privacy.bounded(given).items()} == {"a": [0, 0], "b": [0]}


def test_noise_of_many_parameters_is_no_explosion() -> None:
    """The norm of the noise alone is more than ten thousand times that of the model."""
    keys = {"weighting": "uniform", "privacy": {"epsilon": 0.001, "clip": 10.0, "noise": "client"}}
    method = method_of(**keys)
    reply = answer(method, method.open(), 0)
    assert np.linalg.norm(updates_of([reply])) > 1e4
    assert method.fold(method.open(), reply).tallies[""].replies == 1


@pytest.mark.parametrize("noise", ["server", "client"])
def test_hardly_any_noise_and_a_wide_clip_are_fedavg(noise: str) -> None:
    _, plain, _ = played(weighting="uniform")
    _, private, _ = played(weighting="uniform", privacy={"epsilon": 1e12, "clip": 50.0, "noise": noise})
    np.testing.assert_allclose(flat(private.parameters), flat(plain.parameters), atol=2e-3)
    assert norm_of(plain.parameters) > 1


def test_clients_that_do_not_answer_leave_the_divisor() -> None:
    keys = {"weighting": "uniform", "privacy": {"epsilon": 1e12, "clip": 1.0}}
    method = method_of(**keys)
    replies = [answer(method, method.open(), client) for client in range(K)]
    for count in (K, 5, 1):
        end = method.close(folded(method, method.open(), replies[:count]))
        np.testing.assert_allclose(flat(end.parameters), updates_of(replies[:count]).sum(axis=0) / K, atol=1e-6)
    drawn = method_of(clients_per_round=4, **keys)
    end = drawn.close(folded(drawn, drawn.open(), replies[:3]))
    np.testing.assert_allclose(flat(end.parameters), updates_of(replies[:3]).sum(axis=0) / 4, atol=1e-5)


def test_noise_is_the_runs_own_and_the_rounds_own() -> None:
    def noise(seed: int, round: int) -> np.ndarray:
        method = method_of(seed, **PRIVATE)
        state = method.thaw(method.freeze(replace(method.open(), round=round)))  # as after an interruption
        return flat(method.close(method.fold(state, zeros())).parameters)

    np.testing.assert_array_equal(noise(0, 2), noise(0, 2))
    assert not np.isclose(noise(0, 2), noise(0, 3)).any()
    assert not np.isclose(noise(0, 2), noise(1, 2)).any()


@pytest.mark.parametrize("noise", ["server", "client"])
def test_the_budget_is_spent_round_by_round(noise: str) -> None:
    budget = {"epsilon": 2.0, "delta": 1e-6, "clip": 0.5, "noise": noise}
    method = method_of(weighting="uniform", privacy=budget, clients_per_round=None if noise == "server" else 4)
    state = method.open()
    assert method.spent(state)["epsilon"] == 0
    found = []
    for _ in range(5):
        state = method.close(folded(method, state, [answer(method, state, client) for client in range(4)]))
        found.append(method.spent(state))
    epsilons = [each["epsilon"] for each in found]
    multiplier = found[0]["noise_multiplier"]
    assert multiplier == pytest.approx(get_sigma_gaussian(2.0, 1e-6) * 5**0.5, rel=1e-5)
    expected = [get_epsilon_gaussian(multiplier / rounds**0.5, 1e-6) for rounds in range(1, 6)]
    assert epsilons == pytest.approx(expected, rel=1e-6)
    assert epsilons == sorted(set(epsilons))
    assert 1.999 < epsilons[-1] <= 2.0
    rest = {name: value for name, value in found[-1].items() if name not in ("epsilon", "noise_multiplier")}
    assert rest == {"delta": 1e-6, "unit": "client", "noise": noise, "clip": 0.5}


def test_sampling_spends_no_more_than_the_budget() -> None:
    method = method_of(**(PRIVATE | {"rounds": 3, "clients_per_round": 4}))
    epsilons = [method.spent(replace(method.open(), round=round))["epsilon"] for round in range(4)]
    assert epsilons == sorted(set(epsilons))
    assert 1.9 < epsilons[-1] <= 2.0


def test_methods_without_privacy_have_spent_nothing() -> None:
    for keys in ({}, {"method": "fedmezo"}, {"method": "distmezo"}, {"method": "personalise"}):
        keys = keys if keys.get("method") != "personalise" else {**keys, "update": "head"}
        full = {"method": "fedavg", **({} if "update" in keys else {"train": "head"}), **keys}
        stage = Recipe.parse({"data": {"dataset": "x"}, "stages": [full]}).stages[0]
        method: Any = build(stage, Setting(C, D, (0, 0), K, K * PER))
        assert method.spent(method.open()) is None


def test_noise_hides_which_tasks_were_heard_of() -> None:
    keys = {"weighting": "uniform", "privacy": {"epsilon": 1.0, "clip": 2.0}}
    method = with_tasks(**keys)
    begin = method.open()
    quiet = method.close(method.fold(begin, sent_by(method, 0, 0.0)))
    deviation = method.privacy.deviation
    # A round asks all eight clients: three of the first task, five of the second.
    divisors = {name: {"": 8, "a": 3, "b": 5}[name.partition("@")[2]] for name in method.shapes}
    noise = {name: (quiet.parameters[name] - begin.parameters[name]) * divisors[name] for name in method.shapes}
    for group in ("", "a", "b"):
        values = np.concatenate([value.ravel() for name, value in noise.items() if name.partition("@")[2] == group])
        assert (values != 0).all()
        assert values.std() == pytest.approx(deviation, rel=0.6)
    moved = method.close(method.fold(begin, sent_by(method, 0, 1.0)))
    size = sum(int(np.prod(method.shapes[name])) for name in method.shared_names(0).values())
    for name in method.shapes:  # the update of ones, shortened as a whole to a norm of 2, and the same noise
        step = 2 / size**0.5 / divisors[name] if not name.endswith("@b") else 0.0
        np.testing.assert_allclose(moved.parameters[name] - quiet.parameters[name], step, rtol=1e-6, atol=1e-12)


def test_a_task_of_few_clients_is_divided_by_one_at_least() -> None:
    keys = {"weighting": "uniform", "rounds": 1, "privacy": {"epsilon": 1e12, "clip": 100.0}}
    method = with_tasks(clients_per_round=2, **keys)  # on average three quarters of a client of the first task
    begin = method.open()
    end = method.close(folded(method, begin, [sent_by(method, 0, 0.5), sent_by(method, 1, 0.5)]))
    for name in method.shapes:
        divisor = {"": 2, "a": 1, "b": 2 * 5 / 8}[name.partition("@")[2]]
        total = 1.0 if "@" not in name else 0.5
        np.testing.assert_allclose(end.parameters[name] - begin.parameters[name], total / divisor, atol=0.02)


def test_running_statistics_would_not_be_hidden() -> None:
    setting = Setting(3, 5, (0, 4), K, K * PER, backbone=backbone_of(Normed()))
    with pytest.raises(HeadstartError, match=r"^stages\.4\.norm_statistics: with privacy, .* use 'freeze' or 'batch'$"):
        build(stage_of(train="all", **PRIVATE), setting)
    for mode in ("freeze", "batch"):
        build(stage_of(train="all", norm_statistics=mode, **PRIVATE), setting)
    build(stage_of(train="head", **PRIVATE), setting)
    build(stage_of(train="all", **PRIVATE), replace(setting, backbone=backbone_of(Plain())))


@pytest.mark.parametrize("noise", ["server", "client"])
def test_many_clients_at_once_are_as_private_as_one_by_one(noise: str) -> None:
    method = method_of(weighting="uniform", privacy={"epsilon": 5.0, "clip": 0.5, "noise": noise})
    begin = method.open()
    everybody = Cohort(np.arange(K), X, np.arange(K * PER), Y, WHO, np.ones(K, bool), lambda name, start: np.zeros(0))
    together = method.answer(everybody, method.instruct(begin, 0, -1))
    alone = [answer(method, begin, client) for client in range(K)]
    np.testing.assert_allclose(updates_of(together), updates_of(alone), rtol=1e-4, atol=1e-5)


def test_slora_spends_one_budget_over_both_of_its_parts() -> None:
    run = Run(weighting="uniform", privacy={"epsilon": 4.0, "clip": 1.0}).play()
    primed = [state.primed for state in run.states]
    assert primed == [False, False, True, True, True, True]
    epsilons = [run.method.spent(state)["epsilon"] for state in run.states]
    sigma = get_sigma_gaussian(4.0, 1e-5) * 5**0.5  # the three clients take part in all five rounds
    assert epsilons[0] == 0
    assert epsilons[1:] == pytest.approx([get_epsilon_gaussian(sigma / n**0.5, 1e-5) for n in range(1, 6)], rel=1e-4)
    assert epsilons[-1] <= 4.0


# ---------------------------------------------------------------------------------------------------- contradictions


UNIFORM = {"weighting": "uniform"}
BUDGET = {"privacy": {"epsilon": 1.0}}
SENTENCES: dict[str, dict[str, Any]] = {
    "combine: scaffold's control variates are averaged too, and nothing limits those; use another method": {
        "method": "scaffold", "combine": "median",
    },
    "max_norm: scaffold's control variates are averaged too, and nothing limits those; use another method": {
        "method": "scaffold", "max_norm": 1.0,
    },
    "combine: fednova scales updates by the steps that clients say they took, and nothing limits those; use another "
    "method": {"method": "fednova", "combine": "trimmed-mean"},
    "max_norm: fednova scales updates by the steps that clients say they took, and nothing limits those; use another "
    "method": {"method": "fednova", "max_norm": 1.0},
    "combine: feddyn's dual variables add up to the mean of the updates only; use 'mean'": {
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
    "privacy: scaffold sends control variates too, and nothing hides those; use another method": {
        "method": "scaffold", **UNIFORM, **BUDGET,
    },
    "privacy: fednova's clients say how many steps they took, and nothing hides that; use another method": {
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
