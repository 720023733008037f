"""A plan of waves as one plain HTML page: a line per device, time to the right. It needs no script and no network."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping

from fxpar.viz.page import asset
from fxpar.waves import WavePlan
from fxpar.waves.chart import letter

_WIDTH, _ROW, _LEFT = 1000, 16, 60  # of the drawing, in its own units
_TICKS = 5


def waves_html(plan: WavePlan, title: str, strategies: Mapping[tuple[int, int], str] | None = None) -> str:
    """The page. A run is a box of its MetaOp's colour and letter, the backward lighter; what a device receives before
    is hatched, and a line below says when it adds up gradients. Pointing at a box tells its layers, devices, wave and
    time, and its strategy: `strategies` by MetaOp and number of devices.
    """
    height = plan.devices * _ROW + 40
    colours = "".join(f".m{m}{{fill:{_colour(m, len(plan.graph.metaops))}}}" for m in range(len(plan.graph.metaops)))
    body = "\n".join([*_lines(plan), *_runs(plan, strategies or {}), *_reductions(plan)])
    rows = "".join(
        f'<tr><td><svg width="12" height="12"><rect class="m{m}" width="12" height="12"/></svg> {letter(m)}</td>'
        f"<td>{html.escape(one.name)}</td><td>{one.layers}</td></tr>"
        for m, one in enumerate(plan.graph.metaops)
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            f'<head><meta charset="utf-8"><title>{html.escape(title)}</title>',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<style>{asset('style.css')}{asset('waves.css')}{colours}</style></head>",
            f"<body class='waves'><h1>{html.escape(title)}</h1>",
            f"<p>{html.escape(_summary(plan))}</p>",
            f'<svg viewBox="0 0 {_LEFT + _WIDTH + 10} {height}" role="img" aria-label="devices over time">',
            '<defs><pattern id="receives" width="4" height="4" patternUnits="userSpaceOnUse">',
            '<path d="M0 4L4 0" stroke="currentColor" stroke-width="0.8"/></pattern></defs>',
            body,
            "</svg>",
            f"<table><tr><th></th><th>MetaOp</th><th>layers</th></tr>{rows}</table>",
            "</body></html>",
            "",
        ]
    )


def _summary(plan: WavePlan) -> str:
    return (
        f"A step takes {plan.ms:.1f} ms on {plan.devices} devices; none takes less than {plan.bound_ms:.1f} ms "
        f"(gap {plan.gap:.1%}). One after the other: {plan.sequential_ms:.1f} ms. Dark: forward, light: backward, "
        f"hatched: receiving, {plan.transfer_share:.1%} of the step, line below: adding up gradients, which takes "
        f"{plan.step.exposed_ms:.1f} ms at the end of the step."
    )


def _lines(plan: WavePlan) -> Iterator[str]:
    """Devices and times."""
    bottom = plan.devices * _ROW
    for device in range(plan.devices):
        y = device * _ROW
        yield f'<text x="{_LEFT - 6}" y="{y + _ROW - 5}" text-anchor="end">{device}</text>'
        yield f'<rect class="idle" x="{_LEFT}" y="{y + 1}" width="{_WIDTH}" height="{_ROW - 2}"/>'
    for tick in range(_TICKS + 1):
        x = _LEFT + _WIDTH * tick / _TICKS
        yield f'<text x="{x:g}" y="{bottom + 16}" text-anchor="middle">{plan.ms * tick / _TICKS:.1f} ms</text>'


def _runs(plan: WavePlan, strategies: Mapping[tuple[int, int], str]) -> Iterator[str]:
    scale = _WIDTH / plan.ms
    waves = {piece: number for number, members in enumerate(plan.waves) for piece in members}
    for run in plan.step.runs:
        piece = plan.pieces[run.piece]
        way = "backward" if run.backward else "forward"
        told = (
            f"{plan.graph.metaops[piece.metaop].name}, layers {piece.first} to {piece.last - 1}, {way}, wave "
            f"{waves[run.piece]}, {len(piece.devices)} devices, {run.begin_ms:.2f} to {run.end_ms:.2f} ms"
        )
        if strategy := strategies.get((piece.metaop, len(piece.devices))):
            told += f", {strategy}"
        x, begin, end = (_LEFT + ms * scale for ms in (run.start_ms, run.begin_ms, run.end_ms))
        for device in piece.devices:
            y = device * _ROW + 1
            box = f'y="{y}" height="{_ROW - 2}"'
            if begin > x:
                yield f'<rect class="receives" x="{x:.2f}" width="{begin - x:.2f}" {box}/>'
            yield (
                f'<rect class="m{piece.metaop} {way}" x="{begin:.2f}" width="{end - begin:.2f}" {box}>'
                f"<title>{html.escape(told)}</title></rect>"
            )
            if end - begin > 2 * _ROW:
                yield f'<text class="name" x="{begin + 3:.2f}" y="{y + _ROW - 6}">{letter(piece.metaop)}</text>'


def _reductions(plan: WavePlan) -> Iterator[str]:
    scale = _WIDTH / plan.ms
    for one in plan.step.reductions:
        x, width = _LEFT + one.start_ms * scale, (one.end_ms - one.start_ms) * scale
        for device in one.devices:
            y = (device + 1) * _ROW - 3
            yield f'<rect class="reduces" x="{x:.2f}" width="{width:.2f}" y="{y}" height="2"/>'


def _colour(number: int, count: int) -> str:
    return f"hsl({360 * number // count} 55% 45%)"
