"""The one door to private torch names: nothing outside this folder uses a torch name with a leading underscore."""

from __future__ import annotations
