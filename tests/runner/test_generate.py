"""Runs of models that generate: loss on the completion alone, perplexity by client and pooled, seeded completions."""

import csv
import json
import logging
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import tomli_w
import torch
import transformers

from headstart.backbones import Backbone, load_backbone
from headstart.backbones.completions import Sampling, complete
from headstart.config.recipe import Model, Recipe
from headstart.core.files import write_text
from headstart.data import Federation
from headstart.errors import HeadstartError, RecipeError
from headstart.export import Model as Exported
from headstart.export import export
from headstart.export.completions import completions
from headstart.export.replay import replay
from headstart.report.dashboard.gallery import Gallery
from headstart.report.tables import summary_table
from headstart.runner import run
from headstart.runner.compare import compare
from tests.backbones.test_language import VOCABULARY, folder_of, numbers
from tests.command import Command
from tests.runner.test_choose import lines

PAIRS = [("the cat", "sat"), ("the dog", "ran very"), ("film", "good"), ("very very", "bad the cat"), ("", "dog")]


def table(folder: Path, rows: list[dict[str, Any]] | None = None, **stage: Any) -> dict[str, Any]:
    if not (folder / "model").is_dir():
        folder_of(folder / "model")
        rows = rows or [{"prompt": p, "completion": c, "who": "ab"[n % 2]} for n, (p, c) in enumerate(PAIRS * 6)]
        write_text(folder / "train.jsonl", "\n".join(map(json.dumps, rows)))
    return {
        "data": {
            "dataset": str(folder / "train.jsonl"), "client_column": "who", "test_fraction": 0.3,
            "partition": {"kind": "natural", "test": "follow"},
        },
        "model": {"backbone": str(folder / "model"), "task": "generate"},
        "stages": [{"method": "fedavg", "train": "lora", "rounds": 3, "lr": 0.5, "batch_size": 8} | stage],
    }  # fmt: skip


def backbone_of(folder: Path, **keys: Any) -> Backbone:
    return load_backbone(Model(backbone=str(folder_of(folder)), task="generate", **keys))


def shown(backbone: Backbone, value: Any) -> list[tuple[str, int]]:
    return [(VOCABULARY[number], int(target)) for number, target in backbone.transform(value, "x")]


def test_the_completion_and_its_end_are_what_is_learned(tmp_path: Path) -> None:
    backbone = backbone_of(tmp_path)
    prompt = [("<s>", 0), ("the", 0), ("dog", 0)]
    answer = [("ran", 1), ("very", 1), ("</s>", 1)]
    assert shown(backbone, ("the dog", "ran very")) == prompt + answer
    chat = [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": "ran very"}]
    assert shown(backbone, chat) == [("film", 0), ("the", 0), ("dog", 0), (":", 0), *answer]
    twice = [*chat, {"role": "user", "content": "cat"}, {"role": "assistant", "content": "sat"}]
    assert [word for word, target in shown(backbone, twice) if target] == ["sat", "</s>"]
    with pytest.raises(HeadstartError, match="x: the last of the messages is not the assistant's"):
        backbone.transform(chat[:1], "x")


def test_a_long_prompt_is_cut_at_its_beginning(tmp_path: Path) -> None:
    backbone = backbone_of(tmp_path, max_tokens=4)
    assert shown(backbone, ("the very very dog", "ran")) == [("very", 0), ("dog", 0), ("ran", 1), ("</s>", 1)]
    assert shown(backbone, ("dog", "ran very very good bad")) == [("dog", 0), ("ran", 1), ("very", 1), ("very", 1)]


@torch.inference_mode()
def test_losses_are_those_of_transformers_and_padding_has_none(tmp_path: Path) -> None:
    backbone = backbone_of(tmp_path)
    batch = backbone.transform.collate([backbone.transform(pair, "x") for pair in PAIRS])
    found = backbone.body(*batch).numpy()
    padded = backbone.body(*(torch.nn.functional.pad(each, (0, 4)) for each in batch)).numpy()
    np.testing.assert_allclose(padded, found, atol=1e-5)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for (prompt, completion), (loss, tokens) in zip(PAIRS, found, strict=True):
        before, after = [0, *numbers(prompt)], [*numbers(completion), 2]
        ids = torch.tensor([before + after])
        labels = torch.tensor([[-100] * len(before) + after])
        assert tokens == len(after)
        assert loss / tokens == pytest.approx(float(model(input_ids=ids, labels=labels).loss), rel=1e-4)


@torch.inference_mode()
def test_a_sequence_to_sequence_model_answers(tmp_path: Path) -> None:
    backbone = load_backbone(Model(backbone=str(folder_of(tmp_path, "mt5", ends=True)), task="generate"))
    batch = backbone.transform.collate([backbone.transform(pair, "x") for pair in PAIRS])
    found = backbone.body(*batch).numpy()
    padded = backbone.body(*(torch.nn.functional.pad(each, (0, 4)) for each in batch)).numpy()
    np.testing.assert_allclose(padded, found, atol=1e-5)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    for (prompt, completion), (loss, tokens) in zip(PAIRS, found, strict=True):
        labels = torch.tensor([[*numbers(completion), 2]])
        given = torch.tensor([[0, *numbers(prompt), 2]])  # the prompt ends as the tokenizer ends it
        assert tokens == labels.shape[1]
        assert loss / tokens == pytest.approx(float(model(input_ids=given, labels=labels).loss), rel=1e-4)
    made = model.generate(torch.tensor([[0, *numbers("the cat"), 2]]), max_new_tokens=5, do_sample=False)
    said = transformers.AutoTokenizer.from_pretrained(tmp_path).decode(made[0], skip_special_tokens=True)
    assert complete(backbone, backbone.transform.prompt_tokens("the cat"), Sampling(5)) == said  # type: ignore[union-attr]


@pytest.mark.parametrize("method", ["fedavg", "fedmezo"])
def test_a_sequence_to_sequence_model_learns_to_answer(method: str, tmp_path: Path) -> None:
    given = table(tmp_path, method=method, rounds=6, **({"lr": 0.05, "batch_size": "full"} if "z" in method else {}))
    folder_of(tmp_path / "model", "mt5", ends=True)
    run(Recipe.parse(given), tmp_path / "run")
    first, *_, last = lines(tmp_path / "run")
    assert last["loss"] < first["loss"]


def test_samples_before_and_after_are_kept_and_scored(tmp_path: Path) -> None:
    given = table(tmp_path, rounds=8)
    given["model"] |= {"samples": 3, "max_new_tokens": 4}
    recipe = Recipe.parse(given)
    run(recipe, tmp_path / "run")
    with (tmp_path / "run" / "samples.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["stage"], row["round"]) for row in rows] == [("0", "0")] * 3 + [("0", "8")] * 3
    test = Federation.of(recipe).dataset.test.raw(0, 3)
    assert [(row["prompt"], row["reference"]) for row in rows] == list(test) * 2
    backbone = Exported.load(tmp_path / "run").store.backbone
    assert backbone is not None
    transform: Any = backbone.transform
    said = [complete(backbone, transform.prompt_tokens(prompt), Sampling(4)).strip() for prompt, _ in test]
    assert [row["completion"] for row in rows[3:]] == said
    metrics = lines(tmp_path / "run")
    assert [("rouge_l" in line, "exact_match" in line) for line in metrics] == [(r in (0, 8),) * 2 for r in range(9)]
    exact = np.mean([row["completion"].split() == row["reference"].split() for row in rows[3:]])
    assert metrics[-1]["exact_match"] == pytest.approx(exact)
    report = (tmp_path / "run" / "report.html").read_text()
    assert "<h2>Completions</h2>" in report
    assert "<th>ROUGE-L of sampled completions, %</th>" in report.replace(' class="n"', "")
    assert f">{100 * metrics[-1]['rouge_l']:.2f}</td>" in report
    silent = table(tmp_path, rounds=1)
    silent["model"]["samples"] = 0
    run(Recipe.parse(silent), tmp_path / "silent")
    assert not (tmp_path / "silent" / "samples.csv").exists()


def test_perplexity_before_and_after_pooled_and_by_client(tmp_path: Path) -> None:
    recipe = Recipe.parse(table(tmp_path, rounds=8))
    run(recipe, tmp_path / "run")
    first, *_, last = lines(tmp_path / "run")
    federation = Federation.of(recipe)
    test, owners = federation.dataset.test, federation.test_owners
    assert owners is not None
    backbone = load_backbone(recipe.model)
    with torch.inference_mode():
        batch = backbone.transform.collate([backbone.transform(each, "x") for each in test.raw(0, len(test))])
        losses, tokens = backbone.body(*batch).numpy().T
    assert (first["round"], first["accuracy"]) == (0, None)
    assert first["perplexity"] == pytest.approx(np.exp(losses.sum() / tokens.sum()), rel=1e-4)
    own = [np.exp(losses[owners == k].sum() / tokens[owners == k].sum()) for k in range(2)]
    assert first["local_perplexity_mean"] == pytest.approx(np.mean(own), rel=1e-4)
    assert last["perplexity"] < 0.7 * first["perplexity"]
    with (tmp_path / "run" / "clients.csv").open() as file:
        each = [float(row["perplexity"]) for row in csv.DictReader(file)]
    assert np.mean(each) == pytest.approx(last["local_perplexity_mean"], abs=1e-5)
    report = (tmp_path / "run" / "report.html").read_text()
    assert f"<b>Perplexity {last['perplexity']:.2f}</b> of test completions ({first['perplexity']:.2f} before" in report
    assert "<h2>Perplexity and cost</h2>" in report
    assert "perplexity of test completions" in report  # beside the curve
    assert "Clients with the highest perplexity" in report
    assert "not tested" not in report
    assert "1.0 of 1 classes" not in report
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["perplexity"] == last["perplexity"]
    shown = summary_table(json.loads((tmp_path / "run" / "summary.json").read_text()))
    assert list(shown.columns[1].cells) == [f"perplexity {last['perplexity']:.2f}"]


def test_a_comparison_prefers_the_lower_perplexity(tmp_path: Path) -> None:
    given = table(tmp_path, rounds=2) | {"seed": [0, 1]}
    given["stages"][0]["lr"] = [0.01, 0.5]
    found = compare(given)
    frame = found.to_frame().set_index("lr")
    assert frame.loc[0.5, "perplexity_mean"] < frame.loc[0.01, "perplexity_mean"]
    columns, rows, best = found.pivot()
    place = columns.index("perplexity")
    assert best == {(row, place) for row, cells in enumerate(rows) if cells[0] == "0.5"}
    (test,) = found.tests()
    assert (test["best"], test["other"]) == ("0.5 fedavg", "0.01 fedavg")
    for point, summary in zip(found.points, found.summaries, strict=True):
        run(point.recipe, tmp_path / "runs" / point.folder)
        (status,) = Gallery([tmp_path / "runs" / point.folder]).statuses()
        assert status.score.startswith(f"perplexity {summary['perplexity']:.2f}")
        assert status.goodness == -summary["perplexity"]  # by which the dashboard sorts, the largest first
    assert test["difference"] == pytest.approx(frame["perplexity_mean"].diff().iloc[-1])


@pytest.mark.parametrize("keep", ["best", "last"])
def test_validation_chooses_the_round_of_the_lowest_perplexity(keep: str, tmp_path: Path) -> None:
    """At this rate training goes astray, and the first rounds are the best ones."""
    splits = ("train", "validation", "test")
    rows = [
        {"prompt": p, "completion": c, "who": "ab"[n % 2], "split": splits[n % 3]} for n, (p, c) in enumerate(PAIRS * 6)
    ]
    given = table(tmp_path, rows, rounds=6, lr=80.0, keep=keep)
    del given["data"]["test_fraction"]
    run(Recipe.parse(given), tmp_path / "run")
    found = lines(tmp_path / "run")
    played = [line for line in found if "validation_perplexity" in line]
    (stage,) = json.loads((tmp_path / "run" / "summary.json").read_text())["stages"]
    best = min(played, key=lambda line: float(line["validation_perplexity"]))
    assert best is not played[-1]
    assert (stage["best_round"], stage["best_perplexity"]) == (best["round"], best["perplexity"])
    assert stage["perplexity"] == pytest.approx((best if keep == "best" else found[-1])["perplexity"])
    report = (tmp_path / "run" / "report.html").read_text()
    assert f"validation chooses round {best['round']}, perplexity {best['perplexity']:.2f}" in report


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_fedmezo_on_completions_is_one_run_whoever_holds_them(name: str, tmp_path: Path) -> None:
    stage = {"method": "fedmezo", "train": "norms", "batch_size": "full", "lr": 1e-2}
    given = table(tmp_path, **stage)
    folder_of(tmp_path / "model", name, ends=name == "bart")
    alone = given | {"data": given["data"] | {"partition": {"kind": "iid", "clients": 1}}}
    spread = given | {"data": given["data"] | {"partition": {"kind": "iid", "clients": 4}}}
    for name, each in (("one", alone), ("four", spread)):
        each["data"] = {key: value for key, value in each["data"].items() if key != "client_column"}
        run(Recipe.parse(each), tmp_path / name)
    one, four = (lines(tmp_path / name)[-1]["loss"] for name in ("one", "four"))
    assert one == pytest.approx(four, rel=1e-5)
    assert one != pytest.approx(lines(tmp_path / "one")[0]["loss"], rel=1e-4)
    assert replay(tmp_path / "four", tmp_path / "again") == []


def test_the_last_blocks_of_an_encoder_with_a_decoder_are_refused(tmp_path: Path) -> None:
    given = table(tmp_path, method="fedmezo", train="norms", blocks=0)
    folder_of(tmp_path / "model", "bart", ends=True)
    with pytest.raises(HeadstartError, match=r"has an encoder and a decoder, and its last 0 blocks cannot be trained"):
        run(Recipe.parse(given), tmp_path / "run")


def test_what_is_cut_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = table(tmp_path, rounds=1)
    given["model"]["max_tokens"] = 6
    federation = Federation.of(Recipe.parse(given))
    long = sum(len(p.split()) + len(c.split()) > 4 for p, c in federation.dataset.train.raw(0, 100))
    with caplog.at_level(logging.WARNING, "headstart"):
        run(Recipe.parse(given))
    said = f"model.max_tokens: {long} of {len(federation.dataset.train)} training examples have more than 6 tokens"
    assert any(said in each.getMessage() for each in caplog.records)


def test_texts_are_shown_as_the_model_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": "ran very"}]
    given = table(tmp_path, [{"messages": chat, "who": "ab"[n % 2]} for n in range(8)])
    given["model"]["max_tokens"] = 6
    write_text(tmp_path / "recipe.toml", tomli_w.dumps(given))
    done = Command(monkeypatch, capsys)("partition", tmp_path / "recipe.toml", "--show", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # Of seven tokens, the first of the prompt is cut.
    assert done.stdout.count("the dog :\n  → ran very </s>\n") == 2
    assert "film" not in done.stdout


@pytest.mark.parametrize("chat", [False, True])
def test_completions_are_read_alike_from_every_format(chat: bool, tmp_path: Path) -> None:
    """By client, and by a column of categories."""
    rows: list[dict[str, Any]] = [{"prompt": p or "a", "completion": c} for p, c in PAIRS * 3]
    if chat:
        rows = [{"messages": [{"role": "user", "content": row["prompt"]},
                              {"role": "assistant", "content": row["completion"]}]} for row in rows]  # fmt: skip
    rows = [row | {"who": "ab"[n % 2], "kind": "xyz"[n % 3]} for n, row in enumerate(rows)]
    given = table(tmp_path, rows)
    frame = pandas.DataFrame(rows)
    frame.to_parquet(tmp_path / "train.parquet")
    files = ["train.jsonl", "train.parquet"]
    if not chat:  # a field of a CSV file is one text
        frame.to_csv(tmp_path / "train.csv", index=False)
        files.append("train.csv")
    by_kind = {"client_column": None, "domain_column": "kind", "partition": {"kind": "domains"}}
    for keys, names in (({}, ("a", "b")), (by_kind, ("x", "y", "z"))):
        data = {key: value for key, value in (given["data"] | keys).items() if value is not None}
        read = [Federation.of(Recipe.parse(given | {"data": data | {"dataset": str(tmp_path / f)}})) for f in files]
        held = Recipe.parse(given | {"data": data | {"dataset": "memory"}})
        read += [Federation.of(held, each) for each in (frame, datasets.Dataset.from_pandas(frame))]
        for each in read:
            assert each.names == names
            np.testing.assert_array_equal(each.owners, read[0].owners)
            assert list(each.dataset.train.raw(0, 99)) == list(read[0].dataset.train.raw(0, 99))


@pytest.mark.parametrize(("column", "holds"), [(["prompt", "who"], "int64"), ("prompt", "string")])
def test_columns_that_hold_no_texts_are_refused(column: Any, holds: str, tmp_path: Path) -> None:
    given = table(tmp_path, [{"prompt": "the", "completion": "cat", "who": number % 2} for number in range(8)])
    given["data"]["input_column"] = column
    with pytest.raises(
        HeadstartError, match=f"data.input_column: .* of the train split holds .*{holds}.*; give two col"
    ):
        Federation.of(Recipe.parse(given))


def test_completions_are_those_of_transformers_and_of_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(Recipe.parse(table(tmp_path, rounds=8)), tmp_path / "run")
    write_text(tmp_path / "prompts.txt", "the cat\nthe dog\nfilm")
    model = Exported.load(tmp_path / "run")
    found = dict(completions(model, [tmp_path / "prompts.txt"], Sampling(5)))
    export(tmp_path / "run", tmp_path / "out", merge=True)
    merged: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "body")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / "body")
    for prompt, completion in found.items():
        ids = [0, *numbers(prompt)]
        for _ in range(5):  # greedy, one token after the other
            ids.append(int(merged(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == 2:
                break
        assert completion == tokenizer.decode(ids[1 + len(prompt.split()) :], skip_special_tokens=True)
    one, same, other = (
        list(completions(model, [tmp_path / "prompts.txt"], Sampling(5, 1.5, seed=seed))) for seed in (1, 1, 2)
    )
    assert one == same != other
    pieces: list[tuple[str, str]] = []
    told = dict(completions(model, [tmp_path / "prompts.txt"], Sampling(5), lambda *piece: pieces.append(piece)))
    assert told == found
    assert {p: "".join(piece for prompt, piece in pieces if prompt == p).strip() for p in found} == {
        prompt: completion.strip() for prompt, completion in found.items()
    }
    assert max(sum(prompt == p for prompt, _ in pieces) for p in found) > 1  # as it comes, not at the end
    arguments = ["predict", tmp_path / "run", tmp_path / "prompts.txt", "--out", tmp_path / "said.csv", "--chat"]
    done = Command(monkeypatch, capsys)(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the cat\n    " in done.stdout
    chat = dict(completions(model, [tmp_path / "prompts.txt"], Sampling(chat=True)))
    assert f"the cat,{chat['the cat']}" in (tmp_path / "said.csv").read_text().replace("\r", "")


@pytest.mark.parametrize("test", ["follow", "shared"])
@pytest.mark.parametrize("method", ["local-only", "fedsa-lora", "ditto"])
def test_a_personal_model_is_tested_on_its_clients_completions(method: str, test: str, tmp_path: Path) -> None:
    given = table(tmp_path, method=method)
    given["data"]["partition"]["test"] = test
    result = run(Recipe.parse(given), tmp_path / "run")
    first, *_, last = lines(tmp_path / "run")
    assert last["loss"] < first["loss"] - 0.1
    assert last["perplexity"] == pytest.approx(np.exp(last["loss"]))
    assert last["local_perplexity_std"] > 0  # two models
    assert first["local_perplexity_std"] == 0 or test == "follow"  # one, on the same completions
    assert not (tmp_path / "run" / "samples.csv").exists()
    assert result.summary["stages"][-1]["perplexity"] == last["perplexity"]


@pytest.mark.parametrize("update", ["lora", "all"])
def test_clients_make_the_model_their_own(update: str, tmp_path: Path) -> None:
    """Fine-tuned by its client, a model is better at the client's completions, and not at those of the other."""
    given = table(tmp_path, rounds=2, lr=0.1, train="lora" if update == "lora" else "all")
    rows = [{"prompt": f"the {a}", "completion": b, "who": who} for who, b in (("a", "sat"), ("b", "ran very"))
            for a in ("cat", "dog", "film") * 5]  # fmt: skip
    write_text(tmp_path / "train.jsonl", "\n".join(map(json.dumps, rows)))
    own = {"method": "personalise", "update": update, "epochs": 3, "lr": 0.1, "batch_size": 5, "forgetting": True}
    given["stages"].append(own)
    result = run(Recipe.parse(given), tmp_path / "run")
    shared, *epochs = lines(tmp_path / "run")[-5:]
    assert [line["round"] for line in epochs] == [0, 1, 2, 3]
    for name in ("mean", "std"):
        assert epochs[0][f"initial_perplexity_{name}"] == pytest.approx(shared[f"local_perplexity_{name}"])
        assert epochs[-1][f"personalised_perplexity_{name}"] == epochs[-1][f"local_perplexity_{name}"]
    last = result.summary["stages"][-1]
    assert last["initial_perplexity_mean"] == epochs[0]["initial_perplexity_mean"]
    assert last["personalised_perplexity_mean"] < last["initial_perplexity_mean"] - 0.1
    assert last["whole_perplexity"] > last["personalised_perplexity_mean"]
    assert epochs[0]["initial_whole_perplexity"] == pytest.approx(shared["perplexity"], rel=1e-5)
    with (tmp_path / "run" / "clients.csv").open() as file:
        each = [float(row["perplexity"]) for row in csv.DictReader(file) if row["stage"] == "1"]
    assert np.mean(each) == pytest.approx(last["personalised_perplexity_mean"], rel=1e-5)
    report = (tmp_path / "run" / "report.html").read_text()
    assert f"{last['initial_perplexity_mean']:.2f} ± {last['initial_perplexity_std']:.2f} at first" in report


@pytest.mark.parametrize(
    ("model", "stage", "sentence"),
    [
        ({"prompt": "{text}"}, {}, "model.prompt: with task = 'generate', prompts are in the data; leave it out"),
        ({}, {"method": "fedncm", "train": None}, "stages.0.method: fedncm computes a head, and a model that gener"),
        (
            {},
            {"method": "personalise", "compute": "fed3r", "train": None, "rounds": None},
            "stages.0.compute: a model that answers in words has its own head; leave compute out",
        ),
        (
            {},
            {"method": "personalise", "without_head": True, "train": None, "rounds": None},
            "stages.0.without_head: a model that answers in words has its own head",
        ),
        ({"weights": "random"}, {}, "model.weights: a language model comes with its own; leave it out"),
    ],
)
def test_what_a_model_that_generates_cannot_do(model: Any, stage: Any, sentence: str, tmp_path: Path) -> None:
    given = table(tmp_path, **stage)
    given["stages"] = [{key: value for key, value in given["stages"][0].items() if value is not None}]
    with pytest.raises(RecipeError, match=sentence):
        Recipe.parse(given | {"model": given["model"] | model})
