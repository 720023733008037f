"""Carries out switch plans and reductions between ranks: pack, one message per peer, unpack."""

from __future__ import annotations

from fxpar.transport.groups import ProcessGroups
from fxpar.transport.holding import Holding
from fxpar.transport.node_first import NodeFirstReduction, reduction_on
from fxpar.transport.reduction import Reduction
from fxpar.transport.staging import Staging
from fxpar.transport.switch import Switch, SwitchReport

__all__ = [
    "Holding",
    "NodeFirstReduction",
    "ProcessGroups",
    "Reduction",
    "Staging",
    "Switch",
    "SwitchReport",
    "reduction_on",
]
