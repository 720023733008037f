"""Every error that fxpar raises on purpose: one class per condition.

Each message names what is wrong (node, module FQN, config key, the user's source line where it is known) and what to
do about it. All classes derive from `FxparError`, so a caller can catch the family; the CLI prints the message alone
and exits with status 1 (2 for a mistake on the command line).
"""

from __future__ import annotations

from fxpar.errors.base import *
from fxpar.errors.batching import *
from fxpar.errors.capture import *
from fxpar.errors.checkpoints import *
from fxpar.errors.compiling import *
from fxpar.errors.looking import *
from fxpar.errors.planning import *
from fxpar.errors.running import *
from fxpar.errors.strategies import *
from fxpar.errors.switching import *
from fxpar.errors.training import *
