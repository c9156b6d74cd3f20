"""One readable file per method: its settings, its paper, its verbs. Importing them registers them, in this order."""

# ruff: noqa: I001, F401 (the order is the one in which methods are listed)
from headstart.core.params import Params
from headstart.core.reply import ClientResult
from headstart.core.update import Total
from headstart.methods.base import Method, Population, Received, StageContext, Task
from headstart.methods.closed_form import ClosedForm
from headstart.methods.registry import METHODS, build, register
from headstart.methods.training import Training, TrainingState
from headstart.solvers.cohort import Cohort
from headstart.methods import fedncm
from headstart.methods import fed3r
from headstart.methods import fedcof
from headstart.methods import fedavg
from headstart.methods import fedprox
from headstart.methods import fedavgm
from headstart.methods import fedadam
from headstart.methods import fedyogi
from headstart.methods import fedadagrad
from headstart.methods import feddyn
from headstart.methods import scaffold
from headstart.methods import fednova
from headstart.methods import centralised
from headstart.methods import slora
from headstart.methods import exact_lora
from headstart.methods import fedsa_lora
from headstart.methods import fedyolo
from headstart.methods import fedbabu
from headstart.methods import fedper
from headstart.methods import fedrep
from headstart.methods import lg_fedavg
from headstart.methods import per_fedavg
from headstart.methods import ditto
from headstart.methods import local_only
from headstart.methods import personalise
from headstart.methods import fedmezo
from headstart.methods import distmezo

__all__ = [
    "METHODS", "ClientResult", "ClosedForm", "Cohort", "Method", "Params", "Population", "Received",
    "StageContext", "Task", "Total", "Training", "TrainingState", "build", "register",
]  # fmt: skip
