import numpy as np
import pytest

from headstart.heads import LinearHead
from headstart.runner.evaluation import evaluate, evaluate_each

HEAD = LinearHead(np.eye(3, 2, dtype=np.float32), np.array([0, 0, -np.inf], np.float32))
FEATURES = np.array([[2.0, 0], [0, 1], [3, 0], [0, 5]])
LABELS = np.array([0, 1, 1, 2])


def test_accuracy_and_loss_by_hand() -> None:
    found = evaluate(HEAD, FEATURES, LABELS)
    assert found.accuracy == 0.5
    # Cross-entropies of the three examples whose class the head knows.
    expected = np.mean([np.log(1 + np.exp(-2)), np.log(1 + np.exp(-1)), np.log(1 + np.exp(3))])
    assert found.loss == pytest.approx(expected, rel=1e-6)
    # F1 of class 0: 2 · 1/(1 + 2), of class 1: 2 · 1/(2 + 2), of class 2: 0; recalls 1, 1/2 and 0.
    assert found.metrics()["macro_f1"] == pytest.approx((2 / 3 + 1 / 2) / 3)
    assert found.metrics()["balanced_accuracy"] == 0.5
    more = {"macro_f1", "balanced_accuracy", "calibration_error", "test_examples"}
    assert set(found.metrics()) == {"accuracy", "loss", *more}


def test_accuracy_at_each_client() -> None:
    found = evaluate(HEAD, FEATURES, LABELS, np.array([0, 0, 1, -1]), np.ones((3, 3), np.int64))
    np.testing.assert_array_equal(found.client_accuracy, [1.0, 0.0, np.nan])
    assert found.metrics()["local_accuracy_mean"] == 0.5
    assert found.metrics()["local_accuracy_std"] == 0.5
    assert found.metrics()["local_accuracy_worst_tenth"] == 0.0


def test_accuracy_by_the_classes_of_each_client() -> None:
    # Class 0 is always right, class 1 half of the time, class 2 never; nobody was tested on class 3.
    counts = np.array([[4, 0, 0, 0], [1, 2, 0, 7], [0, 1, 1, 0], [0, 0, 0, 5]])
    head = LinearHead(np.eye(4, 2, dtype=np.float32), np.array([0, 0, -np.inf, -np.inf], np.float32))
    found = evaluate(head, FEATURES, LABELS, counts=counts)
    np.testing.assert_allclose(found.client_accuracy, [1.0, 2 / 3, 0.25, np.nan])


def test_no_known_class_has_no_loss() -> None:
    assert evaluate(HEAD, FEATURES[3:], LABELS[3:]).loss is None


def test_clients_with_models_of_their_own_count_by_their_training_examples() -> None:
    """Where the split is shared, an answer weighs what the client has of its class over what the split has."""
    labels, counts = np.array([0, 0, 1, 1, 1]), np.array([[6, 3], [0, 2]])
    answers = [np.array([0, 1, 1, 1, 0]), np.array([0, 0, 1])]  # of the first client on all, of the second on class 1
    scores = [np.eye(2, dtype=np.float32)[each] for each in answers]
    found = evaluate_each((lambda rows, each=each: each for each in scores), labels, None, counts)  # type: ignore[misc]
    # Of class 0: weights 3 and 3, one right. Of class 1: 1, 1, 1 (two right), and 2/3 each (one right).
    true, right = np.array([6.0, 5.0]), np.array([3.0, 2 + 2 / 3])
    predicted = np.array([3 + 1 + 4 / 3, 3 + 2 + 2 / 3])
    assert found.other_metrics["balanced_accuracy"] == pytest.approx((right / true).mean())
    assert found.other_metrics["macro_f1"] == pytest.approx((2 * right / (true + predicted)).mean())
    assert found.accuracy == pytest.approx(right.sum() / true.sum())
