"""Metrics of clients against scikit-learn's."""

import csv
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score

import headstart
from headstart.runner.client_metrics import of_classes, of_owners, roc_auc

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 4, 400)
SCORES = (RNG.normal(size=(400, 4)) + 1.5 * np.eye(4)[LABELS]).astype(np.float32)


def shares(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores.astype(float))
    return powers / powers.sum(axis=1, keepdims=True)


def test_of_own_examples() -> None:
    owners = RNG.integers(-1, 5, 400)
    owners[owners == 3] = 2  # client 3 has none
    found = of_owners(SCORES, LABELS, owners, 5)
    for client in (0, 1, 2, 4):
        mine = owners == client
        answers = SCORES[mine].argmax(axis=1)
        assert found["test_examples"][client] == mine.sum()
        assert found["macro_f1"][client] == pytest.approx(f1_score(LABELS[mine], answers, average="macro"))
        assert found["balanced_accuracy"][client] == pytest.approx(balanced_accuracy_score(LABELS[mine], answers))
        expected = roc_auc_score(LABELS[mine], shares(SCORES[mine]), multi_class="ovr")
        assert found["roc_auc"][client] == pytest.approx(expected)
    assert found["test_examples"][3] == 0
    assert np.isnan(found["macro_f1"][3])


def test_of_shared_examples_by_a_clients_classes() -> None:
    counts = np.array([[3, 0, 5, 0], [1, 1, 1, 1], [7, 1, 0, 2]])
    found = of_classes(SCORES, LABELS, counts)
    answers, sizes = SCORES.argmax(axis=1), np.bincount(LABELS)
    for client, held in enumerate(counts):
        mine = held[LABELS] > 0
        weights = (held / sizes)[LABELS[mine]]
        expected = f1_score(LABELS[mine], answers[mine], average="macro", sample_weight=weights)
        assert found["macro_f1"][client] == pytest.approx(expected)
        recalls = [np.mean(answers[LABELS == label] == label) for label in np.flatnonzero(held)]
        assert found["balanced_accuracy"][client] == pytest.approx(np.mean(recalls))
        areas = [
            roc_auc_score(LABELS[mine] == label, shares(SCORES[mine])[:, label], sample_weight=weights)
            for label in np.flatnonzero(held)
        ]
        assert found["roc_auc"][client] == pytest.approx(np.mean(areas) if len(areas) > 1 else np.nan, nan_ok=True)


def test_ties_and_single_classes() -> None:
    tied = np.zeros((6, 2), np.float32)
    assert roc_auc(tied, np.array([0, 1, 0, 1, 0, 1])) == 0.5
    assert roc_auc(tied, np.zeros(6, int)) is None
    labels = np.array([0, 1, 0, 1, 0, 1])
    np.testing.assert_array_equal(
        of_classes(tied, labels, np.array([[1, 1], [3, 1], [2, 0]]))["roc_auc"], [0.5, 0.5, np.nan]
    )


@pytest.mark.parametrize("test", ["follow", "shared"])
def test_clients_have_them_in_their_table(test: str, tmp_path: Path, no_report: None) -> None:
    partition = {"kind": "dirichlet", "clients": 4, "alpha": 1.0, "test": test}
    table = {"data": {"dataset": "digits", "partition": partition}, "model": {"backbone": "features"}}
    result = headstart.run({**table, "stages": [{"method": "fedcof"}]}, tmp_path / "run")
    with (tmp_path / "run" / "clients.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["train_examples"]) for row in rows] == result.federation.sizes.tolist()
    assert list(rows[0])[:6] == ["stage", "client", "accuracy", "bytes_up", "bytes_down", "forward_passes"]
    assert all(0 < float(row["balanced_accuracy"]) <= 1 for row in rows)
    owners, dataset = result.federation.test_owners, result.federation.dataset
    if owners is None:
        assert {row["test_examples"] for row in rows} == {""}
        assert all(0.5 < float(row["roc_auc"]) <= 1 for row in rows)
        return
    answers = result.head.scores(dataset.test.features()).argmax(axis=1)
    for client, row in enumerate(rows):
        mine = owners == client
        assert int(row["test_examples"]) == mine.sum()
        expected = f1_score(dataset.test.labels[mine], answers[mine], average="macro")
        assert float(row["macro_f1"]) == pytest.approx(expected, abs=1e-5)
