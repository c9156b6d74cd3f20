"""Several tasks of one language model: each with prompts and words, or completions, and a module of its own; each as if
it were alone."""

import csv
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from safetensors.numpy import load_file

from headstart.backbones.completions import Sampling
from headstart.config.recipe import Recipe
from headstart.core.files import write_text
from headstart.data import Federation
from headstart.engine.model_store import ModelStore
from headstart.errors import HeadstartError, RecipeError
from headstart.export import Model, export
from headstart.export.completions import completions
from headstart.export.replay import replay
from headstart.methods.fedmezo import NO_STEP
from headstart.records import RunDirectory
from headstart.runner import run
from headstart.runner.dry_run import dry_run
from tests.backbones.test_cloze import folder_of as masked_folder
from tests.backbones.test_language import LONG, SHORT, folder_of
from tests.command import Command
from tests.runner.test_choose import TEXTS, lines
from tests.runner.test_generate import PAIRS

FULL = {"method": "fedyolo", "rounds": 3, "lr": 0.1, "batch_size": "full", "momentum": 0.0}
KINDS = {
    "lora": {"train": "lora", "rank": 2},
    "last": {"train": "lora", "rank": 2, "blocks": 1},
    "adapter": {"train": "adapter", "bottleneck": 3},
    "prefix": {"train": "prefix", "tokens": 2},
}
METRICS = ("accuracy", "loss", "perplexity", "rouge_l", "exact_match")


def choosing(folder: Path, model: str = "llama", **stage: Any) -> dict[str, Any]:
    """Tasks of two and three classes under prompts of their own; the words of the second are several tokens."""
    if not (folder / "model").is_dir():
        folder_of(folder / "model", model, ends=model == "mt5")
        for name, count in (("short", 2), ("long", 3)):
            rows = [f"{text},{min(('sat', 'ran', 'bad').index(text.split()[2]), count - 1)}" for text in TEXTS]
            write_text(folder / f"{name}.csv", "\n".join(["text,label", *rows, *rows]))
    data = {"test_fraction": 0.5, "partition": {"kind": "iid", "clients": 2}}
    short = {"prompt": "film : {text} :", "label_words": list(SHORT)}
    long = {"prompt": "the {text} very", "label_words": list(LONG)}
    return {
        "tasks": [
            {"name": "short", "dataset": str(folder / "short.csv"), **data, **short},
            {"name": "long", "dataset": str(folder / "long.csv"), **data, **long},
        ],
        "model": {"backbone": str(folder / "model"), "task": "choose"},
        "stages": [FULL | KINDS["lora"] | stage],
    }


def completing(folder: Path, model: str = "llama", **stage: Any) -> dict[str, Any]:
    """Two tasks of prompts and completions: as they are, and turned round."""
    if not (folder / "model").is_dir():
        folder_of(folder / "model", model, ends=model == "mt5")
        for name, pairs in (("on", PAIRS * 5), ("back", [(b, a or "the") for a, b in PAIRS] * 4)):
            rows = [{"prompt": p, "completion": c, "who": "abc"[n % 3]} for n, (p, c) in enumerate(pairs)]
            write_text(folder / f"{name}.jsonl", "\n".join(map(json.dumps, rows)))
    data = {"client_column": "who", "test_fraction": 0.3, "partition": {"kind": "natural", "test": "follow"}}
    return {
        "tasks": [{"name": name, "dataset": str(folder / f"{name}.jsonl"), **data} for name in ("on", "back")],
        "model": {"backbone": str(folder / "model"), "task": "generate", "samples": 2, "max_new_tokens": 4},
        "stages": [FULL | KINDS["lora"] | stage],
    }


def alone(table: dict[str, Any], number: int) -> dict[str, Any]:
    """The recipe of one of the tasks."""
    task = dict(table["tasks"][number])
    words = {key: task.pop(key) for key in ("prompt", "label_words") if key in task}
    task.pop("name")
    return {"data": task, "model": table["model"] | words, "stages": table["stages"]}


def same_to_the_bit(both: Path, one: Path, task: str) -> None:
    ours = load_file(both / "model" / f"module-{task}.safetensors")
    theirs = load_file(one / "model" / "module-default.safetensors")
    assert ours.keys() == theirs.keys()
    for each in ours:
        np.testing.assert_array_equal(ours[each], theirs[each], err_msg=each)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tables", [choosing, completing])
def test_a_task_does_not_notice_the_others(tables: Any, kind: str, tmp_path: Path) -> None:
    table = tables(tmp_path, **KINDS[kind])
    run(Recipe.parse(table), tmp_path / "both")
    together = lines(tmp_path / "both")
    for number, name in enumerate(task["name"] for task in table["tasks"]):
        run(Recipe.parse(alone(table, number)), tmp_path / name)
        same_to_the_bit(tmp_path / "both", tmp_path / name, name)
        for both, one in zip(together, lines(tmp_path / name), strict=True):
            what = [key for key in METRICS if one.get(key) is not None]
            assert [both["tasks"][name][key] for key in what] == [one[key] for key in what]
        assert together[-1]["tasks"][name]["loss"] < together[0]["tasks"][name]["loss"] - 1e-3
    assert [line["round"] for line in together] == [0, 1, 2, 3]  # what it knows before any training, too


MEZO: dict[str, Any] = {
    "method": "fedmezo", "rounds": 3, "lr": 0.2, "epsilon": 1e-2, "num_directions": 2, "batch_size": "full",
    "momentum": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tables", [choosing, completing])
def test_a_task_of_fedmezo_is_the_task_alone_to_the_bit(tables: Any, kind: str, tmp_path: Path) -> None:
    table = tables(tmp_path) | {"stages": [MEZO | KINDS[kind]]}
    run(Recipe.parse(table), tmp_path / "both")
    together = lines(tmp_path / "both")
    for number, name in enumerate(task["name"] for task in table["tasks"]):
        run(Recipe.parse(alone(table, number)), tmp_path / name)
        same_to_the_bit(tmp_path / "both", tmp_path / name, name)
        for both, one in zip(together, lines(tmp_path / name), strict=True):
            assert both["tasks"][name]["loss"] == one["loss"]
    assert replay(tmp_path / "both", tmp_path / "again") == []
    each = [lines(tmp_path / task["name"])[-1] for task in table["tasks"]]
    assert together[-1]["forward_passes"] == sum(line["forward_passes"] for line in each)
    assert together[-1]["bytes_up"] < 1.1 * sum(line["bytes_up"] for line in each)  # names of tasks


def test_a_task_of_which_nobody_is_drawn_takes_no_step(tmp_path: Path) -> None:
    """One client of four a round: a task goes on from where it was, at the rate of the round, as its log says."""
    table = choosing(tmp_path) | {"stages": [MEZO | KINDS["lora"] | {"rounds": 6, "clients_per_round": 1}]}
    run(Recipe.parse(table), tmp_path / "run")
    log = RunDirectory.reopen(tmp_path / "run", Recipe.parse(table)).load_log(0)
    moved = np.stack([log.arrays[f"parts/{part}/seeds"] != NO_STEP for part in range(2)])
    assert (moved.sum(axis=0) == 1).all()
    assert moved.any(axis=1).all()
    losses = [[line["tasks"][name]["loss"] for line in lines(tmp_path / "run")] for name in ("short", "long")]
    for each, steps in zip(losses, moved, strict=True):
        assert [before != after for before, after in pairwise(each)] == steps.tolist()
    assert replay(tmp_path / "run", tmp_path / "again") == []


def test_a_run_of_several_logs_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    recipe = Recipe.parse(choosing(tmp_path) | {"stages": [MEZO | KINDS["lora"]]})
    run(recipe, tmp_path / "whole")

    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "cut", on_metrics=stop)
    run(recipe, tmp_path / "cut", resume=True)
    for name in ("module-short.safetensors", "module-long.safetensors"):
        assert (tmp_path / "cut" / "model" / name).read_bytes() == (tmp_path / "whole" / "model" / name).read_bytes()


def run_as_one_task(table: dict[str, Any], folder: Path) -> None:
    """The examples of all tasks as one data set with the same clients, into `one`."""
    federation = Federation.of(Recipe.parse(table))
    given = zip(federation.dataset.train.raw(0, 100), federation.owners, strict=True)
    rows = [{"prompt": p, "completion": c, "who": f"{owner}"} for (p, c), owner in given]
    (folder / "pooled").mkdir()
    write_text(folder / "pooled" / "train.jsonl", "\n".join(map(json.dumps, rows)))
    write_text(folder / "pooled" / "test.jsonl", "\n".join(map(json.dumps, rows[:3])))
    one = {"dataset": str(folder / "pooled"), "client_column": "who", "partition": {"kind": "natural"}}
    run(Recipe.parse({"data": one, "model": table["model"], "stages": table["stages"]}), folder / "one")


def test_a_backbone_that_tasks_share_takes_the_steps_of_all_clients(tmp_path: Path) -> None:
    """Norms, and completions of two tasks at six clients: to the body, those of one task at six clients."""
    table = completing(tmp_path) | {"stages": [MEZO | {"train": "norms"}]}
    run(Recipe.parse(table), tmp_path / "both")
    run_as_one_task(table, tmp_path)
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("both", "one"))
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-5)
    assert replay(tmp_path / "both", tmp_path / "again") == []


@pytest.mark.parametrize("tables", [choosing, completing])
@pytest.mark.parametrize("method", ["slora", "fedsa-lora", "flexlora", "distmezo"])
def test_other_methods_train_every_task_as_if_it_were_alone(method: str, tables: Any, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"method": method, "rank": 2, "train": "lora", "rounds": 3, "batch_size": "full"}
    keys |= {"lr": 1e-3, "local_steps": 2} if method == "distmezo" else {"lr": 0.1}
    table = tables(tmp_path) | {"stages": [keys]}
    run(Recipe.parse(table), tmp_path / "both")
    together = lines(tmp_path / "both")
    for number, name in enumerate(task["name"] for task in table["tasks"]):
        if method == "distmezo" and number:
            continue  # directions are drawn from the client's number
        run(Recipe.parse(alone(table, number)), tmp_path / name)
        for both, one in zip(together, lines(tmp_path / name), strict=True):
            assert both["tasks"][name]["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert together[-1]["tasks"][name]["loss"] != together[0]["tasks"][name]["loss"]


@pytest.mark.parametrize(
    "stage", [MEZO | KINDS["lora"], MEZO | {"train": "norms"}, FULL | {"method": "slora", "rank": 2}]
)
def test_what_tasks_will_send_is_known_before(stage: dict[str, Any], tmp_path: Path) -> None:
    recipe = Recipe.parse(choosing(tmp_path) | {"stages": [stage]})
    _, [(_, bill)] = dry_run(recipe, Federation.of(recipe))
    (found,) = run(recipe).summary["stages"]
    foreseen = bill.ledger.bytes_up.sum(), bill.ledger.bytes_down.sum(), bill.ledger.forward_passes.sum()
    assert foreseen == (found["bytes_up"], found["bytes_down"], found["forward_passes"])


@pytest.mark.parametrize("method", ["slora", "flexlora"])
def test_a_task_that_is_hidden_learns_the_same(method: str, tmp_path: Path) -> None:
    """SLoRA sends other values after its first round, and FlexLoRA's server adds products to what it was sent."""
    found = []
    for hidden in (False, True):
        stage = {"method": method, "rank": 2, "rounds": 3, "lr": 0.1, "batch_size": "full", "hide_task": hidden}
        run(Recipe.parse(choosing(tmp_path) | {"stages": [stage]}), tmp_path / str(hidden))
        found.append([line["loss"] for line in lines(tmp_path / str(hidden))])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("method", ["fedncm", "fed3r", "fedcof"])
def test_a_closed_form_of_a_task_is_on_its_own_prompts(method: str, pooling: str, tmp_path: Path) -> None:
    """Without words to choose from: a head for each task, on what the model makes of its texts in its own prompt."""
    table = choosing(tmp_path) | {"stages": [{"method": method}]}
    table["model"] = {"backbone": table["model"]["backbone"], "pooling": pooling}
    for task in table["tasks"]:
        del task["label_words"]
    run(Recipe.parse(table), tmp_path / "both")
    for number, name in enumerate(("short", "long")):
        run(Recipe.parse(alone(table, number)), tmp_path / name)
        ours = load_file(tmp_path / "both" / "model" / f"head-{name}.safetensors")
        theirs = load_file(tmp_path / name / "model" / "head.safetensors")
        for each in theirs:
            np.testing.assert_array_equal(ours[each], theirs[each], err_msg=each)
        both, one = (Model.load(tmp_path / run, name if run == "both" else None) for run in ("both", name))
        texts = ["the cat sat", "very good film"]
        np.testing.assert_array_equal(both.predict(texts).probabilities, one.predict(texts).probabilities)
    plain = table | {"tasks": [{k: v for k, v in task.items() if k != "prompt"} for task in table["tasks"]]}
    run(Recipe.parse(plain), tmp_path / "plain")
    bare = load_file(tmp_path / "plain" / "model" / "head-long.safetensors")
    assert not np.allclose(bare["weight"], ours["weight"])


@pytest.mark.parametrize(("method", "why"), [("fedex-lora", "use flexlora"), ("centralised", r"run each as \[data\]")])
def test_what_is_for_one_task_says_why(method: str, why: str, tmp_path: Path) -> None:
    stage = {"method": method, "train": "lora", "rounds": 1}
    with pytest.raises(HeadstartError, match=rf"stages\.0\.method: {method} .*{why}"):
        run(Recipe.parse(choosing(tmp_path) | {"stages": [stage]}))


@pytest.mark.parametrize("tables", [choosing, completing])
def test_a_sequence_to_sequence_model_learns_two_tasks(tables: Any, tmp_path: Path) -> None:
    table = tables(tmp_path, "mt5")
    run(Recipe.parse(table), tmp_path / "both")
    first, *_, last = lines(tmp_path / "both")
    for task in table["tasks"]:
        assert last["tasks"][task["name"]]["loss"] < first["tasks"][task["name"]]["loss"]


def test_a_masked_model_chooses_in_two_tasks(tmp_path: Path) -> None:
    table = choosing(tmp_path)
    place = masked_folder(tmp_path / "masked")
    config = json.loads((place / "config.json").read_text())  # dropout is drawn anew for every client's number
    write_text(place / "config.json", json.dumps(config | {k: 0.0 for k in config if k.endswith("dropout_prob")}))
    table["model"]["backbone"] = str(place)
    for task, prompt in zip(table["tasks"], ("{text} {mask} .", "the {text} {mask}"), strict=True):
        task |= {"prompt": prompt, "label_words": ["sat", "cat", "dog"][: len(task["label_words"])]}
    run(Recipe.parse(table), tmp_path / "both")
    for number, name in enumerate(("short", "long")):
        run(Recipe.parse(alone(table, number)), tmp_path / name)
        found = [line["tasks"][name]["loss"] for line in lines(tmp_path / "both")]
        assert found == pytest.approx([line["loss"] for line in lines(tmp_path / name)], rel=1e-5)
    table["tasks"][1]["prompt"] = "the {text} very"
    with pytest.raises(HeadstartError, match=r"tasks: one model answers all prompts: write \{mask\} in each of them"):
        run(Recipe.parse(table))


def test_tasks_that_share_a_body_average_it_over_the_clients_of_all(tmp_path: Path) -> None:
    """Completions of two tasks at six clients are, to a body that all share, those of one task at six clients."""
    table = completing(tmp_path, method="fedavg", train="all", lr=0.05, weighting="examples")
    run(Recipe.parse(table), tmp_path / "both")
    run_as_one_task(table, tmp_path)
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("both", "one"))
    pretrained = ModelStore(Recipe.parse(table).model, None).arrays()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-6)
    assert max(np.abs(ours[name] - pretrained[name]).max() for name in ours) > 1e-2


def test_samples_of_each_task_are_kept_and_in_the_report(tmp_path: Path) -> None:
    run(Recipe.parse(completing(tmp_path)), tmp_path / "run")
    with (tmp_path / "run" / "samples.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected = [(round, task) for round in "03" for task in ("on", "on", "back", "back")]
    assert [(row["round"], row["task"]) for row in rows] == expected
    for task in ("on", "back"):  # by the task's own module
        model = Model.load(tmp_path / "run", task)
        mine = [row for row in rows[4:] if row["task"] == task]
        write_text(tmp_path / "prompts.txt", "\n".join(row["prompt"] or "the" for row in mine))
        said = [text.strip() for _, text in completions(model, [tmp_path / "prompts.txt"], Sampling(4))]
        assert [row["completion"] for row in mine if row["prompt"]] == [
            text for text, row in zip(said, mine, strict=True) if row["prompt"]
        ]
    last = lines(tmp_path / "run")[-1]
    assert last["rouge_l"] == pytest.approx(np.mean([last["tasks"][task]["rouge_l"] for task in ("on", "back")]))
    assert last["perplexity"] == pytest.approx(np.exp(last["loss"]))
    assert last["local_perplexity_mean"] > 1
    report = (tmp_path / "run" / "report.html").read_text()
    assert ">task</th>" in report.partition("<h2>Completions</h2>")[2]


def test_a_task_is_exported_and_asked_by_its_name(tmp_path: Path) -> None:
    table = choosing(tmp_path)
    run(Recipe.parse(table), tmp_path / "run")
    dataset = Federation.of(Recipe.parse(alone(table, 1))).dataset
    texts, labels = dataset.test.raw(0, 100), dataset.test.labels
    found = Model.load(tmp_path / "run", "long").predict(list(texts))
    assert found.probabilities.shape == (len(texts), 3)
    right = np.mean(found.labels == labels)
    assert right == pytest.approx(lines(tmp_path / "run")[-1]["tasks"]["long"]["accuracy"])
    export(tmp_path / "run", tmp_path / "out", task="long")
    assert "the {text} very" in (tmp_path / "out" / "README.md").read_text()


def test_prompts_of_every_task_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path / "recipe.toml", tomli_w.dumps(choosing(tmp_path)))
    done = Command(monkeypatch, capsys)("partition", tmp_path / "recipe.toml", "--show", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split("long\n")[:2]
    assert first.startswith("short\n\n<s> film : ")
    assert first.split("→ ")[1].split("\n")[0] in SHORT
    assert second.startswith("\n<s> the ")
    assert second.split("→ ")[1].split("\n")[0] in LONG


@pytest.mark.parametrize(
    ("model", "task", "stage", "sentence"),
    [
        ({}, {"prompt": None}, {}, "tasks.1: to choose, a task needs a prompt, and label_words to choose from"),
        ({}, {"prompt": "film"}, {}, "tasks.1.prompt: write {text} where the text goes"),
        ({"prompt": "{text}"}, {}, {}, "model.prompt: with several tasks, give each its own"),
        ({"label_words": ["a", "b"]}, {}, {}, "model.label_words: they are those of one task"),
        ({"task": "classify"}, {}, {}, "tasks.1: words to choose from are for model.task = 'choose'"),
        ({"task": "generate"}, {}, {}, "tasks.1: prompts are in the data, and there are no classes"),
        ({}, {}, {"method": "fedncm"}, "stages.0.method: fedncm computes heads on features of one length, and words"),
    ],
)
def test_what_several_prompts_need(model: Any, task: Any, stage: Any, sentence: str, tmp_path: Path) -> None:
    table = choosing(tmp_path)
    table["model"] |= model
    table["tasks"][1] = {k: v for k, v in (table["tasks"][1] | task).items() if v is not None}
    table["stages"] = [stage] if stage else table["stages"]
    with pytest.raises(RecipeError, match=sentence):
        Recipe.parse(table)


def test_words_and_classes_of_a_task_are_as_many(tmp_path: Path) -> None:
    table = choosing(tmp_path)
    table["tasks"][1]["label_words"] = list(SHORT)
    with pytest.raises(HeadstartError, match=r"tasks\.1\.label_words: 2 words for 3 classes; give one for each"):
        run(Recipe.parse(table))
