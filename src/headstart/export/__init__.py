"""The model of a finished run put to use: predictions for new inputs, and files that other libraries read."""

from headstart.export.files import export
from headstart.export.model import Model, Predictions
from headstart.export.update import Updated, update

__all__ = ["Model", "Predictions", "Updated", "export", "update"]
