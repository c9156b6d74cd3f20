"""A file of entries that name each other: what was changed is found."""

import hashlib
import json
import multiprocessing
from pathlib import Path

import pytest

from headstart.core.chain import Chain
from headstart.errors import HeadstartError


def numbers(chain: Chain) -> list[int]:
    return [entry["number"] for entry in chain.entries()]


def test_a_changed_or_removed_line_is_found_and_a_torn_one_never_happened(tmp_path: Path) -> None:
    chain = Chain(tmp_path / "log.jsonl")
    chain.append({"number": 0})
    chain.append({"number": 1}, {"number": 2})
    with chain.path.open("a") as file:
        file.write('{"previous": "half of an ent')
    assert numbers(chain) == [0, 1, 2]
    chain.append({"number": 3})
    assert numbers(chain) == [0, 1, 2, 3]
    whole = chain.path.read_text().splitlines(keepends=True)
    changed = whole[1].replace('"number": 1', '"number": 9')
    for lines, place in (
        ([whole[0], changed, *whole[2:]], 3), (whole[1:], 1), ([*whole[:1], *whole[2:]], 2),
        ([whole[1], whole[0], *whole[2:]], 1), (["nonsense\n", *whole[1:]], 1),
    ):  # fmt: skip
        chain.path.write_text("".join(lines))
        with pytest.raises(HeadstartError, match=f"line {place}: the chain is broken"):
            chain.entries()


def test_lines_that_are_missing_at_the_end_are_found_by_the_last_digest(tmp_path: Path) -> None:
    chain = Chain(tmp_path / "log.jsonl")
    assert chain.head() == "0" * 64
    chain.append({"number": 0}, {"number": 1})
    *rest, last = chain.path.read_bytes().splitlines(keepends=True)
    noted = chain.head()
    assert noted == hashlib.sha256(last).hexdigest()
    chain.path.write_bytes(b"".join(rest))
    assert numbers(chain) == [0]
    assert chain.head() != noted


@pytest.mark.parametrize("length", [1, 70_000, 200_000])
def test_only_the_end_of_a_long_file_is_read_to_append(tmp_path: Path, length: int) -> None:
    chain = Chain(tmp_path / "new" / "log.jsonl")
    for number in range(3):
        chain.append({"number": number, "text": "ä" * length})
        with chain.path.open("ab") as file:
            file.write(b"x" * length)
    chain.append({"number": 3})
    assert numbers(chain) == [0, 1, 2, 3]
    lines = chain.path.read_bytes().splitlines(keepends=True)
    assert json.loads(lines[3])["previous"] == hashlib.sha256(lines[2]).hexdigest()
    assert chain.path.stat().st_mode & 0o777 == 0o600


def _write(path: Path, who: int) -> None:
    for number in range(20):
        Chain(path).append({"who": who, "number": number})


def test_two_processes_write_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    processes = [multiprocessing.get_context("fork").Process(target=_write, args=(path, who)) for who in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    for who in (0, 1):
        assert [entry["number"] for entry in Chain(path).entries() if entry["who"] == who] == list(range(20))
