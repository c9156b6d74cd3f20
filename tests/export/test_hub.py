"""A run's model pushed to a hub: one on this machine, which keeps what it is given in a folder."""

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from huggingface_hub import HfApi, ModelCard

from headstart.config.recipe import Recipe
from headstart.errors import HeadstartError
from headstart.export.hub import push
from headstart.heads import LinearHead
from headstart.runner import run
from tests.command import Command
from tests.export.test_export import LORA, text_run, texts  # noqa: F401 (a fixture among them)

pytestmark = pytest.mark.usefixtures("no_report")


class Hub(ThreadingHTTPServer):
    """What `huggingface_hub` needs of a hub to make a repository and commit files to it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.folder, self.made = folder, list[dict[str, Any]]()
        self.api = HfApi(endpoint=f"http://127.0.0.1:{self.server_port}", token="hf_of_the_test")


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body, path = self.rfile.read(int(self.headers["Content-Length"])), self.path.partition("?")[0]
        assert self.headers["Authorization"] == "Bearer hf_of_the_test"
        answer: dict[str, Any] = {}
        if path == "/api/repos/create":
            self.server.made.append(json.loads(body))
            answer = {"url": f"{self.server.api.endpoint}/me/{json.loads(body)['name']}"}
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            answer = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        elif "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    file = self.server.folder / line["value"]["path"]
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(base64.b64decode(line["value"]["content"]))
            answer = {"commitUrl": f"{self.server.api.endpoint}/me/model/commit/{'0' * 40}", "commitOid": "0" * 40}
        elif path == "/api/validate-yaml":
            answer = {"errors": [], "warnings": []}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # this hub is on this machine
    with Hub(tmp_path / "hub") as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def features_run(folder: Path, stage: dict[str, Any]) -> Path:
    rng, y = np.random.default_rng(0), np.arange(90) % 3
    np.savez(folder / "scans.npz", X=np.eye(3)[y] + rng.normal(0, 0.3, (90, 3)), y=y, split=np.repeat([0, 2], [60, 30]))
    data = {"dataset": str(folder / "scans.npz"), "partition": {"kind": "iid", "clients": 4}}
    run(
        Recipe.parse({"name": "study", "data": data, "model": {"backbone": "features"}, "stages": [stage]}),
        folder / "run",
    )
    return folder / "run"


def test_a_head_with_its_card(hub: Hub, tmp_path: Path) -> None:
    done = features_run(tmp_path, {"method": "fed3r", "privacy": {"epsilon": 8.0}})
    assert push(done, "me/model", private=True, api=hub.api) == f"{hub.api.endpoint}/me/model"
    (made,) = hub.made
    assert made["name"] == "model"
    assert made.get("private") or made["visibility"] == "private"  # releases of the client differ
    kept = {str(path.relative_to(hub.folder)) for path in hub.folder.rglob("*") if path.is_file()}
    assert kept == {"README.md", "classes.json", "head.safetensors"}
    ours = LinearHead.load(done / "model" / "head.safetensors")
    np.testing.assert_array_equal(LinearHead.load(hub.folder / "head.safetensors").weight, ours.weight)
    text = (hub.folder / "README.md").read_text()
    found = ModelCard(text)  # as the hub reads it
    summary = json.loads((done / "summary.json").read_text())
    assert found.data.library_name == "headstart"
    assert found.data.tags == ["federated-learning", "fed3r"]
    assert [(e.metric_type, e.metric_value) for e in found.data.eval_results or ()] == [
        ("accuracy", summary["accuracy"]), ("f1", summary["macro_f1"]),
    ]  # fmt: skip
    assert "4 clients held 60 training examples of scans.npz, 3 classes" in text
    assert "Differential privacy of any one example: ε = 8, δ = 1e-05." in text
    assert "| stage | rounds | accuracy, % | macro-F1, % | balanced accuracy, % | calibration error |" in text
    figures = f"{100 * summary['accuracy']:.2f} | {100 * summary['macro_f1']:.2f} | "
    figures += f"{100 * summary['balanced_accuracy']:.2f} | {summary['calibration_error']:.4g} |"
    assert f"| fed3r | 1 | {figures}" in text
    assert " | 30 | " in text
    assert str(tmp_path) not in text
    assert text.count("# study") == 1


def test_an_adapter(hub: Hub, texts: Path, tmp_path: Path) -> None:  # noqa: F811
    text_run(tmp_path / "run", texts, LORA)
    push(tmp_path / "run", "me/model", api=hub.api)
    kept = {path.name for path in hub.folder.rglob("*")}
    assert {"adapter_config.json", "adapter_model.safetensors", "base", "README.md"} <= kept
    found = ModelCard((hub.folder / "README.md").read_text())
    assert found.data.pipeline_tag == "text-classification"
    assert "No differential privacy was asked for" in found.text
    assert str(tmp_path) not in found.content


def test_mistakes_are_sentences(hub: Hub, tmp_path: Path) -> None:
    done = features_run(tmp_path, {"method": "fed3r"})
    with pytest.raises(HeadstartError, match="'a/b/c' does not name a repository, as USER/NAME"):
        push(done, "a/b/c", api=hub.api)
    nobody = HfApi(endpoint="http://127.0.0.1:9", token="x")
    with pytest.raises(HeadstartError, match="cannot upload to me/model: "):
        push(done, "me/model", api=nobody)


def test_the_command(hub: Hub, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    features_run(tmp_path, {"method": "fed3r"})
    monkeypatch.setattr("headstart.export.hub.HfApi", lambda: hub.api)
    said = command("push", "run", "me/model", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip() == f"{hub.api.endpoint}/me/model"
    assert (hub.folder / "head.safetensors").is_file()
