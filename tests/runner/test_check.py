"""headstart check: every mistake in one pass, and what the data are; headstart new: a recipe from a look at them."""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from PIL import Image

from headstart.config.recipe import Recipe
from headstart.data import Federation
from headstart.data.describe import describe
from headstart.errors import HeadstartError
from headstart.runner import run
from headstart.runner.check import check
from tests.command import Command

pytestmark = pytest.mark.usefixtures("no_report")


def recipe(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def features(path: Path, copies: int = 0, **arrays: Any) -> Path:
    """60 examples of 3 classes, a third of them for the test; the first test examples are training examples again."""
    rng, y = np.random.default_rng(0), np.arange(60) % 3
    X, split = np.eye(3)[y] + rng.normal(0, 0.3, (60, 3)), np.repeat([0, 2], [40, 20])
    X[40 : 40 + copies], y[40 : 40 + copies] = X[:copies], y[:copies]
    np.savez(path, X=X, y=y, split=split, **arrays)
    return path


def test_every_mistake_in_one_pass(tmp_path: Path) -> None:
    features(tmp_path / "measured.npz")
    path = recipe(
        tmp_path / "r.toml",
        """
        nmae = "typo"
        [data]
        dataset = "mesured.npz"
        [model]
        backbone = "resnet18"
        weights = "missing.safetensors"
        [[stages]]
        method = "fedcoff"
        """,
    )
    found = "\n".join(check(path).problems)
    for sentence in (
        "nmae: unknown key; did you mean 'name'?",
        "'fedcoff' is not known; did you mean 'fedcof'?",
        f"data.dataset: '{tmp_path / 'mesured.npz'}' is neither a known name nor an existing path; it is not there; "
        f"did you mean '{tmp_path / 'measured.npz'}'?",
        "model.weights: there is no file missing.safetensors",
    ):
        assert sentence in found
    assert len(check(path).problems) == 4


def test_a_recipe_that_is_no_toml_and_one_that_is_right(tmp_path: Path) -> None:
    assert "is not valid TOML" in check(recipe(tmp_path / "a.toml", "[data")).problems[0]
    features(tmp_path / "a.npz")
    text = f"""
        [data]
        dataset = "{tmp_path / "a.npz"}"
        partition = {{kind = "iid", clients = 4}}
        [model]
        backbone = "features"
        [[stages]]
        method = "fedcof"
        """
    assert check(recipe(tmp_path / "b.toml", text)).problems == []
    assert check(tmp_path / "b.toml", ['model.backbone="all-MiniLM-L6-v2"']).problems == [
        'model.backbone: all-MiniLM-L6-v2 reads texts, and the data are features; set it to "features"'
    ]
    missing = check(tmp_path / "b.toml", ["stages.0.eval_split=validation"]).problems
    assert missing == ["stages.0.eval_split: the data have no validation split; use 'test'"]


def test_examples_that_are_tested_and_learned(tmp_path: Path) -> None:
    def warnings(copies: int) -> tuple[str, ...]:
        table = {
            "dataset": str(features(tmp_path / f"{copies}.npz", copies)),
            "partition": {"kind": "iid", "clients": 2},
        }
        model = {"backbone": "features"}
        found = Federation.of(Recipe.parse({"data": table, "model": model, "stages": [{"method": "fed3r"}]}))
        return describe(found.dataset).warnings

    assert warnings(0) == ()
    (said,) = warnings(7)
    assert said.startswith("7 test examples are also in the training split, the first: train 0, test 0")


def test_copies_and_labels_that_differ(tmp_path: Path) -> None:
    lines = ["text,label", *(f"word {n},{'ab'[n % 2]}" for n in range(20)), "word 0,b", "word 2,a"]
    (tmp_path / "train.csv").write_text("\n".join(lines))
    (tmp_path / "test.csv").write_text("text,label\nx,a\ny,b\n")
    table = {"dataset": str(tmp_path), "partition": {"kind": "iid", "clients": 2}}
    federation = Federation.of(Recipe.parse({"data": table, "stages": [{"method": "fed3r"}]}))
    found = describe(federation.dataset)
    assert found.warnings == (
        "2 examples are a copy of another of the same split",
        "1 example is under several labels, the first: train 0 as a, train 20 as b",
    )
    assert found.facts == ("texts of 1 to 7 characters, half of them up to 6",)


def test_a_path_is_looked_for_beside_other_mistakes_in_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    features(tmp_path / "measured.npz")
    text = (
        '[data]\ndataset = "{}"\nclients_column = "x"\n[model]\nbackbone = "features"\n[[stages]]\nmethod = "fedcof"\n'
    )
    problems = check(recipe(tmp_path / "r.toml", text.format("mesured.npz"))).problems
    assert [problem.split(":")[0] for problem in problems] == ["data.clients_column", "data.dataset"]
    assert "did you mean" in problems[1]
    assert "measured.npz" in problems[1]
    for there in ("measured.npz", "digits", "somebody/something"):
        (problem,) = check(recipe(tmp_path / "r.toml", text.format(there))).problems
        assert problem.startswith("data.clients_column: unknown key")


def test_a_recipe_for_a_table_with_splits(tmp_path: Path, command: Command) -> None:
    rows = [f"word {n},{'ab'[n % 2]},{'test' if n % 4 == 1 else 'train'}" for n in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(["what,kind,split", *rows]))
    said = command("new", "a.csv", "--out", "r.toml", cwd=tmp_path)
    told = "columns: input = what, label = kind (a guess: it has the fewest values), client = none, split = split\n"
    assert told in said.stdout
    assert "data: a.csv: 30 training, 10 test" in command("check", "r.toml", cwd=tmp_path).stdout


def photos(root: Path) -> Path:
    rng = np.random.default_rng(0)
    for hospital in ("north", "south"):
        for name in ("cat", "dog"):
            for number in range(6):
                (root / hospital / name).mkdir(parents=True, exist_ok=True)
                image = Image.fromarray(rng.integers(0, 255, (8, 8 + number % 2), dtype=np.uint8))
                image.convert("RGB" if name == "cat" else "L").save(root / hospital / name / f"{number}.png")
    return root


def test_images_and_unreadable_ones(tmp_path: Path, command: Command) -> None:
    root = photos(tmp_path / "photos")
    (root / "north" / "cat" / "x.png").write_bytes(b"junk")
    (root / "south" / "dog" / "y.jpg").write_bytes(b"junk")
    recipe(tmp_path / "r.toml", '[data]\ndataset = "photos"\nclient_column = "client"\n[[stages]]\nmethod = "fed3r"\n')
    said = command("check", "r.toml", cwd=tmp_path)
    assert said.returncode == 2
    assert "2 problems, all of them found in one pass" in said.stderr
    assert "x.png) is not a readable image" in said.stderr
    assert "y.jpg) is not a readable image" in said.stderr
    said = command("check", "r.toml", "--set", "data.skip_unreadable=true", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "images of 8 × 8 to 9 × 8 pixels, most often 8 × 8 pixels (12)" in said.stdout
    assert "modes: PNG RGB (12), PNG L (12)" in said.stdout
    assert "2 clients with 10 training examples each" in said.stdout
    assert "r.toml: can be run" in said.stdout


def test_copies_of_images_are_named_by_their_files(tmp_path: Path) -> None:
    for file, shade in (("train/cat/0", 0), ("train/dog/1", 1), ("test/cat/0", 0), ("test/dog/2", 2)):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), 50 * shade, np.uint8)).save(tmp_path / f"{file}.png")
    table = {"dataset": str(tmp_path), "partition": {"kind": "iid", "clients": 2}}
    model = {"backbone": "conv4", "weights": "random"}
    federation = Federation.of(Recipe.parse({"data": table, "model": model, "stages": [{"method": "fed3r"}]}))
    (said,) = describe(federation.dataset).warnings
    same = f"train {tmp_path}/train/cat/0.png, test {tmp_path}/test/cat/0.png"
    assert said == f"1 test example is also in the training split, the first: {same}; accuracy is too high"


def test_a_run_lists_what_cannot_be_read_in_all_splits_and_logs_what_is_odd(tmp_path: Path) -> None:
    for split, each in (("train", 6), ("test", 2)):
        for number in range(each):
            place = tmp_path / "photos" / split / "ab"[number % 2]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8), 30 * number, np.uint8)).save(place / f"{number}.png")
        (tmp_path / "photos" / split / "a" / "bad.png").write_bytes(b"junk")
    (tmp_path / "photos" / "train" / "a" / "x.txt").write_text("x")
    table = {
        "data": {"dataset": str(tmp_path / "photos"), "partition": {"kind": "iid", "clients": 2}},
        "model": {"backbone": "conv4", "weights": "random"},
        "stages": [{"method": "fedncm"}],
    }
    with pytest.raises(HeadstartError, match=r"(?s)2 of 10 images cannot be read.*train: .*bad.*test: .*bad"):
        run(Recipe.parse(table), tmp_path / "run")
    table["data"]["skip_unreadable"] = True
    run(Recipe.parse(table), tmp_path / "run")
    log = (tmp_path / "run" / "run.log").read_text()
    assert "WARNING" in log
    assert "1 file is not read as images (1 .txt)" in log


def test_images_that_are_nearly_black(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(8):
        (tmp_path / "scans" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        scan = np.full((4, 4), 500 * number, np.uint16)
        Image.fromarray(scan).save(tmp_path / "scans" / "ab"[number % 2] / f"{number}.png")
    text = f'[data]\ndataset = "{tmp_path / "scans"}"\npartition = {{kind = "iid", clients = 2}}\n'
    path = recipe(
        tmp_path / "r.toml", text + '[model]\nbackbone = "conv4"\nweights = "random"\n[[stages]]\nmethod="fed3r"'
    )
    said = "grey of 16 bits goes up to 3,500 of 65,535 and is nearly black; set model.pixel_range = [0, 4095]"
    assert check(path).federations["data"][1].warnings == (said,)
    assert check(path, ["model.pixel_range=[0, 4095]"]).federations["data"][1].warnings == ()
    assert "they are the same" in check(path, ["model.pixel_range=[1, 1]"]).problems[0]
    for range_, times in (([0, 4095], 0), (None, 1)):  # a run that was not checked says so, too
        keys = tomllib.loads(path.read_text())
        keys["model"] |= {"pixel_range": range_} if range_ else {}
        run(Recipe.parse(keys), tmp_path / str(times))
        assert len([line for line in caplog.messages if said.partition(" of ")[0] in line]) == times
        assert (tmp_path / str(times) / "run.log").read_text().count(said.partition(" of ")[0]) == times


def scans(root: Path, kind: type, values: Sequence[float]) -> Path:
    """A scan of two pixels, black and one of these values, for each, in two classes."""
    for number, value in enumerate(values):
        (root / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(np.array([[0, value]], kind))
        image.save(root / "ab"[number % 2] / f"{number}.{'png' if kind is np.uint16 else 'tiff'}")
    return root


@pytest.mark.parametrize(("kind", "most"), [(np.float32, 1.5), (np.int32, 90_000)])
def test_grey_of_32_bits_is_one_problem_with_the_values_that_there_are(kind: type, most: float, tmp_path: Path) -> None:
    root = scans(tmp_path / "scans", kind, [most / 2, most] * 5)
    text = f'[data]\ndataset = "{root}"\npartition = {{kind = "iid", clients = 2}}\n'
    text += '[model]\nbackbone = "conv4"\nweights = "random"\n[[stages]]\nmethod="fedncm"'
    path = recipe(tmp_path / "r.toml", text)
    (problem,) = check(path).problems
    assert problem.startswith("10 images, the first train: example 0 (")
    assert problem.endswith(f"set model.pixel_range, or save 8 or 16 bits; these images have values from 0 to {most:g}")
    with pytest.raises(HeadstartError, match=r"(?s)10 of 10 images cannot be read:\n  - 10 images, the first [^\n]*$"):
        run(Recipe.load(path))
    assert not check(path, [f"model.pixel_range=[0, {most}]"]).problems


# --------------------------------------------------------------------------------------------------------------- new


def made(command: Command, data: Path, cwd: Path) -> dict[str, Any]:
    said = command("new", data, cwd=cwd)
    assert said.returncode == 0, said.stderr
    text = (cwd / "recipe.toml").read_text()
    (cwd / "recipe.toml").unlink()
    table = tomllib.loads(text)
    assert text.startswith("#:schema recipe.schema.json\n")
    jsonschema.validate(table, json.loads((cwd / "recipe.schema.json").read_text()))
    Recipe.parse(table)
    assert table["data"]["split_seed"] == 0
    return table


def test_a_recipe_for_photos_by_hospital(tmp_path: Path, command: Command) -> None:
    photos(tmp_path / "photos")
    table = made(command, Path("photos"), tmp_path)
    assert table["name"] == "photos"
    assert table["data"]["dataset"] == "photos"
    assert table["data"]["client_column"] == "client"
    assert table["data"]["partition"]["kind"] == "natural"
    assert table["model"]["backbone"] == "efficientnet-lite0"
    assert [stage["method"] for stage in table["stages"]] == ["fed3r"]  # two clients


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (np.float32, [0.25, 0.75], [0, 0.75]),
        (np.int32, [-1000, 3000], [-1000, 3000]),
        (np.uint16, [1000, 3500], [0, 4095]),  # twelve bits in sixteen
        (np.uint16, [1000, 65535], None),
    ],
)
def test_a_recipe_for_scans_says_what_is_black_and_white(
    kind: type, values: list[float], expected: list[float] | None, tmp_path: Path, command: Command
) -> None:
    scans(tmp_path / "scans", kind, values * 5)
    assert made(command, Path("scans"), tmp_path)["model"].get("pixel_range") == expected


def test_a_recipe_for_a_table_from_a_spreadsheet(tmp_path: Path, command: Command) -> None:
    rows = [f"Befund über {n} Zeilen;{'ja' if n % 3 else 'nein'};Klinik {n % 12};{n * 7}" for n in range(120)]
    (tmp_path / "Befunde 2024.csv").write_bytes("\n".join(["Befund;Auffällig;Hospital;Nr", *rows]).encode("cp1252"))
    table = made(command, Path("Befunde 2024.csv"), tmp_path)
    assert table["name"] == "Befunde-2024"
    data = table["data"]
    assert (data["encoding"], data["separator"]) == ("cp1252", ";")
    assert (data["input_column"], data["label_column"], data["client_column"]) == ("Befund", "Auffällig", "Hospital")
    assert table["model"]["backbone"] == "all-MiniLM-L6-v2"
    assert table["stages"][0]["method"] == "fedcof"  # twelve clients


def test_a_recipe_for_features_runs(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    features(tmp_path / "a.npz")
    table = made(command, Path("a.npz"), tmp_path)
    assert table["data"]["partition"]["kind"] == "dirichlet"
    assert table["model"]["backbone"] == "features"
    monkeypatch.chdir(tmp_path)
    assert run(Recipe.parse(table)).summary["accuracy"] > 0.5
    features(tmp_path / "b.npz", client=np.arange(60) % 12)
    assert made(command, Path("b.npz"), tmp_path)["data"]["partition"]["kind"] == "natural"


@pytest.mark.parametrize(
    ("row", "told", "client"),
    [
        ({"prompt": "{}?", "completion": "{}", "site": "h{}"}, "prompt = prompt, completion = completion", "site"),
        ({"id": "n{}", "instruction": "say {}", "output": "{}."}, "prompt = instruction, completion = output", None),
        ({"messages": "{}", "user": "u{}"}, "chat = messages", "user"),
    ],
)  # fmt: skip
def test_a_recipe_for_texts_to_complete(
    row: dict[str, str], told: str, client: str | None, tmp_path: Path, command: Command
) -> None:
    def filled(name: str, number: int) -> Any:
        if name == "messages":
            return [{"role": "user", "content": f"say {number}"}, {"role": "assistant", "content": f"{number}."}]
        return row[name].format(number % 2 if name == client else number)

    lines = [json.dumps({name: filled(name, number) for name in row}) for number in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    said = command("new", "a.jsonl", "--out", "b.toml", cwd=tmp_path).stdout
    assert f"a.jsonl: 60 texts, to be completed, {'2 clients' if client else 'no clients'}" in said
    assert f"columns: {told}, client = {client or 'none'}" in said
    table = made(command, Path("a.jsonl"), tmp_path)
    assert table["data"].get("client_column") == client
    assert table["data"]["partition"] == (
        {"kind": "natural", "test": "follow"} if client else {"kind": "iid", "clients": 2}
    )
    assert (table["model"]["task"], table["stages"][0]["train"]) == ("generate", "lora")
    loaded = Federation.of(Recipe.parse(table | {"data": table["data"] | {"dataset": str(tmp_path / "a.jsonl")}}))
    assert (len(loaded.names), sum(map(len, loaded.dataset.splits.values()))) == (2, 60)


def test_texts_with_a_label_are_to_be_classified(tmp_path: Path, command: Command) -> None:
    rows = [{"prompt": f"what is {number}", "completion": "so", "label": "ab"[number % 2]} for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert "task" not in made(command, Path("a.jsonl"), tmp_path)["model"]


def test_new_refuses(tmp_path: Path, command: Command) -> None:
    features(tmp_path / "a.npz")
    assert "did you mean 'a.npz'?" in command("new", "b.npz", cwd=tmp_path).stderr
    (tmp_path / "recipe.toml").write_text("precious")
    said = command("new", "a.npz", cwd=tmp_path)
    assert (said.returncode, "already exists" in said.stderr) == (2, True)
    (tmp_path / "c.csv").write_text("a,b\n" + "\n".join(f"{n}.5,{n}" for n in range(9)))
    said = command("new", "c.csv", "--out", "c.toml", cwd=tmp_path)
    assert (said.returncode, "which column is the input, and which the label?" in said.stderr) == (2, True)


def test_a_recipe_for_a_table_says_which_columns_it_reads(tmp_path: Path, command: Command) -> None:
    rows = [f"Wort {n};{'ab'[n % 2]};{'xyz'[n % 3]};{n}" for n in range(30)]
    (tmp_path / "a.csv").write_text("\n".join(["Kommentar;Klasse;Klinik;Nr", *rows]))
    said = command("new", "a.csv", cwd=tmp_path)
    guess = "label = Klasse (a guess: it has the fewest values)"
    client = "client = none (write client_column = 'Klinik' if its values are the clients)"
    told = f"columns: input = Kommentar, {guess}, {client}; not read: Klinik, Nr"
    assert told in said.stdout
    assert f"# {told}; input_column" in (tmp_path / "recipe.toml").read_text()


def test_labels_are_guessed_as_a_reader_would_count_them(tmp_path: Path, command: Command) -> None:
    rows = [
        f"Text Nummer {n};{('gut', 'Gut ', 'schlecht', '')[n % 4]};{('Bonn', 'Ulm', 'Hof')[n % 3]}" for n in range(40)
    ]
    (tmp_path / "a.csv").write_text("\n".join(["Freitext;Bewertung;Klinik", *rows]))
    assert made(command, Path("a.csv"), tmp_path)["data"]["label_column"] == "Bewertung"


def test_a_recipe_for_labels_from_1_names_the_classes_that_there_are(tmp_path: Path, command: Command) -> None:
    rows = [f"word {n},{1 + n % 4}" for n in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(["text,label", *rows]))
    said = command("new", "a.csv", "--out", "a.toml", cwd=tmp_path)
    assert "40 texts, 4 classes" in said.stdout
    table = made(command, Path("a.csv"), tmp_path)
    assert table["data"]["classes"] == [1, 2, 3, 4]
    assert Federation.of(Recipe.load(tmp_path / "a.toml", [f"data.dataset={tmp_path / 'a.csv'}"])).counts.shape[1] == 4


def test_a_recipe_for_a_table_with_broken_rows_leaves_them_out(tmp_path: Path, command: Command) -> None:
    rows = [f"word {n},{'ab'[n % 2]}" for n in range(20)]
    (tmp_path / "a.csv").write_text("\n".join(["text,label", *rows, "one, two,a", ",b"]))
    assert made(command, Path("a.csv"), tmp_path)["data"]["skip_unreadable"] is True
    (tmp_path / "b.csv").write_text("\n".join(["text,label", *rows]))
    assert "skip_unreadable" not in made(command, Path("b.csv"), tmp_path)["data"]
    (tmp_path / "c.csv").write_text("\n".join(["text,label", *rows[:9], "alone", *rows[9:]]))
    assert made(command, Path("c.csv"), tmp_path)["data"]["skip_unreadable"] is True


def table_of(tmp_path: Path, *stages: str, clients: int = 3, model: str = 'backbone = "features"') -> Path:
    features(tmp_path / "measured.npz")
    data = f'[data]\ndataset = "measured.npz"\n[data.partition]\nkind = "iid"\nclients = {clients}\n'
    text = data + f"[model]\n{model}\n" + "".join(f"[[stages]]\n{stage}\n" for stage in stages)
    return recipe(tmp_path / "recipe.toml", text)


@pytest.mark.parametrize(
    "stage",
    [
        *(f'method = "fedavg"\ntrain = "{train}"' for train in ("lora", "adapter", "vpt", "norms", "prefix", "all")),
        *(f'method = "{method}"' for method in ("slora", "fedsa-lora", "fedyolo", "fedex-lora", "flexlora")),
        'method = "personalise"\nupdate = "lora"',
    ],
)
def test_features_have_nothing_below_the_head_to_train(tmp_path: Path, stage: str) -> None:
    (problem,) = check(table_of(tmp_path, stage)).problems
    assert "the data are features, there is no backbone to train; use 'head'" in problem


def test_what_data_and_clients_do_not_have_is_told_at_once(tmp_path: Path) -> None:
    local = 'method = "fedavg"\ntrain = "head"\nrounds = 1\n'
    path = table_of(
        tmp_path,
        'method = "fedncm"\neval_split = "validation"',
        local + "secure = true",
        local + 'keep = "best"',
        clients=2,
    )
    problems = check(path).problems
    assert [problem.split(":")[0] for problem in problems] == ["stages.0.eval_split", "stages.1.secure", "stages.2"]
    assert "2 clients are in a sum, which hides none of them; it takes 3 or more" in problems[1]
    with pytest.raises(HeadstartError, match="3 problems"):
        run(path)


def test_keys_without_an_effect_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They may be left from a value that is tried out beside others, so that the run goes on."""
    keys = "secure_group = 4\nsecure_threshold = 0.9\ntop_k = 0.1\ntrim = 0.2\nstaleness = 1.0\nhidden = 7\n"
    keys += "clients_per_round = 40\n"
    path = table_of(tmp_path, 'method = "fedavg"\ntrain = "head"\nrounds = 1\n' + keys)
    assert check(path).problems == []
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0].removeprefix("stages.0.") for line in said] == [
        "secure_group", "secure_threshold", "top_k", "trim", "hidden", "staleness", "clients_per_round"
    ]  # fmt: skip
    assert said[0] == "stages.0.secure_group: it has no effect without secure = true"
    assert said[-1] == "stages.0.clients_per_round: 40, and there are 3 clients: all take part in every round"


def test_a_module_that_finds_no_place_in_the_backbone_is_told_of_before_the_run(tmp_path: Path) -> None:
    for split, number in (("train", 6), ("test", 2)):
        for place in range(number):
            path = tmp_path / "images" / split / str(place % 2) / f"{place}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((32, 32, 3), 20 * place, np.uint8)).save(path)
    text = '[data]\ndataset = "images"\n[data.partition]\nkind = "iid"\nclients = 2\n[model]\nbackbone = "conv4"\n'
    stages = '[[stages]]\nmethod = "fedncm"\n[[stages]]\nmethod = "fedavg"\ntrain = "lora"\nrounds = 1\n'
    (problem,) = check(recipe(tmp_path / "recipe.toml", text + 'weights = "random"\n' + stages)).problems
    assert problem.startswith("stages.1.train: conv4 has no transformer blocks for a lora")


def test_rules_of_aggregation_that_a_file_registers_can_be_checked(tmp_path: Path, command: Command) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import headstart\n\nheadstart.register_aggregation('checked-mine', lambda updates, weights: updates)\n"
    )
    path = table_of(tmp_path, 'method = "fedavg"\ntrain = "head"\nrounds = 1\ncombine = "checked-mine"')
    for name in ("check", "plan"):
        assert command(name, path, "--import", plugin, cwd=tmp_path).returncode == 0
