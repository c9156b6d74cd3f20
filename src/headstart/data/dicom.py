"""DICOM files as images, through `pydicom`, which is an extra."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from headstart.errors import HeadstartError

_MAGIC = slice(128, 132)


def is_dicom(head: bytes) -> bool:
    """Whether a file that begins like this is DICOM."""
    return head[_MAGIC] == b"DICM"


def dicom_image(data: bytes) -> Image.Image:
    """An image of RGB, or of grey in "F", from 0 to 255 and not rounded.

    Grey goes through the file's rescaling and its window, as a viewer shows it; without a window, from the lowest to
    the highest value that its bits can have. MONOCHROME1 is turned round, so that high is white.
    """
    try:
        import pydicom
        from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut
    except ImportError:
        raise HeadstartError("DICOM needs pydicom; pip install 'headstart[dicom]'") from None
    if not is_dicom(data):
        raise HeadstartError("it ends in .dcm, and does not begin like DICOM")
    file = pydicom.dcmread(io.BytesIO(data))
    if int(file.get("NumberOfFrames", 1)) != 1:
        raise HeadstartError(f"it has {file.NumberOfFrames} frames; save each as a file of its own")
    stored = file.pixel_array
    if file.PhotometricInterpretation not in ("MONOCHROME1", "MONOCHROME2"):
        if stored.dtype != np.uint8 or stored.ndim != 3 or "YBR" in file.PhotometricInterpretation:
            raise HeadstartError(f"its colours are {file.PhotometricInterpretation}, {stored.dtype}; save it as RGB")
        return Image.fromarray(stored)
    bits, signed = int(file.BitsStored), bool(file.PixelRepresentation)
    low, high = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) if signed else (0.0, 2.0**bits - 1)
    slope, intercept = float(file.get("RescaleSlope", 1)), float(file.get("RescaleIntercept", 0))
    low, high = sorted((low * slope + intercept, high * slope + intercept))
    for table in ("ModalityLUTSequence", "VOILUTSequence"):  # the last one that there is says how far values go
        if file.get(table):
            low, high = 0.0, 2.0 ** int(file[table].value[0].LUTDescriptor[2]) - 1
    values = np.asarray(apply_voi_lut(apply_modality_lut(stored, file), file), np.float64)
    shown = np.clip((values - low) / (high - low), 0, 1)
    shown = 1 - shown if file.PhotometricInterpretation == "MONOCHROME1" else shown
    return Image.fromarray((255 * shown).astype(np.float32))
