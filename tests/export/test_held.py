"""Predictions for what is in memory are those for the same in files."""

from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import headstart
from headstart.errors import HeadstartError

X, Y = load_digits(return_X_y=True)


def test_features(tmp_path: Path) -> None:
    recipe = {"data": {"dataset": "digits"}, "model": {"backbone": "features"}, "stages": [{"method": "fedcof"}]}
    headstart.run(recipe, tmp_path / "run")
    model = headstart.Model.load(str(tmp_path / "run"))
    np.savez(tmp_path / "new.npz", X=X[:7])
    expected = model.predict([tmp_path / "new.npz"])
    for given in (X[:7], torch.tensor(X[:7]), pandas.DataFrame(X[:7]), X[:7].tolist(), list(X[:7])):
        found = model.predict(given)
        np.testing.assert_array_equal(found.probabilities, expected.probabilities)
    assert len(found) == 7
    assert found.names == [str(label) for label in expected.labels]
    table = found.to_frame()
    assert table["predicted"].tolist() == found.names
    np.testing.assert_allclose(table[list("0123456789")].to_numpy(), expected.probabilities)
    assert repr(found) == "<Predictions: 7 inputs, 10 classes>"
    assert "<table" in found._repr_html_()
    assert repr(model) == "<Model run: features, 10 classes>"
    for wrong, why in (
        (X[:3, :5], "inputs must be numbers [N, 64], as in training"),
        (X[:3] * np.nan, "inputs holds NaN"),
        (["a text"], "the model reads features [n, d]; these are texts"),
        ([], "X is empty"),
    ):
        with pytest.raises(HeadstartError) as caught:
            model.predict(wrong)
        assert why in str(caught.value)


def test_images_and_texts(tmp_path: Path) -> None:
    pixels = (X[:60].reshape(-1, 8, 8) * 15).astype(np.uint8)
    recipe = {
        "data": {"partition": {"kind": "iid", "clients": 2}}, "model": {"backbone": "conv4", "weights": "random"},
        "stages": [{"method": "fedncm"}],
    }  # fmt: skip
    headstart.run(recipe, tmp_path / "images", data=(pixels, Y[:60]))
    model = headstart.Model.load(tmp_path / "images")
    (tmp_path / "new").mkdir()
    for number, image in enumerate(pixels[:4]):
        Image.fromarray(image).save(tmp_path / "new" / f"{number}.png")
    expected = model.predict([tmp_path / "new"]).probabilities
    for given in (pixels[:4], [Image.fromarray(image) for image in pixels[:4]]):
        np.testing.assert_allclose(model.predict(given).probabilities, expected, atol=1e-6)
    texts = ["a good film", "a bad film", "good, very good", "bad, very bad"] * 4
    labels = ["good" if "good" in text else "bad" for text in texts]
    table = {**recipe, "model": {"backbone": "all-MiniLM-L6-v2", "max_tokens": 8}}
    headstart.run(table, tmp_path / "texts", data=(texts, labels))
    model = headstart.Model.load(tmp_path / "texts")
    (tmp_path / "new.txt").write_text("quite good\nquite bad\n")
    expected = model.predict([tmp_path / "new.txt"]).probabilities
    found = model.predict(["quite good", "quite bad"])
    np.testing.assert_allclose(found.probabilities, expected, atol=1e-6)
    assert found.inputs == ["quite good", "quite bad"]
