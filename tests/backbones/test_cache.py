"""Features on disk: what is whole is read, what is not is computed again, and nothing else is."""

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from filelock import FileLock
from PIL import Image

from headstart.backbones import Backbone, extract
from headstart.backbones.cache import FeatureFile, cache_root
from headstart.data import Examples
from headstart.errors import HeadstartError
from tests.backbones import tiny_backbones
from tests.backbones.tiny_backbones import Means, colour_means, means_backbone, pictures

pytestmark = pytest.mark.usefixtures("block")

COUNT = 18  # four blocks of four and one of two


def seen(backbone: Backbone) -> int:
    assert isinstance(backbone.body, Means)
    return backbone.body.seen


def computed(backbone: Backbone, examples: Examples) -> int:
    """How many rows an extraction computes; its answer is checked."""
    before = seen(backbone)
    np.testing.assert_allclose(extract(backbone, examples), colour_means(examples), rtol=1e-5)
    return seen(backbone) - before


def folders(cache: Path) -> list[Path]:
    return sorted((cache / "features").iterdir())


# ---------------------------------------------------------------------------------------------------------------- place


def test_features_are_for_the_eyes_of_their_owner_only(tmp_path: Path) -> None:
    examples = pictures(COUNT)
    extract(means_backbone(), examples)
    (folder,) = folders(tmp_path / "cache")

    def modes() -> dict[str, int]:
        paths = [folder.parent, folder, folder / "features.npy", folder / "blocks.json"]
        return {path.name: path.stat().st_mode & 0o777 for path in paths}

    expected = {"features": 0o700, folder.name: 0o700, "features.npy": 0o600, "blocks.json": 0o600}
    assert modes() == expected
    for path, mode in ((folder.parent, 0o755), (folder, 0o755), (folder / "features.npy", 0o644)):
        path.chmod(mode)  # as an earlier version left them
    extract(means_backbone(), examples)
    assert modes() == expected


def test_place_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("HEADSTART_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "headstart"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / ".cache" / "headstart"


@pytest.mark.parametrize("below", ["", "below/it"])
def test_cache_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str) -> None:
    (tmp_path / "file").write_text("a regular file")
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "file" / below))
    with pytest.raises(HeadstartError, match=r"cannot write features to .*file.*; free space, or set HEADSTART_CACHE"):
        extract(means_backbone(), pictures(3))


@pytest.mark.parametrize("name", ["lock", "features.npy", "blocks.json"])
def test_file_of_the_cache_that_cannot_be_written_is_an_error(cache: Path, name: str) -> None:
    backbone = means_backbone()
    extract(backbone, pictures(3))
    (folder,) = folders(cache)
    for path in folder.iterdir():
        path.unlink()
    (folder / name).mkdir()  # even the superuser cannot write to this
    with pytest.raises(HeadstartError, match=r"cannot write features to "):
        extract(backbone, pictures(3))


# ----------------------------------------------------------------------------------------------------------------- keys


def test_second_extraction_computes_nothing() -> None:
    backbone = means_backbone()
    assert computed(backbone, pictures(COUNT)) == COUNT
    assert computed(backbone, pictures(COUNT)) == 0
    assert computed(means_backbone(), pictures(COUNT)) == 0  # nor does another process that loads the same weights


def test_key_follows_weights_transform_contents_and_order(cache: Path) -> None:
    examples = pictures(6)
    backbone = means_backbone()
    extract(backbone, examples)
    assert computed(means_backbone(key="other transform"), examples) == 6
    doubled = means_backbone(weight=2.0)
    np.testing.assert_allclose(extract(doubled, examples), 2 * colour_means(examples), rtol=1e-5)
    assert computed(backbone, pictures(6, seed=1)) == 6
    turned = examples.take(np.arange(6)[::-1])
    assert computed(backbone, examples.take(np.arange(5))) == 0  # another file, of features that are known
    np.testing.assert_allclose(extract(backbone, turned), colour_means(turned), rtol=1e-5)
    pixel = examples.source.copy()
    pixel[3, 0, 0, 0] ^= 1
    assert computed(backbone, Examples("image", pixel, (), examples.rows, examples.labels)) == 1
    assert len(folders(cache)) == 7
    assert computed(backbone, examples.relabelled(np.ones(6, np.int64))) == 0  # features do not depend on labels
    assert len(folders(cache)) == 7


class Table:
    """As much of a Hugging Face table as examples use."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.records = records

    def __getitem__(self, rows: list[int]) -> dict[str, list[Any]]:
        return {"image": [self.records[row] for row in rows]}


def test_key_does_not_follow_the_place_of_the_data(tmp_path: Path) -> None:
    files: list[bytes] = []
    for image in pictures(5).source:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "PNG")
        files.append(buffer.getvalue())
    tables = [Table([{"bytes": data, "path": None} for data in files])]
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        paths = [tmp_path / place / f"{place}{number}.png" for number in range(5)]
        for path, data in zip(paths, files, strict=True):
            path.write_bytes(data)
        tables.append(Table([{"bytes": None, "path": str(path)} for path in paths]))
    backbone = means_backbone()
    for table in tables:
        examples = Examples("image", table, ("image",), np.arange(5), np.zeros(5, np.int64))
        np.testing.assert_allclose(extract(backbone, examples), colour_means(pictures(5)), rtol=1e-5)
    assert seen(backbone) == 5


# --------------------------------------------------------------------------------------------------------------- damage


def header(path: Path) -> int:
    """Bytes before the first row, by the format's own length field."""
    return 10 + int.from_bytes(path.read_bytes()[8:10], "little")


ROW = 3 * 4  # bytes


@pytest.mark.parametrize(
    ("damage", "again"),
    [
        (lambda data, start: data, 0),
        # One bit in the first row, in the last row of the second block, in the last row of all.
        (lambda data, start: _flipped(data, start), 4),
        (lambda data, start: _flipped(data, start + 8 * ROW - 1), 4),
        (lambda data, start: _flipped(data, len(data) - 1), 2),
        (lambda data, start: _flipped(_flipped(data, start), len(data) - 1), 6),
        # Cut in the last row, and in the middle of the third block: what comes before is whole.
        (lambda data, start: data[:-1], 2),
        (lambda data, start: data[: start + 9 * ROW + 5], 10),
        (lambda data, start: data[:start], COUNT),
        (lambda data, start: data[:20], COUNT),
        (lambda data, start: b"", COUNT),
        (lambda data, start: b"garbage" * 5, COUNT),
        # A header that cannot be read harms no row, nor does something after the last.
        (lambda data, start: _flipped(data, 3), 0),
        (lambda data, start: _flipped(data, 8), 0),
        (lambda data, start: _flipped(data, 30), 0),
        (lambda data, start: data + b"more", 0),
    ],
    ids=[
        *("whole", "first-row", "second-block", "last-row", "two-blocks", "cut-last-row", "cut-third-block"),
        *("cut-rows", "cut-header", "empty", "garbage", "magic", "header-length", "header-text", "longer"),
    ],
)
def test_only_damaged_blocks_are_computed_again(cache: Path, damage: Callable[[bytes, int], bytes], again: int) -> None:
    backbone, examples = means_backbone(), pictures(COUNT)
    extract(backbone, examples)
    path = folders(cache)[0] / "features.npy"
    whole = path.read_bytes()
    path.write_bytes(damage(whole, header(path)))
    assert computed(backbone, examples) == again
    assert path.read_bytes() == whole
    np.testing.assert_array_equal(np.load(path), extract(backbone, examples))  # and others can read it
    assert computed(backbone, examples) == 0


def _flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 0x10
    return bytes(changed)


def test_deleted_features_are_computed_again(cache: Path) -> None:
    backbone, examples = means_backbone(), pictures(COUNT)
    extract(backbone, examples)
    (folders(cache)[0] / "features.npy").unlink()
    assert computed(backbone, examples) == COUNT


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "garbage", "{", "[]", "[1, 2]", "null", "7", '"text"', "{}", '{"checksums": []}', "\udcff"),
        '{"rows": 18, "dim": 3, "block": 4, "checksums": 5}',
        '{"rows": 18, "dim": 3, "block": 4, "checksums": null}',
        '{"rows": 18, "dim": 3, "block": 4, "checksums": {"0": 1}}',
        '{"rows": 18, "dim": 3, "block": 4, "checksums": [1, 2, 3, 4]}',
        '{"rows": 18, "dim": 3, "block": 4, "checksums": [1, "2", [3], {}, 5.0]}',
    ],
)
def test_without_a_manifest_everything_is_computed_again(cache: Path, text: str | None) -> None:
    backbone, examples = means_backbone(), pictures(COUNT)
    extract(backbone, examples)
    path = folders(cache)[0] / "blocks.json"
    if text is None:
        path.unlink()
    else:
        path.write_bytes(text.encode(errors="surrogateescape"))
    assert computed(backbone, examples) == COUNT
    assert computed(backbone, examples) == 0


def test_manifest_that_lies_about_one_block_costs_that_block(cache: Path) -> None:
    backbone, examples = means_backbone(), pictures(COUNT)
    extract(backbone, examples)
    path = folders(cache)[0] / "blocks.json"
    manifest = json.loads(path.read_text())
    manifest["checksums"][2] += 1
    path.write_text(json.dumps(manifest))
    assert computed(backbone, examples) == 4


def test_other_size_of_blocks_reads_no_old_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, examples = means_backbone(), pictures(COUNT)
    extract(backbone, examples)
    monkeypatch.setattr("headstart.backbones.cache.BLOCK", 5)
    assert computed(backbone, examples) == COUNT


# --------------------------------------------------------------------------------------------------------- interruption


def test_each_block_is_on_disk_before_the_next_is_asked_for() -> None:
    rows = np.arange(30, dtype=np.float32).reshape(10, 3)
    file = FeatureFile("key", 10, 3)
    assert file.missing() == [0, 1, 2]
    assert [file.span(number) for number in range(3)] == [slice(0, 4), slice(4, 8), slice(8, 10)]
    missing: list[list[int]] = []

    def blocks() -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        for number in (2, 0, 1):
            missing.append(FeatureFile("key", 10, 3).missing())
            yield number, rows[file.span(number)]

    file.fill(blocks())
    assert missing == [[0, 1, 2], [0, 1], [1]]
    np.testing.assert_array_equal(file.open(), rows)
    assert FeatureFile("key", 10, 3).missing() == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_extraction_keeps_the_finished_blocks(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    backbone, examples = means_backbone(), pictures(COUNT)
    forward = Means.forward

    def failing(self: Means, images: Any) -> Any:
        if self.seen == 8:
            raise error("in the third block")
        return forward(self, images)

    monkeypatch.setattr(Means, "forward", failing)
    with pytest.raises(error, match="in the third block"):
        extract(backbone, examples)
    monkeypatch.setattr(Means, "forward", forward)
    assert computed(backbone, examples) == COUNT - 8


# ------------------------------------------------------------------------------------------------------------ processes


def start(output: Path, log: Path, go: Path, count: int) -> subprocess.Popen[str]:
    program = [sys.executable, tiny_backbones.__file__, str(output), str(log), str(go), str(count)]
    return subprocess.Popen(program, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def rows_in(log: Path) -> int:
    return sum(int(line) for line in log.read_text().split()) if log.exists() else 0


def test_two_processes_compute_once(tmp_path: Path) -> None:
    log, go = tmp_path / "log", tmp_path / "go"
    outputs = [tmp_path / "one.npy", tmp_path / "two.npy"]
    processes = [start(output, log, go, COUNT) for output in outputs]
    wait_for(lambda: all(output.with_suffix(".ready").exists() for output in outputs))
    go.touch()
    messages = "".join(process.communicate(timeout=60)[1] for process in processes)
    assert [process.returncode for process in processes] == [0, 0], messages
    for output in outputs:
        np.testing.assert_allclose(np.load(output), colour_means(pictures(COUNT)), rtol=1e-5)
    assert rows_in(log) == COUNT


def test_extraction_waits_for_another_and_reads_what_it_wrote(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    backbone, examples = means_backbone(), pictures(COUNT)
    extract(backbone, examples)
    path = folders(cache)[0] / "features.npy"
    whole = path.read_bytes()
    path.write_bytes(b"")
    with ThreadPoolExecutor(1) as pool:
        with FileLock(path.with_name("lock")):
            future = pool.submit(extract, backbone, examples, "pictures")
            message = ""
            while "another process computes the same pictures; waiting for it" not in message:
                assert not future.done()
                time.sleep(0.02)
                message = caplog.text
            path.write_bytes(whole)
        np.testing.assert_allclose(future.result(), colour_means(examples), rtol=1e-5)
    assert seen(backbone) == COUNT


def test_killed_process_leaves_its_finished_blocks_and_no_lock(tmp_path: Path, cache: Path) -> None:
    log, go = tmp_path / "log", tmp_path / "go"
    go.touch()
    process = start(tmp_path / "never.npy", log, go, 400)
    try:
        wait_for(lambda: rows_in(log) >= 12)  # two blocks are finished, the third is under way
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    manifest = json.loads((folders(cache)[0] / "blocks.json").read_text())
    finished = sum(checksum is not None for checksum in manifest["checksums"])
    assert 2 <= finished < 100
    assert computed(means_backbone(), pictures(400)) == 400 - 4 * finished
