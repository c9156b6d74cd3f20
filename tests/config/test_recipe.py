import tomllib
from pathlib import Path

import pytest

from headstart.config.partition import PARTITIONS, Dirichlet
from headstart.config.recipe import Recipe
from headstart.config.stage import STAGES
from headstart.errors import RecipeError
from headstart.methods.fedcof import FedCOFStage

GOOD = """
name = "cifar10-fedcof"
seed = 3
[data]
dataset = "cifar10"
[data.partition]
kind = "dirichlet"
clients = 100
alpha = 0.1
[model]
backbone = "efficientnet-lite0"
[[stages]]
method = "fedcof"
shrinkage = 1
[[stages]]
method = "fed3r"
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(GOOD)
    return path


def problems_of(table: dict) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        Recipe.parse(table)
    return list(caught.value.problems)


def with_stage(**keys: object) -> dict:
    return {"data": {"dataset": "digits"}, "stages": [keys]}


def test_contract_names_are_read(recipe_file: Path) -> None:
    recipe = Recipe.load(recipe_file)
    assert (recipe.name, recipe.seed, recipe.data.dataset) == ("cifar10-fedcof", 3, "cifar10")
    assert recipe.data.partition == Dirichlet(clients=100, alpha=0.1)
    assert recipe.stages[0] == FedCOFStage(method="fedcof", shrinkage=1)
    assert recipe.stages[1].method == "fed3r"


def test_papers_fixed_values_are_not_the_defaults() -> None:
    recipe = Recipe.parse({"data": {"dataset": "digits"}, "stages": [{"method": "fed3r"}, {"method": "fedcof"}]})
    assert recipe.stages[0].ridge == "auto"
    assert recipe.stages[0].bias is True
    assert recipe.stages[1].shrinkage == "auto"


def test_resolved_recipe_reads_back_the_same(recipe_file: Path, tmp_path: Path) -> None:
    recipe = Recipe.load(recipe_file)
    again = tmp_path / "again.toml"
    again.write_text(recipe.to_toml())
    assert Recipe.load(again) == recipe
    # Every default is written out.
    assert tomllib.loads(recipe.to_toml())["stages"][1]["ridge"] == "auto"


def test_set_changes_keys_of_any_depth(recipe_file: Path) -> None:
    settings = [
        "stages.0.shrinkage=0.1",
        "stages.0.covariance=full",
        "data.partition.clients=7",
        "data.dataset=digits",
        "model.resize=256",
        "seed=5",
    ]
    recipe = Recipe.load(recipe_file, settings)
    assert recipe.stages[0] == FedCOFStage(method="fedcof", shrinkage=0.1, covariance="full")
    assert recipe.data.partition == Dirichlet(clients=7, alpha=0.1)
    assert (recipe.data.dataset, recipe.model.resize, recipe.seed) == ("digits", 256, 5)


def test_every_bad_setting_is_named_at_once(recipe_file: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.load(recipe_file, ["stages.9.shrinkage=1", "shrinkage", "name.x=1"])
    first, second, third = caught.value.problems
    assert "stages has 2 entries" in first
    assert "key=value" in second
    assert "name is a value" in third


def test_every_mistake_is_reported_at_once_with_the_nearest_spelling() -> None:
    problems = problems_of(
        {
            "nam": "x",
            "data": {"dataset": "digits", "partition": {"kind": "dirichlet", "alpa": 1, "clients": "many"}},
            "model": {"backbone": "features", "preprocess": "cafe"},
            "stages": [
                {"method": "fedcoff"},
                {"method": "fedcof", "shrinkag": 1, "covariance": "spheric"},
                {"ridge": 1},
            ],
        }
    )
    found = {problem.split(":")[0]: problem for problem in problems}
    assert set(found) == {
        "nam",
        "data.partition.alpa",
        "data.partition.clients",
        "model.preprocess",
        "stages.0.method",
        "stages.1.shrinkag",
        "stages.1.covariance",
        "stages.2.method",
    }
    assert "did you mean 'name'" in found["nam"]
    assert "did you mean 'alpha'" in found["data.partition.alpa"]
    assert "'many'" in found["data.partition.clients"]
    assert "a whole number" in found["data.partition.clients"]
    assert "did you mean 'caffe'" in found["model.preprocess"]
    assert "did you mean 'fedcof'" in found["stages.0.method"]
    assert "did you mean 'shrinkage'" in found["stages.1.shrinkag"]
    assert "did you mean 'spherical'" in found["stages.1.covariance"]
    assert all(method in found["stages.2.method"] for method in STAGES)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"stages": [{"method": "fedncm"}]}, ["data: missing"]),
        ({"data": {}, "stages": [{"method": "fedncm"}]}, ["data.dataset: missing", "text"]),
        ({"data": {"dataset": "digits"}, "stages": []}, ["stages: empty"]),
        ({"data": {"dataset": "digits"}}, ["stages: missing"]),
        (with_stage(method="fedcof", shrinkage=-1), ["stages.0.shrinkage", "greater than or equal to 0"]),
        (with_stage(method="fedcof", shrinkage="automatic"), ["stages.0.shrinkage", "did you mean 'auto'"]),
        (with_stage(method="fed3r", ridge=float("nan")), ["stages.0.ridge", "finite"]),
        (with_stage(method="fedncm", rounds=0), ["stages.0.rounds", "greater than 0"]),
        (with_stage(method="fedncm", rounds=1.5), ["stages.0.rounds", "whole number"]),
        (with_stage(method="fedncm", participation=1.5), ["stages.0.participation", "less than or equal to 1"]),
        (with_stage(method="fedncm", clients_per_round=2, participation=0.5), ["stages.0", "not both"]),
        (with_stage(method="fed3r", bias=1), ["stages.0.bias", "true or false"]),
        (with_stage(method="fedavg"), ["stages.0.train: missing", "head"]),
        (with_stage(method="fedavg", train="head", local_epochs=1, local_steps=2), ["stages.0", "not both"]),
        (with_stage(method="fedavg", train="head", momentum=1.0), ["stages.0.momentum", "less than 1"]),
        (with_stage(method="fedavg", train="head", batch_size="all"), ["stages.0.batch_size", "full"]),
        (with_stage(method="scaffold", train="head", momentum=0.9), ["stages.0.momentum", "plain local SGD"]),
        ({**with_stage(method="fedncm"), "name": "../x"}, ["name: '../x'", "letters"]),
        ({**with_stage(method="fedncm"), "seed": -1}, ["seed", "greater than or equal to 0"]),
        ({**with_stage(method="fedncm"), "data": {"dataset": "x", "partition": {"kind": ""}}}, ["kind", *PARTITIONS]),
    ],
)  # fmt: skip
def test_one_mistake_gives_one_sentence(table: dict, words: list[str]) -> None:
    (problem,) = problems_of(table)
    for word in words:
        assert word in problem


# What is wrong with the second of two stages on features, and the sentence that says so.
CONTRADICTIONS: dict[str, dict[str, object]] = {
    "stages.1.start: 1 is not an earlier stage; the first stage has number 0": {"method": "fedncm", "start": 1},
    "stages.1.train: the data are features, there is no backbone to train; use 'head'": {
        "method": "fedavg", "train": "all",
    },
    "stages.1.head_init: an MLP of zeros has no gradient; use 'random'": {
        "method": "fedavg", "train": "head", "head": "mlp", "head_init": "zeros",
    },
    "stages.1: centralised has no clients to sample from": {
        "method": "centralised", "train": "head", "clients_per_round": 2,
    },
}  # fmt: skip


def on_features(*stages: dict[str, object]) -> dict:
    return {"data": {"dataset": "digits"}, "model": {"backbone": "features"}, "stages": list(stages)}


@pytest.mark.parametrize("sentence", CONTRADICTIONS)
def test_keys_that_contradict_each_other(sentence: str) -> None:
    assert problems_of(on_features({"method": "fedncm"}, CONTRADICTIONS[sentence])) == [sentence]


def test_every_contradiction_is_named_at_once() -> None:
    problems = problems_of(on_features({"method": "fedncm"}, *CONTRADICTIONS.values(), {"method": "fedcof", "x": 1}))
    # Stage 1 of each is here stage 1, 2, 3 and 4; start = 1 is still no earlier stage of stage 1.
    expected = [sentence.replace("stages.1", f"stages.{n}") for n, sentence in enumerate(CONTRADICTIONS, 1)]
    assert [problem for problem in problems if "stages.5" not in problem] == expected
    assert [problem.split(":")[0] for problem in problems if "stages.5" in problem] == ["stages.5.x"]


@pytest.mark.parametrize(
    "stage",
    [
        {"method": "fedncm", "start": 0},
        {"method": "fedncm", "start": "pretrained"},
        {"method": "fedavg", "train": "head", "head": "mlp"},
        {"method": "fedavg", "train": "head", "head_init": "zeros"},
        {"method": "centralised", "train": "head"},
    ],
)
def test_what_looks_like_a_contradiction_and_is_none(stage: dict[str, object]) -> None:
    recipe = Recipe.parse(on_features({"method": "fedncm"}, stage))
    assert recipe.stages[1].model_dump(exclude_defaults=True).items() >= stage.items()


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (with_stage(method="fedncm", start=0), "stages.0.start: 0 is not an earlier stage"),
        (
            with_stage(method="fedncm", start=-1),
            "stages.0.start: must be previous or pretrained or a whole number greater than or equal to 0 (got -1)",
        ),
        (with_stage(method="fedncm", start="pretraind"), "stages.0.start: 'pretraind' is not accepted; did you mean"),
        (on_features({"method": "fedavg", "train": "body"}), "stages.0.train: the data are features"),
        (with_stage(method="centralised", train="head", participation=0.5), "stages.0: centralised has no clients"),
        (with_stage(method="fedncm", deadline=0), "stages.0.deadline: must be a number greater than 0 (got 0)"),
        (
            with_stage(method="fedncm", min_replies=0),
            "stages.0.min_replies: must be a whole number greater than 0 (got 0)",
        ),
        (with_stage(method="fedncm", train="head"), "stages.0.train: unknown key"),
        (
            with_stage(method="fedavg", train="all", blocks=2),
            "stages.0.blocks: with 'all' all blocks train; leave it out, or train 'norms', 'lora' or another module in",
        ),
        (with_stage(method="fedmezo", train="body", blocks=0), "stages.0.blocks: with 'body' all blocks train; leave"),
        (with_stage(method="fedcof", samples=5), "stages.0.samples: unknown key; samples is a key of [model]"),
        (
            with_stage(method="fedncm", delta=1e-6),
            "stages.0.delta: unknown key; delta is a key of [stages.privacy]",
        ),
        (
            {**on_features({"method": "fedncm"}), "alpha": 0.1},
            "alpha: unknown key; alpha is a key of [data.partition]",
        ),
        (
            {**on_features({"method": "fedncm"}), "model": {"backbone": "features", "name": "a"}},
            "model.name: unknown key; name is a key of the recipe itself",
        ),
        (on_features("fedncm"), "stages.0: must be a table, {key = value, …} (got 'fedncm')"),
        (
            {**on_features(), "stages": {"method": "fedncm"}},
            "stages: must be a list of tables, [[stages]] (got {'method'",
        ),
        ({**on_features({"method": "fedncm"}), "model": "features"}, "model: must be a table, {key = value, …} (got"),
        (
            {**on_features({"method": "fedncm"}), "data": {"dataset": "digits", "partition": "iid"}},
            "data.partition: must be a table, {key = value, …} (got 'iid')",
        ),
        (
            {**on_features({"method": "fedncm"}), "data": {"dataset": "digits", "classes": "3"}},
            "data.classes: must be a list (got '3')",
        ),
    ],
)
def test_mistakes_in_the_keys_of_stages(table: dict, problem: str) -> None:
    (found,) = problems_of(table)
    assert found.startswith(problem)


def test_defaults_of_stages_are_written_out_and_read_back(tmp_path: Path) -> None:
    stages = [{"method": "fedncm"}, {"method": "fedavg", "train": "all"}, {"method": "centralised", "train": "body"}]
    recipe = Recipe.parse({"data": {"dataset": "mnist-mini"}, "stages": stages})
    (tmp_path / "resolved.toml").write_text(recipe.to_toml())
    assert Recipe.load(tmp_path / "resolved.toml") == recipe
    written = tomllib.loads(recipe.to_toml())["stages"]
    everywhere = {"start": "previous", "head_init": "previous", "evaluate_every": 1}
    training = {
        "head": "linear",
        "hidden": 256,
        "norm_statistics": "aggregate",
        "augment": "flip",
        "precision": "float32",
        "memory_format": "channels-last",
        "momentum": 0.0,
        "warmup_rounds": 0,
    }
    for stage in written:
        assert stage.items() >= everywhere.items()
        assert not {"deadline", "pools"} & stage.keys()  # unset, and no key at all
    assert not training.keys() & written[0].keys()
    for stage in written[1:]:
        assert stage.items() >= training.items()
    numbered = Recipe.parse(on_features({"method": "fedncm"}, {"method": "fedncm", "start": 0, "deadline": 2}))
    (tmp_path / "numbered.toml").write_text(numbered.to_toml())
    again = Recipe.load(tmp_path / "numbered.toml")
    assert again == numbered
    assert (again.stages[1].start, again.stages[1].deadline) == (0, 2.0)


def test_unreadable_and_invalid_files(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="No such file"):
        Recipe.load(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("name = [")
    with pytest.raises(RecipeError, match=r"No such file or directory; did you mean '.*broken\.toml'\?"):
        Recipe.load(tmp_path / "brokn.toml")
    with pytest.raises(RecipeError, match="not valid TOML"):
        Recipe.load(broken)


def test_every_partition_and_stage_is_reachable_by_its_name() -> None:
    for kind in PARTITIONS:
        table = {"data": {"dataset": "x", "partition": {"kind": kind}}, "stages": [{"method": "fedncm"}]}
        assert Recipe.parse(table).data.partition.kind == kind
    for method, stage in STAGES.items():
        train = {"train": "head"} if "train" in stage.model_fields and stage.model_fields["train"].is_required() else {}
        assert Recipe.parse(with_stage(method=method, **train)).stages[0].method == method
