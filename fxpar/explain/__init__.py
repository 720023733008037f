"""Why a value lies as it does, what moves because of it, and what the alternatives would have cost; as data.

`fxpar explain` shows it (`fxpar.cli.explain`).
"""
