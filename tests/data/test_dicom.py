"""DICOM files as a viewer shows them; the expected shades are worked out by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.config.recipe import Data
from headstart.data import load_dataset
from headstart.data.examples import decode_image
from headstart.errors import HeadstartError

pydicom = pytest.importorskip("pydicom")


def save(path: Path, pixels: Any, bits: int = 12, **tags: Any) -> Path:
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    meta = FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    file = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    pixels = np.asarray(pixels)
    file.Rows, file.Columns = pixels.shape[:2]
    file.SamplesPerPixel = 3 if pixels.ndim == 3 else 1
    file.PhotometricInterpretation = "RGB" if pixels.ndim == 3 else "MONOCHROME2"
    if pixels.ndim == 3:
        file.PlanarConfiguration = 0
    file.BitsAllocated, file.BitsStored, file.HighBit = pixels.itemsize * 8, bits, bits - 1
    file.PixelRepresentation = int(pixels.dtype.kind == "i")
    for name, value in tags.items():
        setattr(file, name, value)
    file.PixelData = pixels.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    file.save_as(path)
    return path


def shades(path: Path) -> list[float]:
    image = decode_image({"bytes": None, "path": str(path)}, "here")
    assert image.mode == "F"
    kept = decode_image({"bytes": path.read_bytes(), "path": None}, "here")  # as in a parquet file
    assert np.array_equal(np.asarray(kept), np.asarray(image))
    return [float(value) for value in np.asarray(image).ravel()]


def test_without_a_window_by_the_bits(tmp_path: Path) -> None:
    path = save(tmp_path / "a.dcm", np.array([[0, 819], [2457, 4095]], np.uint16))
    assert shades(path) == pytest.approx([0, 51, 153, 255], abs=1e-3)  # 0, 1/5, 3/5 and all of 4095
    inverted = save(
        tmp_path / "b.dcm", np.array([[0, 819], [2457, 4095]], np.uint16), PhotometricInterpretation="MONOCHROME1"
    )
    assert shades(inverted) == pytest.approx([255, 204, 102, 0], abs=1e-3)


def test_a_window_in_hounsfield_units(tmp_path: Path) -> None:
    # CT: value − 1024 is in HU; soft tissue is shown from -160 to 240, which is a width of 401 values in the standard.
    stored = np.array([[0, 1024 - 160], [1024 + 40, 1024 + 240]], np.int16)
    path = save(
        tmp_path / "a.dcm", stored, bits=16, RescaleSlope=1, RescaleIntercept=-1024, WindowCenter=40.5, WindowWidth=401
    )
    assert shades(path) == pytest.approx([0, 0, 127.5, 255], abs=0.5)


def test_colours_and_frames(tmp_path: Path) -> None:
    colours = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    image = decode_image({"bytes": None, "path": str(save(tmp_path / "a.dcm", colours, bits=8))}, "here")
    assert np.array_equal(np.asarray(image), colours)
    many = save(tmp_path / "b.dcm", np.zeros((4, 2), np.uint16), NumberOfFrames=2, Rows=2)
    (tmp_path / "c.dcm").write_bytes(b"\0" * 200)
    with pytest.raises(HeadstartError, match=r"c\.dcm\) is not a readable image: it ends in .dcm, and does not begin"):
        decode_image({"bytes": None, "path": str(tmp_path / "c.dcm")}, "here")
    with pytest.raises(HeadstartError, match=r"here \(.*b\.dcm\) is not a readable image: it has 2 frames"):
        decode_image({"bytes": None, "path": str(many)}, "here")


def test_a_folder_of_dicom(tmp_path: Path) -> None:
    for number in range(12):
        save(tmp_path / "scans" / "ab"[number % 2] / f"{number}.dcm", np.full((2, 2), number, np.uint16))
    dataset = load_dataset(Data(dataset=str(tmp_path / "scans")))
    assert dataset.classes == ("a", "b")
    assert dataset.notes == ()
    assert len(dataset.train) + len(dataset.test) == 12
