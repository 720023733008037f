"""How much memory a strategy takes on a rank, predicted from its graphs: nothing runs, nothing is allocated."""

from fxpar.memory.liveness import Peak, body_peak
from fxpar.memory.predict import MemoryPrediction, predict_memory, program_peak
from fxpar.memory.workspace import Conditions

__all__ = ["Conditions", "MemoryPrediction", "Peak", "body_peak", "predict_memory", "program_peak"]
