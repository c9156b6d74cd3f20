"""What a finished run is good for: predictions that are those of its own evaluation, and files that others load."""

import csv
import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.numpy import load_file, save_file
from scipy.special import softmax

from headstart.backbones import load_backbone
from headstart.cli import main
from headstart.config.recipe import Model as ModelTable
from headstart.config.recipe import Recipe
from headstart.data import Federation
from headstart.errors import HeadstartError
from headstart.export import Model, export
from headstart.heads import LinearHead
from headstart.records import RunDirectory
from headstart.runner import Result, run
from tests.command import Command
from tests.disk import Order

pytestmark = pytest.mark.usefixtures("no_report")

SPORT = ["the team won", "a late goal", "the striker scored", "a long match", "they lost the cup", "the league begins"]
FOOD = ["bake the bread", "a hot soup", "salt the water", "fry an egg", "peel the apples", "a glass of milk"]

FEDPER = {"method": "fedper", "train": "head", "head": "mlp", "hidden": 8, "rounds": 2}
LORA = {"method": "fedavg", "train": "lora", "rank": 2, "rounds": 1, "lr": 0.1, "batch_size": 4}


def headstart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str]:
    """Exit status and what was printed."""
    monkeypatch.setattr(sys, "argv", ["headstart", *map(str, arguments)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main()
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out + err


def digits(out: Path, *stages: dict[str, Any], **partition: Any) -> Result:
    shares = {"kind": "dirichlet", "clients": 4, "alpha": 0.1} | partition
    table = {
        "data": {"dataset": "digits", "train_examples": 200, "partition": shares},
        "model": {"backbone": "features"},
        "stages": list(stages),
    }
    return run(Recipe.parse(table), out)


def npz(path: Path, X: np.ndarray) -> Path:
    np.savez(path, X=X)
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with texts, for runs that several tests look at; like every test, it has a cache of its own."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [f"{text} {n},{label}" for n in range(2) for label, t in (("sport", SPORT), ("food", FOOD)) for text in t]
    (folder / "texts.csv").write_text("\n".join(["text,label", *rows]))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("HEADSTART_CACHE", str(folder / "cache"))
        yield folder


def text_run(out: Path, folder: Path, *stages: dict[str, Any], **model: Any) -> Result:
    data = {"dataset": str(folder / "texts.csv"), "partition": {"kind": "iid", "clients": 2}}
    table = {
        "name": "texts",
        "data": data,
        "model": {"backbone": "all-MiniLM-L6-v2", "max_tokens": 8} | model,
        "stages": list(stages),
    }
    return run(Recipe.parse(table), out)


@pytest.fixture(scope="module")
def lora(texts: Path) -> Path:
    text_run(texts / "lora", texts, LORA)
    return texts / "lora"


def hidden(body: torch.nn.Module, tokenizer: Any) -> torch.Tensor:
    """Last hidden states of a few texts."""
    with torch.inference_mode():
        batch = tokenizer([*SPORT, *FOOD], padding=True, return_tensors="pt")
        states: torch.Tensor = body(**batch).last_hidden_state
        return states * batch["attention_mask"][..., None]


# -------------------------------------------------------------------------------------------------------------- predict


def test_predictions_on_features_are_those_of_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = digits(tmp_path / "run", {"method": "fedncm"})
    test = result.federation.dataset.test
    npz(tmp_path / "test.npz", test.features())
    monkeypatch.chdir(tmp_path)  # a long path would be cut
    done, said = headstart(monkeypatch, capsys, "predict", "run", "test.npz", "--out", "found.csv")
    assert done == 0
    assert said.count("test.npz:") == 20
    assert f"and {len(test) - 20} more\n" in said
    with (tmp_path / "found.csv").open(newline="") as file:
        header, *rows = list(csv.reader(file))
    assert header == ["input", "predicted", *map(str, range(10))]
    right = np.array([row[1] for row in rows]) == test.labels.astype(str)
    assert right.mean() == result.summary["accuracy"]
    head = load_file(tmp_path / "run" / "model" / "head.safetensors")
    expected = softmax(test.features() @ head["weight"].T + head["bias"], axis=1)
    np.testing.assert_allclose(np.array([row[2:] for row in rows], float), expected, atol=1e-5)
    done, said = headstart(
        monkeypatch, capsys, "predict", tmp_path / "run", tmp_path / "test.npz", "--out", tmp_path / "found.csv"
    )
    assert (done, "already exists" in said) == (2, True)


def test_a_masked_class_has_no_probability(tmp_path: Path) -> None:
    digits(tmp_path / "run", {"method": "fedncm", "clients_per_round": 1, "rounds": 1}, clients=5, alpha=0.5)
    masked = np.isneginf(load_file(tmp_path / "run" / "model" / "head.safetensors")["bias"])
    assert 0 < masked.sum() < 9
    found = Model.load(tmp_path / "run").predict([npz(tmp_path / "x.npz", np.ones((3, 64)))])
    assert (found.probabilities[:, masked] == 0).all()
    np.testing.assert_allclose(found.probabilities.sum(axis=1), 1)


@pytest.mark.parametrize(
    "stages",
    [
        [FEDPER],
        [{"method": "fedncm"}, {"method": "personalise", "update": "head", "epochs": 2}],
    ],
)
def test_clients_predict_with_their_own_model(stages: list[dict[str, Any]], tmp_path: Path) -> None:
    result = digits(tmp_path / "run", *stages, test="follow")
    federation = result.federation
    test, owners = federation.dataset.test, federation.test_owners
    assert owners is not None
    right, models = [], set()
    for number, name in enumerate(federation.names):
        mine = test.take(np.flatnonzero(owners == number))
        if len(mine):
            path = npz(tmp_path / f"{number}.npz", mine.features())
            found, same = (Model.load(tmp_path / "run", client=each) for each in (name, str(number)))
            labels = found.predict([path]).labels
            np.testing.assert_array_equal(same.head.weight, found.head.weight)
            models.add(found.head.weight.tobytes())
            right += list(labels == mine.labels)
    assert np.mean(right) == pytest.approx(result.summary["accuracy"])
    assert len(models) > 1


def test_a_client_that_has_nothing_of_its_own_has_everybodys_model(tmp_path: Path) -> None:
    result = digits(tmp_path / "run", {**FEDPER, "rounds": 1, "clients_per_round": 1})
    common = Model.load(tmp_path / "run").head.weight
    heads = [Model.load(tmp_path / "run", client=name).head.weight for name in result.federation.names]
    assert [np.array_equal(head, common) for head in heads].count(False) == 1


@pytest.mark.parametrize("norm_statistics", ["aggregate", "batch"])
def test_a_client_has_its_own_body_with_its_statistics(norm_statistics: str, tmp_path: Path) -> None:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic")
    transformers.ResNetModel(config).save_pretrained(tmp_path / "resnet")
    stage = {"method": "local-only", "train": "all", "rounds": 3, "batch_size": 10, "augment": "none"}
    shares = {"kind": "shards", "clients": 2, "shards_per_client": 5, "test": "follow"}
    table = {
        "data": {"dataset": "mnist-mini", "train_examples": 100, "test_examples": 60, "partition": shares},
        "model": {"backbone": str(tmp_path / "resnet"), "image_size": 28},
        "stages": [{**stage, "norm_statistics": norm_statistics}],
    }
    result = run(Recipe.parse(table), tmp_path / "run")
    test, owners = result.federation.dataset.test, result.federation.test_owners
    assert owners is not None
    right = []
    for number in range(2):
        mine = test.take(np.flatnonzero(owners == number))
        model = Model.load(tmp_path / "run", client=str(number))
        assert model.retrained
        assert model.store.backbone is not None
        assert any(each.training for each in model.store.backbone.body.modules()) == (norm_statistics == "batch")
        right += list(model.scores(mine).argmax(axis=1) == mine.labels)
    assert np.mean(right) == pytest.approx(result.summary["accuracy"])
    # Loaded by others, a model goes by running statistics: one that does not is no model for them.
    whole = "config.json" in export(tmp_path / "run", tmp_path / "out", client="client-1")
    assert whole == (norm_statistics == "aggregate")
    theirs = loaded(tmp_path / "out")["body"].state_dict()
    states = RunDirectory(tmp_path / "run").load_model(0)[0].states
    assert states is not None
    names = [name for name in states.shapes if name.startswith("personal.body.")]
    assert any(name.endswith("running_mean") for name in names) == (norm_statistics == "aggregate")
    for name in names:
        own = states.read(name, None, np.array([1]))[0]
        np.testing.assert_array_equal(theirs[name.removeprefix("personal.body.")].numpy(), own, err_msg=name)


def test_images_through_a_trained_body(tmp_path: Path, command: Command) -> None:
    table = {
        "data": {
            "dataset": "mnist-mini", "train_examples": 60, "test_examples": 40,
            "partition": {"kind": "iid", "clients": 2},
        },
        "model": {"backbone": "conv4", "weights": "random"},
        "stages": [{"method": "fedavg", "train": "all", "rounds": 1, "lr": 0.01}],
    }  # fmt: skip
    result = run(Recipe.parse(table), tmp_path / "run")
    test = result.federation.dataset.test
    folder = tmp_path / "images" / "inside"
    folder.mkdir(parents=True)
    for number, pixels in enumerate(test.raw(0, len(test))):
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
    (folder / "notes.md").write_text("not an image, and not looked at")
    model = Model.load(tmp_path / "run")
    found = model.predict([tmp_path / "images"])
    assert [Path(each).name for each in found.inputs] == [f"{number:03}.png" for number in range(40)]
    assert (found.labels == test.labels).mean() == pytest.approx(result.summary["accuracy"])
    assert export(tmp_path / "run", tmp_path / "out") == [
        "README.md", "classes.json", "head.safetensors", "model.safetensors",
    ]  # fmt: skip
    again = load_backbone(ModelTable(backbone="conv4", weights=str(tmp_path / "out" / "model.safetensors")))
    state = loaded(tmp_path / "out")["body"].state_dict()
    for (name, left), right, snip in zip(
        again.core.state_dict().items(), model.store.arrays().values(), state.values(), strict=True
    ):
        np.testing.assert_array_equal(left.numpy(), right, err_msg=name)
        np.testing.assert_array_equal(snip.numpy(), right, err_msg=name)
    (folder / "000.png").write_bytes(b"damaged")
    with pytest.raises(HeadstartError, match=r"000\.png.* is not a readable image"):
        model.predict([folder])
    skipping = replace(model, data=model.data.model_copy(update={"skip_unreadable": True}))
    assert [Path(each).name for each in skipping.predict([folder]).inputs] == [f"{n:03}.png" for n in range(1, 40)]
    (folder / "001.png").write_bytes(b"damaged")
    with pytest.raises(HeadstartError, match="2 of 40 images cannot be read; --skip-unreadable leaves them out"):
        model.predict([folder])
    said = command("predict", str(tmp_path / "run"), str(folder), "--skip-unreadable", "--out", "a.csv", cwd=tmp_path)
    assert (said.returncode, "2 images cannot be read, and are left out" in said.stderr) == (0, True)
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + 38


def test_texts_from_lines_and_tables(lora: Path, texts: Path, tmp_path: Path) -> None:
    summary = json.loads((lora / "summary.json").read_text())
    test = Federation.of(Recipe.load(lora / "recipe.toml")).dataset.test
    given = test.raw(0, len(test))
    (tmp_path / "a.txt").write_text("\n".join([*given[:2], "", *given[2:]]) + "\n")
    (tmp_path / "b.csv").write_text("\ufeffid,text\n" + "".join(f'{n},"{each}"\n' for n, each in enumerate(given)))
    (tmp_path / "c.csv").write_text("id,what they said\n" + "".join(f"{n},{each}\n" for n, each in enumerate(given)))
    model = Model.load(lora)
    found = model.predict([tmp_path / "a.txt", tmp_path / "b.csv", tmp_path / "c.csv"])
    assert found.inputs == given * 3
    assert (found.labels == np.tile(test.labels, 3)).mean() == pytest.approx(summary["accuracy"])
    assert {name for _, name, _ in found.best()} <= {"food", "sport"}
    # As spreadsheets write them.
    rows = "".join(f"{n};{each} – gewiß\r\n" for n, each in enumerate(given))
    (tmp_path / "d.csv").write_bytes(f"id;text\r\n{rows}".encode("cp1252"))
    (tmp_path / "e.tsv").write_text("id\ttext\n" + "".join(f"{n}\t{each}\n" for n, each in enumerate(given)))
    assert model.predict([tmp_path / "d.csv"]).inputs == [f"{each} – gewiß" for each in given]
    assert model.predict([tmp_path / "e.tsv"]).inputs == given
    # Many inputs go through the cache, and nothing else changes.
    (tmp_path / "many.txt").write_text("\n".join(given * 80))
    many = model.predict([tmp_path / "many.txt"]).probabilities
    assert len(many) > 256
    np.testing.assert_allclose(many, np.tile(found.probabilities[: len(given)], (80, 1)), atol=1e-5)
    assert list((tmp_path / "cache").rglob("*"))
    for text, why in (
        ("id,first,second\n1,a,b\n", "there is no 'text'; the columns are id, first, second"),
        ("text,label\nsalt, and pepper,food\n", "row 1 has 3 fields under 2 columns"),
        ("text\n", "nothing to predict for"),
        ("", "the columns are none"),
    ):
        (tmp_path / "bad.csv").write_text(text)
        with pytest.raises(HeadstartError, match=why):
            model.predict([tmp_path / "bad.csv"])
    (tmp_path / "bad.csv").write_text("text;label\nsalt; and pepper;food\n\na goal;sport\nsalt\n")
    why = "row 1 has 3 fields, row 3 has 1 fields under 2 columns; quote texts that hold a ';', or leave such rows out"
    with pytest.raises(HeadstartError, match=why):
        model.predict([tmp_path / "bad.csv"])
    assert model.predict([tmp_path / "bad.csv"], skip_unreadable=True).inputs == ["a goal"]


def test_pairs_of_texts(tmp_path: Path) -> None:
    rows = [f"{first},{second},{n % 2}" for n, (first, second) in enumerate(zip(SPORT, FOOD, strict=True))]
    (tmp_path / "pairs.csv").write_text("\n".join(["one,two,label", *rows, *rows]))
    data = {"dataset": str(tmp_path / "pairs.csv"), "input_column": ["one", "two"]}
    data["partition"] = {"kind": "iid", "clients": 2}  # type: ignore[assignment]
    model = {"backbone": "all-MiniLM-L6-v2", "max_tokens": 8}
    result = run(Recipe.parse({"data": data, "model": model, "stages": [{"method": "fedncm"}]}), tmp_path / "run")
    test = result.federation.dataset.test
    lines = [f"{n},{two},{one}" for n, (one, two) in enumerate(test.raw(0, len(test)))]
    (tmp_path / "new.csv").write_text("\n".join(["id,two,one", *lines]))
    built = Model.load(tmp_path / "run")
    found = built.predict([tmp_path / "new.csv"])
    assert found.inputs == [" | ".join(pair) for pair in test.raw(0, len(test))]
    assert (found.labels == test.labels).mean() == pytest.approx(result.summary["accuracy"])
    (tmp_path / "new.txt").write_text("one text")
    with pytest.raises(HeadstartError, match=r"pairs of texts; give a \.csv file with one and two"):
        built.predict([tmp_path / "new.txt"])


@pytest.fixture(scope="module")
def two(texts: Path) -> Path:
    (texts / "moods.csv").write_text("\n".join(["text,label", *(f"{t},{n % 3}" for n, t in enumerate(SPORT + FOOD))]))
    shares = {"kind": "iid", "clients": 2}
    table = {
        "tasks": [
            {"name": "topic", "dataset": str(texts / "texts.csv"), "partition": shares},
            {"name": "mood", "dataset": str(texts / "moods.csv"), "partition": shares},
        ],
        "model": {"backbone": "all-MiniLM-L6-v2", "max_tokens": 8},
        "stages": [{"method": "fedyolo", "train": "adapter", "bottleneck": 2, "rounds": 1, "lr": 0.1}],
    }
    run(Recipe.parse(table), texts / "two")
    return texts / "two"


def test_several_tasks(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = json.loads((two / "summary.json").read_text())
    federation = Federation.of(Recipe.load(two / "recipe.toml"))
    test, found = federation.dataset.test, {}
    for number, task in enumerate(("topic", "mood")):
        mine = test.take(federation.examples_of(number, "test"))
        scores = Model.load(two, task).scores(mine)
        found[task] = (scores.argmax(axis=1) == mine.labels - federation.classes_of(number).start).mean()
        assert found[task] == pytest.approx(summary["stages"][0]["tasks"][task]["accuracy"])
    assert Model.load(two, "mood").classes == ("0", "1", "2")
    (tmp_path / "a.txt").write_text("a goal\n")
    for options, why in (
        ([], "several tasks: topic, mood; choose one with --task"),
        (["--task", "topics"], "did you mean 'topic'"),
        (["--task", "mood", "--client", "topic/client-0"], "no client has a model of its own"),
    ):
        done, said = headstart(monkeypatch, capsys, "predict", two, tmp_path / "a.txt", *options)
        assert (done, why in said) == (2, True), said


def test_clients_of_several_tasks(tmp_path: Path, texts: Path, two: Path) -> None:
    table = json.loads(json.dumps(Recipe.load(two / "recipe.toml").model_dump(mode="json", exclude_none=True)))
    table["stages"] = [{"method": "fedper", "train": "adapter", "bottleneck": 2, "rounds": 1, "lr": 0.1}]
    run(Recipe.parse(table), tmp_path / "run")
    states = RunDirectory(tmp_path / "run").load_model(0)[0].states
    assert states is not None
    model = Model.load(tmp_path / "run", client="mood/client-1")
    assert model.classes == ("0", "1", "2")
    np.testing.assert_array_equal(model.head.weight, states.read("personal.head.weight@mood", None, np.array([3]))[0])
    with pytest.raises(HeadstartError, match="its task is mood, not topic"):
        Model.load(tmp_path / "run", task="topic", client="3")


def test_the_module_of_another_run(lora: Path, two: Path, tmp_path: Path) -> None:
    """A module file put on the same backbone predicts as in its own run."""
    (tmp_path / "a.txt").write_text("\n".join(SPORT + FOOD))
    for task in ("topic", "mood"):
        own, file = Model.load(two, task), two / "model" / f"module-{task}.safetensors"
        elsewhere = Model.load(lora, module=file)
        assert elsewhere.classes == own.classes
        left, right = (model.predict([tmp_path / "a.txt"]).probabilities for model in (own, elsewhere))
        np.testing.assert_array_equal(left, right)
    shutil.copy(file, tmp_path / "moved.safetensors")
    assert Model.load(lora, module=tmp_path / "moved.safetensors").classes == ("0", "1", "2")
    with pytest.raises(HeadstartError, match="is no module with its head"):
        Model.load(lora, module=lora / "model" / "head.safetensors")
    with pytest.raises(HeadstartError, match=r"cannot read .*absent"):
        Model.load(lora, module=tmp_path / "absent.safetensors")
    with pytest.raises(HeadstartError, match="give one of the two"):
        Model.load(lora, client="0", module=file)


def test_a_module_of_another_network(lora: Path, tmp_path: Path) -> None:
    small = transformers.BertConfig(
        vocab_size=30522, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertModel(small).save_pretrained(tmp_path / "small")
    transformers.AutoTokenizer.from_pretrained(base_of(lora)).save_pretrained(tmp_path / "small")
    text_run(tmp_path / "run", lora.parent, {"method": "fedncm"}, backbone=str(tmp_path / "small"))
    with pytest.raises(HeadstartError, match=r"does not fit on .*small"):
        Model.load(tmp_path / "run", module=lora / "model" / "module-default.safetensors")


def base_of(run: Path) -> str:
    model = Model.load(run)
    assert model.store.backbone is not None
    return str(model.store.backbone.core.name_or_path)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, one whose clients have their own heads, and inputs good and bad."""
    folder = tmp_path_factory.mktemp("bench")
    digits(folder / "run", {"method": "fedncm"})
    digits(folder / "own", FEDPER)
    npz(folder / "x.npz", np.ones((2, 64)))
    npz(folder / "wide.npz", np.ones((2, 65)))
    npz(folder / "nan.npz", np.full((2, 64), np.nan))
    (folder / "junk.npz").write_bytes(b"junk")
    arrays = {"head.weight": np.zeros((2, 4)), "head.bias": np.zeros(2), "0": np.zeros((1, 4))}
    save_file(arrays, folder / "module.safetensors", metadata={"module": '{"kind": "vpt", "tokens": 1}'})
    Image.new("RGB", (8, 8)).save(folder / "image.png")
    return folder


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["absent", "x.npz"], "holds no run"),
        (["rum", "x.npz"], "did you mean 'run'?"),
        (["run", "absent.npz"], "no such file or folder"),
        (["run", "image.png"], "the model reads features"),
        (["run", "junk.npz"], "cannot read features"),
        (["run", "wide.npz"], "X must be numbers [N, 64]"),
        (["run", "nan.npz"], "NaN"),
        (["run", "x.npz", "--task", "defalt"], "did you mean 'default'"),
        (["run", "x.npz", "--client", "0"], "no client has a model of its own"),
        (["own", "x.npz", "--client", "client-11"], "did you mean 'client-1'"),
        (["own", "x.npz", "--client", "4"], "a number below 4"),
        (["run", "x.npz", "--module", "module.safetensors"], "no backbone to put it on"),
        (["run", "x.npz", "--out", "no/found.csv"], "is no directory"),
    ],
)
def test_a_mistake_is_a_sentence(
    arguments: list[str], why: str, bench: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(bench)
    done, said = headstart(monkeypatch, capsys, "predict", *arguments)
    assert (done, why in said) == (2, True), said


def test_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    digits(tmp_path / "run", {"method": "fedncm"})
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(HeadstartError, match="not finished"):
        Model.load(tmp_path / "run")


def test_images_are_not_for_a_text_model(lora: Path, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    model = Model.load(lora)
    for path in (tmp_path / "image.png", tmp_path):
        with pytest.raises(HeadstartError, match="the model reads texts"):
            model.predict([path])


def test_texts_are_shown_as_they_are(
    lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("[/bold] no markup\n" + "very long " * 30)
    done, said = headstart(monkeypatch, capsys, "predict", lora, tmp_path / "a.txt")
    assert done == 0
    assert "[/bold] no markup" in said
    assert "very long…" in said


# --------------------------------------------------------------------------------------------------------------- export


def snippet(folder: Path, language: str) -> str:
    return "".join(re.findall(rf"```{language}\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL))


def loaded(folder: Path) -> dict[str, Any]:
    """What the README's Python leaves."""
    names: dict[str, Any] = {}
    with chdir(folder):
        exec(snippet(folder, "python"), names)
    return names


def test_a_lora_as_peft_reads_it_and_merged(
    lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model.load(lora)
    assert model.store.backbone is not None
    core, tokenizer = model.store.backbone.core, model.store.backbone.transform.tokenizer  # type: ignore[union-attr]
    ours, base = hidden(core, tokenizer), base_of(lora)
    plain = transformers.AutoModel.from_pretrained(base)
    assert (hidden(plain, tokenizer) - ours).abs().max() > 1e-3  # the LoRA does something
    done, said = headstart(monkeypatch, capsys, "export", lora, "--out", tmp_path / "adapter")
    assert done == 0, said
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "README.md", "adapter_config.json", "adapter_model.safetensors", "base", "classes.json", "head.safetensors",
    }  # fmt: skip
    torch.testing.assert_close(hidden(loaded(tmp_path / "adapter")["body"], tokenizer), ours)
    without = "\nIts backbone without the LoRA (export with --merge for both), as the model of a recipe:\n"
    assert without in (tmp_path / "adapter" / "README.md").read_text()

    done, said = headstart(monkeypatch, capsys, "export", lora, "--out", tmp_path / "merged", "--merge")
    assert done == 0, said
    assert "adapter" not in said
    whole = transformers.AutoModel.from_pretrained(tmp_path / "merged" / "body")
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged" / "body")
    torch.testing.assert_close(hidden(whole, reader), ours, atol=1e-5, rtol=1e-5)
    assert "\nAs the model of a recipe:\n" in (tmp_path / "merged" / "README.md").read_text()
    found = loaded(tmp_path / "merged")
    assert found["classes"] == ["food", "sport"]
    np.testing.assert_array_equal(found["head"].weight, model.head.weight)
    # The folder is a backbone for another recipe, pooling included.
    text_run(tmp_path / "again", lora.parent, {"method": "fedncm"}, backbone=str(tmp_path / "merged" / "body"))
    again = Model.load(tmp_path / "again")
    (tmp_path / "a.txt").write_text("\n".join(SPORT))
    _, examples = again.read([tmp_path / "a.txt"])
    assert again.store.backbone is not None
    from headstart.backbones import embed

    left, right = (embed(each.store.backbone, examples, "texts") for each in (model, again))  # type: ignore[arg-type]
    np.testing.assert_allclose(left, right, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_lora_on_a_trained_body_brings_it_along(texts: Path, tmp_path: Path) -> None:
    body = {"method": "fedavg", "train": "all", "rounds": 1, "lr": 0.01}
    text_run(tmp_path / "run", texts, body, LORA)
    model = Model.load(tmp_path / "run")
    assert model.store.backbone is not None
    ours = hidden(model.store.backbone.core, tokenizer := model.store.backbone.transform.tokenizer)  # type: ignore[union-attr]
    assert "body/model.safetensors" in export(tmp_path / "run", tmp_path / "out")
    torch.testing.assert_close(hidden(loaded(tmp_path / "out")["body"], tokenizer), ours)


def test_adapters_stay_modules(two: Path, lora: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadstartError, match="--merge: only a lora"):
        export(two, tmp_path / "out", task="mood", merge=True)
    assert not (tmp_path / "out").exists()
    with pytest.raises(HeadstartError, match="choose one with --task"):
        export(two, tmp_path / "out")
    files = export(two, tmp_path / "out", task="mood")
    assert files == ["README.md", "classes.json", "head.safetensors", "module.safetensors"]
    assert "\nIts backbone without the adapter, as the model of a" in (tmp_path / "out" / "README.md").read_text()
    (tmp_path / "a.txt").write_text("\n".join(SPORT))
    left = Model.load(two, "mood").predict([tmp_path / "a.txt"])
    right = Model.load(lora, module=tmp_path / "out" / "module.safetensors").predict([tmp_path / "a.txt"])
    np.testing.assert_array_equal(left.probabilities, right.probabilities)
    assert left.classes == right.classes


def test_a_vision_transformer(tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=32, patch_size=8
    )
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "vit")
    settings = {"size": {"height": 32, "width": 32}, "image_mean": [0.4] * 3, "image_std": [0.3] * 3}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(settings))
    table = {
        "data": {
            "dataset": "mnist-mini", "train_examples": 20, "test_examples": 10,
            "partition": {"kind": "iid", "clients": 2},
        },
        "model": {"backbone": str(tmp_path / "vit")},
        "stages": [{**LORA, "augment": "none"}],
    }  # fmt: skip
    run(Recipe.parse(table), tmp_path / "run")
    model = Model.load(tmp_path / "run")
    assert model.store.backbone is not None
    pixels = {"pixel_values": torch.rand(3, 3, 32, 32)}
    with torch.inference_mode():
        ours = model.store.backbone.core(**pixels).last_hidden_state
        for name, merge in (("adapter", False), ("merged", True)):
            export(tmp_path / "run", tmp_path / name, merge=merge)
            theirs = loaded(tmp_path / name)["body"](**pixels).last_hidden_state
            torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    merged = json.loads((tmp_path / "merged" / "preprocessor_config.json").read_text())
    assert merged["image_mean"] == [0.4] * 3


def test_a_masked_language_model_keeps_its_vocabulary(texts: Path, lora: Path, tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    network = transformers.BertForMaskedLM(config).eval()
    network.save_pretrained(tmp_path / "mlm")
    transformers.AutoTokenizer.from_pretrained(base_of(lora)).save_pretrained(tmp_path / "mlm")
    cloze = {"backbone": str(tmp_path / "mlm"), "prompt": "{text} about {mask}.", "label_words": ["food", "sport"]}
    text_run(tmp_path / "run", texts, {"method": "fedavg", "train": "all", "rounds": 1, "lr": 0.1}, **cloze)
    export(tmp_path / "run", tmp_path / "out")
    recipe = snippet(tmp_path / "out", "toml")
    assert "label_words" in recipe
    body = loaded(tmp_path / "out")["body"]
    trained = load_file(tmp_path / "run" / "model" / "model.safetensors")
    state = body.state_dict()
    for name, array in trained.items():
        if not name.startswith("head."):
            np.testing.assert_array_equal(state[name].numpy(), array, err_msg=name)
    ids = torch.tensor([[101, 2833, 103, 102]])
    assert body(input_ids=ids).logits.shape == (1, 4, 30522)


def test_features_have_a_head_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digits(tmp_path / "run", FEDPER)
    arguments = ["export", tmp_path / "run", "--out", tmp_path / "out", "--client", "client-2", "--merge"]
    done, said = headstart(monkeypatch, capsys, *arguments)
    assert done == 0, said
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"README.md", "classes.json", "head.safetensors"}
    head = LinearHead.load(tmp_path / "out" / "head.safetensors")
    np.testing.assert_array_equal(head.weight, Model.load(tmp_path / "run", client="2").head.weight)
    capsys.readouterr()
    assert loaded(tmp_path / "out")["classes"] == [str(number) for number in range(10)]
    zeros = head.scores(np.zeros((1, 64))).argmax()  # the example of the README
    assert capsys.readouterr().out == f"['{zeros}']\n"
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    done, said = headstart(monkeypatch, capsys, *arguments)
    assert (done, "already used" in said) == (2, True)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "precious"
    (tmp_path / "file").write_text("")
    done, said = headstart(monkeypatch, capsys, "export", tmp_path / "run", "--out", tmp_path / "file" / "out")
    assert (done, "cannot write there" in said) == (2, True)


def test_what_is_exported_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut right after an export leaves all of it, or nothing under its name."""
    digits(tmp_path / "run", {"method": "fedncm"})
    order = Order(monkeypatch)
    export(tmp_path / "run", tmp_path / "out")
    order.check(tmp_path / "out")
