"""Why a tensor is sharded the way it is, what moves because of it, and what the alternatives would have cost; as data.

`fxpar explain` shows it (`fxpar.cli.explain`).
"""
