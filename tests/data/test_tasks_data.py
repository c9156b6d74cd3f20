"""Classes that a recipe keeps, tasks of a features file, and the federation of several tasks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.config.recipe import Data, Recipe
from headstart.data import Dataset, Federation, load_dataset
from headstart.errors import HeadstartError, RecipeError

LOW, HIGH = [0, 1, 2, 3, 4], [9, 8, 7, 6, 5]
# 24 rows of 3 features; the first feature is the row's number, so that rows can be followed.
X = np.column_stack([np.arange(24.0), np.arange(24.0) ** 2, -np.ones(24)]).astype(np.float32)
Y, SPLIT, TASK = np.arange(24) % 4, np.repeat([0, 0, 1, 2], 6), np.arange(24) // 4 % 2 + 4


def save(folder: Path, name: str = "features.npz", **arrays: Any) -> str:
    np.savez(folder / name, **arrays)
    return str(folder / name)


def load(dataset: str, **keys: Any) -> Dataset:
    return load_dataset(Data.model_validate({"dataset": dataset} | keys))


def parsed(tasks: Any, **keys: Any) -> Recipe:
    return Recipe.parse(
        {"model": {"backbone": "features"}, "stages": [{"method": "fedncm"}]}
        | ({"tasks": tasks} if tasks else {})
        | keys
    )


def task(name: str, classes: list[int] | None = None, dataset: str = "digits", **keys: Any) -> dict[str, Any]:
    partition = {"kind": "iid", "clients": 3} | keys.pop("partition", {})
    chosen = {} if classes is None else {"classes": classes}
    return {"name": name, "dataset": dataset, "partition": partition} | chosen | keys


def federation(*tasks: dict[str, Any], **keys: Any) -> Federation:
    return Federation.of(parsed(list(tasks), **keys))


def alone(table: dict[str, Any], **keys: Any) -> Federation:
    return Federation.of(parsed((), data={key: value for key, value in table.items() if key != "name"}, **keys))


TWO = (
    task("low", LOW, partition={"clients": 4}),
    task("high", HIGH, partition={"kind": "dirichlet", "alpha": 0.5, "clients": 3}),
)


# -------------------------------------------------------------------------------------------------------------- classes


@pytest.mark.parametrize("chosen", [[7, 2, 5], ["7", "2", "5"], [7, "2", 5]])
def test_classes_are_kept_by_number_or_name_and_numbered_in_their_order(chosen: list[Any]) -> None:
    whole, part = load("digits"), load("digits", classes=chosen)
    assert part.classes == ("7", "2", "5")
    for split in ("train", "test"):
        everything, kept = getattr(whole, split), getattr(part, split)
        rows = np.flatnonzero(np.isin(everything.labels, [7, 2, 5]))
        np.testing.assert_array_equal(kept.features(), everything.features()[rows])
        assert [[7, 2, 5][label] for label in kept.labels] == everything.labels[rows].tolist()


def test_classes_of_the_validation_split_are_kept_too(tmp_path: Path) -> None:
    part = load(save(tmp_path, X=X, y=Y, split=SPLIT), classes=[3, 1])
    assert part.validation is not None
    assert part.validation.features()[:, 0].tolist() == [13, 15, 17]
    assert part.validation.labels.tolist() == [1, 0, 1]


def test_a_part_of_the_examples_is_a_part_of_the_classes_kept() -> None:
    part = load("digits", classes=[9, 0], train_examples=20, test_examples=6)
    assert np.bincount(part.train.labels).tolist() == [10, 10]
    assert np.bincount(part.test.labels).tolist() == [3, 3]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([1, 10], "data.classes: 10 is no class; digits has 10, from 0"),
        ([-1, 2], "data.classes: -1 is no class"),
        ([1, "11"], "data.classes: .*'?1'?"),
        ([1, 2, 1], "data.classes: a class is named twice"),
        (["1", 1], "data.classes: a class is named twice"),
    ],
)
def test_classes_that_are_not_there_or_there_twice_are_refused(chosen: list[Any], message: str) -> None:
    with pytest.raises(HeadstartError, match=message):
        load("digits", classes=chosen)


@pytest.mark.parametrize("chosen", [[], [3], [1.5, 2], [True, False], "12"])
def test_classes_that_no_data_could_have_are_refused_with_the_recipe(chosen: Any) -> None:
    with pytest.raises(RecipeError, match=r"data\.classes"):
        parsed((), data={"dataset": "digits", "classes": chosen})


# --------------------------------------------------------------------------------------------- tasks of a features file


def test_a_features_file_has_tasks_by_number(tmp_path: Path) -> None:
    path = save(tmp_path, X=X, y=Y, split=SPLIT, task=TASK, client=np.arange(24) % 3)
    for number in (4, 5):
        found, mine = load(path, task=number), TASK == number
        assert found.validation is not None
        for place, split in enumerate(("train", "validation", "test")):
            examples, rows = getattr(found, split), mine & (place == SPLIT)
            np.testing.assert_array_equal(examples.features(), X[rows])
            assert examples.labels.tolist() == Y[rows].tolist()
            assert [found.clients[client] for client in examples.clients] == [f"{n % 3}" for n in np.flatnonzero(rows)]
    assert len(load(path).train) == 12  # all tasks, where none is named


def test_a_task_has_the_classes_that_its_own_examples_have(tmp_path: Path) -> None:
    labels = np.where(TASK == 4, np.arange(24) % 2, Y)
    path = save(tmp_path, X=X, y=labels, split=np.arange(24) % 3, task=TASK)
    assert load(path, task=4).classes == ("0", "1")
    assert load(path, task=5).classes == ("0", "1", "2", "3")


def test_a_task_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, X=X, y=Y, split=SPLIT, task=TASK)
    with pytest.raises(HeadstartError, match=r"data\.task: .* has no task 3; it has 4, 5"):
        load(path, task=3)
    with pytest.raises(HeadstartError, match=r"data\.task: .* has no task 0; it has no column of that name"):
        load(save(tmp_path, X=X, y=Y, split=SPLIT), task=0)


@pytest.mark.parametrize("column", [TASK * 1.0, TASK[:-1]])
def test_a_damaged_column_of_tasks_is_refused(tmp_path: Path, column: Any) -> None:
    with pytest.raises(HeadstartError, match=r"task must be whole numbers|X has 24 rows and task 23"):
        load(save(tmp_path, X=X, y=Y, split=SPLIT, task=column), task=4)


# ------------------------------------------------------------------------------------------- several tasks in one place


def test_tasks_lie_one_after_the_other() -> None:
    both, parts = federation(*TWO), [alone(each) for each in TWO]
    assert both.tasks == ("low", "high")
    assert both.names == (*(f"low/client-{n}" for n in range(4)), *(f"high/client-{n}" for n in range(3)))
    assert both.dataset.classes == (*(f"low: {n}" for n in LOW), *(f"high: {n}" for n in HIGH))
    assert both.class_names == [tuple(map(str, LOW)), tuple(map(str, HIGH))]
    assert [both.clients_of(n).tolist() for n in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6]]
    assert [both.classes_of(n) for n in (0, 1)] == [slice(0, 5), slice(5, 10)]
    assert both.tasks_of(np.array([6, 0, 4, 3])).tolist() == [1, 0, 1, 0]
    assert both.n_clients == 7
    assert both.unused == sum(part.unused for part in parts)
    np.testing.assert_array_equal(both.counts[:4, :5], parts[0].counts)
    np.testing.assert_array_equal(both.counts[4:, 5:], parts[1].counts)
    assert not both.counts[:4, 5:].any()
    assert not both.counts[4:, :5].any()
    for split in ("train", "test"):
        start = 0
        for number, part in enumerate(parts):
            examples, rows = getattr(part.dataset, split), both.examples_of(number, split)
            assert rows.tolist() == list(range(start, start := start + len(examples)))
            joined = getattr(both.dataset, split)
            np.testing.assert_array_equal(joined.labels[rows], examples.labels + 5 * number)
            np.testing.assert_array_equal(joined.features()[rows], examples.features())


def test_a_client_holds_the_same_examples_as_in_a_run_of_its_task_alone() -> None:
    both, parts = federation(*TWO, seed=5), [alone(each, seed=5) for each in TWO]
    for number, part in enumerate(parts):
        first_client, first_row = both.clients_of(number)[0], [0, len(parts[0].dataset.train)][number]
        for client in range(part.n_clients):
            rows, owners = both.rows_of(np.array([first_client + client]))
            assert (owners == first_client + client).all()
            np.testing.assert_array_equal(rows - first_row, part.rows_of(np.array([client]))[0])


def test_joined_examples_are_read_in_any_order() -> None:
    tasks = [task("a", [0, 1], "mnist-mini", train_examples=7), task("b", [2, 5, 4], "mnist-mini", train_examples=12)]
    both = federation(*tasks, model={"backbone": "conv4"})
    own = [value for each in tasks for value in alone(each).dataset.train.raw(0, 100)]
    train = both.dataset.train
    np.testing.assert_array_equal(np.stack(train.raw(0, 19)), np.stack(own))
    np.testing.assert_array_equal(np.stack(train.raw(5, 9)), np.stack(own[5:9]))
    order = np.random.default_rng(0).integers(0, 19, 40)
    np.testing.assert_array_equal(np.stack(train.take(order).raw(0, 40)), np.stack([own[row] for row in order]))
    assert train.take(order).labels.tolist() == train.labels[order].tolist()
    assert train.take(np.array([], np.int64)).raw(0, 0) == []
    assert train.fingerprint() != train.take(np.arange(19)[::-1]).fingerprint()


def test_joined_features_are_taken_in_any_order() -> None:
    train = federation(*TWO).dataset.train
    order = np.random.default_rng(0).permutation(len(train))[:50]
    np.testing.assert_array_equal(train.take(order).features(), train.features()[order])


def test_texts_of_several_files_and_columns_are_joined(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("text,label\n" + "\n".join(f"one {n},{'ab'[n % 2]}" for n in range(10)))
    (tmp_path / "two.csv").write_text(
        "premise,hypothesis,label\n" + "\n".join(f"two {n},so {n},{'xyz'[n % 3]}" for n in range(15))
    )
    pairs = {"input_column": ["premise", "hypothesis"], "label_column": "label"}
    tasks = task("one", dataset=str(tmp_path / "one.csv")), task("two", dataset=str(tmp_path / "two.csv"), **pairs)
    both = federation(*tasks, model={"backbone": "all-MiniLM-L6-v2"})
    assert both.class_names == [("a", "b"), ("x", "y", "z")]
    train = both.dataset.train
    mixed = train.take(np.array([len(train) - 1, 0])).raw(0, 2)
    assert mixed[0][0].startswith("two ")
    assert mixed[0][1].startswith("so ")
    assert mixed[1].startswith("one ")


def test_test_examples_that_follow_belong_to_clients_of_their_own_task() -> None:
    tasks = [each | {"partition": each["partition"] | {"test": "follow"}} for each in TWO]
    both, parts = federation(*tasks), [alone(each) for each in tasks]
    assert both.test_owners is not None
    for number, part in enumerate(parts):
        assert part.test_owners is not None
        mine = both.test_owners[both.examples_of(number, "test")]
        expected = np.where(part.test_owners >= 0, part.test_owners + both.clients_of(number)[0], -1)
        np.testing.assert_array_equal(mine, expected)


def test_a_shared_test_split_has_no_owners() -> None:
    assert federation(*TWO).test_owners is None


def test_clients_and_domains_that_data_name_have_the_name_of_their_task(tmp_path: Path) -> None:
    path = save(tmp_path, X=X, y=Y, split=SPLIT, task=TASK, client=np.arange(24) % 3 * 10, domain=np.arange(24) % 2)
    one = task("one", dataset=path, task=4) | {"partition": {"kind": "natural"}}
    two = task("two", dataset=path, task=5) | {"partition": {"kind": "domains"}}
    assert federation(one, two).names == ("one/0", "one/10", "one/20", "two/0", "two/1")


def test_there_is_a_validation_split_only_where_every_task_has_one(tmp_path: Path) -> None:
    path = save(tmp_path, X=X, y=Y, split=SPLIT, task=TASK)
    tasks = [task("one", dataset=path, task=4), task("two", dataset=path, task=5)]
    joined, parts = federation(*tasks).dataset.validation, [alone(each).dataset.validation for each in tasks]
    assert joined is not None
    np.testing.assert_array_equal(joined.features(), np.concatenate([part.features() for part in parts if part]))
    without = task("none", dataset=save(tmp_path, "other.npz", X=X, y=Y, split=SPLIT // 2 * 2))
    assert federation(tasks[0], without).dataset.validation is None


def test_tasks_of_several_kinds_are_refused() -> None:
    with pytest.raises(HeadstartError, match=r"several kinds: .*'low': 'features', 'pictures': 'image'"):
        federation(TWO[0], task("pictures", [0, 1], "mnist-mini"))


def test_features_of_several_lengths_are_refused(tmp_path: Path) -> None:
    short = task("short", dataset=save(tmp_path, X=X, y=Y, split=SPLIT))
    with pytest.raises(HeadstartError, match=r"tasks: .*'low': 64, 'short': 3"):
        federation(TWO[0], short)


def test_tasks_that_share_their_test_split_and_tasks_that_do_not_are_refused() -> None:
    with pytest.raises(HeadstartError, match=r"set partition\.test to the same value"):
        federation(TWO[0], task("high", HIGH, partition={"test": "follow"}))


# -------------------------------------------------------------------------------------------------------------- recipes


DIGITS = {"dataset": "digits"}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, r"data: missing; add a \[data\] table, or a \[\[tasks\]\] table"),
        ({"tasks": []}, r"data: missing; add a \[data\] table"),
        ({"tasks": [task("a"), task("b")], "data": DIGITS}, r"tasks: give \[data\] for one task, or \[\[tasks\]\]"),
        ({"tasks": [task("a")]}, r"tasks: there is one; give it as \[data\], or add another"),
        ({"tasks": [task("a"), task("b"), task("a")]}, "tasks: two have the same name"),
        ({"tasks": [task("a"), DIGITS]}, r"tasks\.1\.name: missing"),
        ({"tasks": [task("a"), {"name": "b"}]}, r"tasks\.1\.dataset: missing"),
        ({"tasks": [task("a"), task("b/c")]}, r"tasks\.1\.name: must match pattern .* \(got 'b/c'\)"),
        ({"tasks": [task("a"), task("@")]}, r"tasks\.1\.name: must match pattern .* \(got '@'\)"),
        ({"tasks": [task("a", datasets="x"), task("b")]}, r"tasks\.0\.datasets: unknown key; .*dataset"),
        (
            {"tasks": [task("a"), task("b", partition={"client": 3})]},
            r"tasks\.1\.partition\.client: unknown key; .*clients",
        ),
        (
            {"tasks": [task("a"), task("b", partition={"clients": 0})]},
            r"tasks\.1\.partition\.clients: must be a whole number greater than 0 \(got 0\)",
        ),
        (
            {"tasks": [task("a"), task("b", partition={"kind": "idd"})]},
            r"tasks\.1\.partition\.kind: 'idd' is not known; .*iid",
        ),
        ({"tasks": [task("a"), task("b", [1, -2.5])]}, r"tasks\.1\.classes"),  # type: ignore[list-item]
        ({"tasks": "ab"}, "tasks"),
    ],
)
def test_recipes_with_tasks_that_cannot_be(table: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe.parse({"model": {"backbone": "features"}, "stages": [{"method": "fedncm"}]} | table)


def test_every_mistake_in_every_task_is_named() -> None:
    tasks = [task("a", dataset=""), task("a b"), task("c", clases=[1, 2])]
    with pytest.raises(RecipeError) as error:
        parsed(tasks)
    for place in ("tasks.0.dataset", "tasks.1.name", "tasks.2.clases"):
        assert place in str(error.value)


def test_a_prompt_is_for_one_task() -> None:
    model = {"backbone": "all-MiniLM-L6-v2", "prompt": "{text} {mask}", "label_words": ["a", "b"]}
    with pytest.raises(RecipeError, match=r"model\.label_words: .* those of one task"):
        parsed([task("a"), task("b")], model=model)


def test_a_share_for_the_server_is_for_one_task() -> None:
    stage = {"method": "fedavg", "train": "head", "share": 0.1}
    with pytest.raises(RecipeError, match=r"stages\.0\.share: .* one task"):
        parsed([task("a"), task("b")], stages=[stage])


def test_a_recipe_with_tasks_is_the_same_after_it_was_written(tmp_path: Path) -> None:
    stages = [
        {"method": "fedyolo", "sampling": "tasks", "hide_task": True},
        {"method": "personalise", "update": "lora"},
    ]
    tasks = [*TWO, task("named", partition={"test": "follow"}) | {"classes": ["3", 4], "task": 2}]
    recipe = parsed(tasks, stages=stages, name="several", seed=4, model={"backbone": "all-MiniLM-L6-v2"})
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    assert Recipe.load(tmp_path / "recipe.toml") == recipe
    changed = Recipe.load(tmp_path / "recipe.toml", ["tasks.1.partition.clients=9"])
    assert [each.partition.clients for each in changed.tasks] == [4, 9, 3]  # type: ignore[union-attr]
    assert recipe.datasets == "digits, digits, digits"


def test_a_recipe_of_one_task_says_nothing_about_tasks() -> None:
    assert "tasks" not in parsed((), data=DIGITS).to_toml()
