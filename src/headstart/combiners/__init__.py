"""What the server makes of the mean update of a round: a step, and what it remembers for the next one."""

from headstart.combiners.adaptive import Adagrad, Adam, Yogi
from headstart.combiners.average import Average
from headstart.combiners.combiner import Combiner, State
from headstart.combiners.momentum import Momentum

__all__ = ["Adagrad", "Adam", "Average", "Combiner", "Momentum", "State", "Yogi"]
