"""The words of `fxpar check`."""

from __future__ import annotations

from typing import Annotated

import typer

from fxpar.cli.options import SUFFIX, Backend, Debug, ModelOrGraph, Override, PrecisionText, Seed, Set, Tokens, World

EXAMPLES = ("fxpar check hf:qwen3 -s dp2,tp2+sp --dtype float64",)


def check_command(
    model: ModelOrGraph,
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategies",
            "-s",
            metavar="S,...",
            help="Strategies, such as dp2,tp2+sp,dp2.pp2+zb_h1; none for the file of a lowered graph.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the parameters; float64 checks to 1e-10.")] = "float32",
    tokens: Tokens = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the results as JSON; - is stdout.")] = None,
    set_: Set = [],  # noqa: B006 - typer copies it
    override: Override = [],  # noqa: B006
    world: World = None,
    compile_: Annotated[Backend, typer.Option("--compile", help="How the graphs of the ranks run.")] = Backend.eager,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Largest relative error (default: by dtype).", show_default=False)
    ] = None,
    precision: PrecisionText = None,
    packed: Annotated[
        bool, typer.Option("--force-packing", help="Pack documents into rows without a proof that it is harmless.")
    ] = False,
    padded: Annotated[bool, typer.Option("--force-padding", help="Pad rows although the model would see it.")] = False,
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    """Run all ranks of each strategy in this process; compare loss and gradients with one device.

    Exits with 1 if a strategy misses or cannot be run.
    """
    if not strategies and not model.endswith(SUFFIX):
        raise typer.BadParameter("say which strategies to check", param_hint="--strategies")
    from fxpar.cli.check import CheckRequest, run_check

    request = CheckRequest(
        model=model,
        strategies=tuple(strategies.split(",")) if strategies else (),
        dtype=dtype,
        tokens=tokens,
        json=json,
        options=tuple(set_),
        overrides=tuple(override),
        world=world,
        compile=compile_.value,
        tolerance=tolerance,
        seed=seed,
        debug=debug,
        precision=precision,
        packed=packed,
        padded=padded,
    )
    if not run_check(request):
        raise typer.Exit(1)
