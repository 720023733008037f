"""How much memory a strategy takes on a rank, predicted from its graphs: nothing runs, nothing is allocated."""

from fxpar.memory.liveness import body_series
from fxpar.memory.pipeline import pipeline_peak, schedule_of
from fxpar.memory.predict import memory_over_time, predict_memory, program_peak, program_series, steady_micro_batches
from fxpar.memory.prediction import MemoryOverTime, MemoryPrediction, RankMemory, StageMemory
from fxpar.memory.series import KINDS, Moment, Peak, Series
from fxpar.memory.workspace import Conditions

__all__ = [
    "KINDS",
    "Conditions",
    "MemoryOverTime",
    "MemoryPrediction",
    "Moment",
    "Peak",
    "RankMemory",
    "Series",
    "StageMemory",
    "body_series",
    "memory_over_time",
    "pipeline_peak",
    "predict_memory",
    "program_peak",
    "program_series",
    "schedule_of",
    "steady_micro_batches",
]
