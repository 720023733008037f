"""Graph passes, one file each. This folder imports as `fxpar.passes`.

A pass is one named rewrite of a graph. It holds its options as fields of a frozen dataclass (units
in the names: `bucket_mb`). Its docstring says what holds before and after, shows three lines of
either in the printer's notation, and gives its cost in bytes. It is *exact* (every bit of the
results stays) or *numeric* (and then says what it changes).

A pass knows graphs, placements, sharding rules and costs. It never imports another pass, the
lowering that orders passes, or the runtime; `fxpar.ir.pass_registry` finds it by name. Import
absolutely in this folder (`from fxpar.ir.graph import ...`), and keep it flat.
"""

if __name__ != "fxpar.passes":
    raise ImportError(
        f"this folder was imported as {__name__!r}, which makes a second copy of every pass; "
        "write `import fxpar.passes` (or `from fxpar.passes import ...`) instead"
    )
