"""How much memory a strategy takes on a rank, predicted from its graphs: nothing runs, nothing is allocated."""

from fxpar.memory.liveness import Peak, body_peak
from fxpar.memory.pipeline import pipeline_peak, schedule_of
from fxpar.memory.predict import predict_memory, program_peak
from fxpar.memory.prediction import MemoryPrediction, StageMemory
from fxpar.memory.workspace import Conditions

__all__ = [
    "Conditions",
    "MemoryPrediction",
    "Peak",
    "StageMemory",
    "body_peak",
    "pipeline_peak",
    "predict_memory",
    "program_peak",
    "schedule_of",
]
