"""All causal model types of transformers against plain torch, one sequence at a time: the table of docs/model_types.md.

    python benchmarks/sweep.py                      # all types; resumes where it was stopped
    python benchmarks/sweep.py llama bart lfm2      # these
    python benchmarks/sweep.py --again              # anew

Each type is built tiny, with random weights in float64, in evaluation mode (torch draws other dropout masks). Its loss
and gradients are found twice by one device: by the model itself under plain autograd, each document alone, and by the
captured graph. Then `fxpar.check` runs rows of several documents under five strategies, with default settings, and
those of types with experts under four strategies that cut experts.
A type is *equal* if all of these agree, *refused* if an error or a line names the reason, and *wrong* otherwise.

A type runs in a forked process of its own, with a limit in time; results are kept in --folder, one file per type.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxpar.batching.documents import split_documents
from fxpar.checking import check
from fxpar.checking.eager import WithoutFloat32, compare_with_eager
from fxpar.checking.widen import widen
from fxpar.errors import CheckedLengthError, FxparError, MixedDtypesError
from fxpar.flow import padding_hazard
from fxpar.ir.graph import LogicalGraph
from fxpar.models import load
from fxpar.models.loaded import LoadedModel
from fxpar.ops.traits import EXPERT_PRODUCTS
from fxpar.passes.pack_documents import packed_if_proved
from fxpar.tracer import capture

STRATEGIES = ("dp2", "tp2", "tp2+sp", "cp2", "pp2")
OF_EXPERTS = ("ep2", "ep4", "dp2.ep2", "ep2.tp2+sp")
EAGER_LIMIT = 1e-5  # the model rounds its float32 islands in its own order
WIDE_LIMIT = 1e-10  # of one that is off by more, or mixes both dtypes: the two run once more without float32 islands
TOKENS = (31, 22)


def sweep_one(name: str) -> dict[str, Any]:
    """What became of one type: status "equal", "refused" or "wrong", how far off, and why."""
    try:
        model = load(f"hf:{name}", dtype="float64", tokens=TOKENS)
        module = model.model.eval()
        try:
            logical = capture(module, model.loss_fn, model.example_batch, name=model.name)
        except MixedDtypesError:  # no more than plain torch, but the type runs with weights in float32
            with WithoutFloat32():
                logical = capture(module, model.loss_fn, model.example_batch, name=model.name)
    except Exception as error:  # the model's own errors too: a line says why it does not run
        return {"status": "refused", "why": _line(error)}
    alone = [document for row in model.batches for document in split_documents(logical.inputs, row)]
    eager, wide, why = math.inf, 0.0, ""
    try:
        eager = _off(logical, model, alone)
    except CheckedLengthError as error:
        return {"status": "refused", "why": _line(error)}
    except Exception as error:
        why = _line(error)
    if not eager < EAGER_LIMIT:
        try:
            with WithoutFloat32():
                wide = _off(capture(module, model.loss_fn, model.example_batch, name=model.name), model, alone)
        except Exception as error:
            return {"status": "refused", "why": f"the model itself does not run in float64: {why or _line(error)}"}
    rows, unpacked = packed_if_proved(widen(logical))
    results = {strategy: _under(strategy, logical, model) for strategy in STRATEGIES}
    has_experts = any(node.target in EXPERT_PRODUCTS for node in logical.gm.graph.nodes)
    apart = {strategy: _under(strategy, logical, model) for strategy in OF_EXPERTS if has_experts}
    kinds = {each["status"] for each in results.values()}
    wrong = "wrong" in kinds | {each["status"] for each in apart.values()}
    status = "wrong" if wrong or not (eager < EAGER_LIMIT or wide < WIDE_LIMIT) else "equal"
    if status == "equal" and kinds == {"refused"}:
        status = "refused"
    return {
        "status": status,
        "eager": eager,
        "eager_without_float32": wide,
        "packed": not unpacked,
        "unpacked": _short(unpacked),
        "padding": _short(padding_hazard(rows) or ""),
        "strategies": results,
        "experts": apart,
        "why": next((each["why"] for each in results.values() if each["why"]), ""),
    }


def _under(strategy: str, logical: LogicalGraph, model: LoadedModel) -> dict[str, Any]:
    """What became of the rows of several documents under a strategy."""
    try:
        (result,) = check(logical, [strategy], model.params(), model.buffers(), model.batches, scale=model.scale())
    except FxparError as error:
        return {"status": "refused", "why": _line(error)}
    off = max(result.loss_rel_err, result.grad_max_rel_err)
    status = "equal" if result.ok else "refused" if result.error else "wrong"
    return {"status": status, "off": off, "why": _short(result.error)}


def _off(logical: LogicalGraph, model: LoadedModel, documents: list[dict[str, Tensor]]) -> float:
    """How far the graph is off the model under plain autograd, each document alone."""
    found = [compare_with_eager(logical, model.model, model.loss_fn, document) for document in documents]
    return max((max(one.loss_rel_err, one.grad_max_rel_err) for one in found if one is not None), default=0.0)


def _line(error: Exception) -> str:
    return _short(str(error))


def _short(text: str) -> str:
    """The first line, without the folder of transformers."""
    text = text.partition("\n")[0]
    for part in text.split():
        if "/site-packages/" in part:
            text = text.replace(part, part.rpartition("/site-packages/")[2])
    return text


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere:
        warnings.simplefilter("ignore")
        kept = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)


def _in_a_process(name: str, file: Path, limit_s: float) -> None:
    """Write the result of one type to `file`; one that takes too long, or dies, is said to."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with _quiet():
                result = sweep_one(name)
            file.with_suffix(".part").write_text(json.dumps(result, indent=1))
            file.with_suffix(".part").rename(file)
            code = 0
        except BaseException as error:
            file.write_text(json.dumps({"status": "wrong", "why": f"{type(error).__name__}: {_line(error)}"}))
        os._exit(code)
    ended = time.monotonic() + limit_s
    while time.monotonic() < ended:
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        file.write_text(json.dumps({"status": "refused", "why": f"took more than {limit_s:g} s"}))
    if not file.exists():
        file.write_text(json.dumps({"status": "wrong", "why": "the process died"}))


def table(results: dict[str, dict[str, Any]]) -> str:
    """The page of the documentation."""
    counts = Counter(result["status"] for result in results.values())
    lines = [
        "# Model types of transformers",
        "",
        f"What fxpar does with each causal type of transformers {version('transformers')}, tiny and with random",
        f"weights, in float64, under {', '.join(STRATEGIES)}, against plain torch on one sequence at a time.",
        "Made by `make sweep`.",
        "",
        f"**{counts['equal']} equal, {counts['refused']} refused with the reason, {counts['wrong']} wrong**, of "
        f"{len(results)}. *Packed*: several documents share a row. *Padded*: lengths need not divide.",
        f"*Experts*: whether a type with experts is equal under {', '.join(OF_EXPERTS)} too.",
        "",
        "| type | result | packed | padded | experts | why |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in sorted(results.items()):
        refused = [s for s, each in found.get("strategies", {}).items() if each["status"] == "refused"]
        result = found["status"]
        if result == "equal" and refused:
            result = f"equal; {', '.join(refused)} refused"
        apart = found.get("experts", {})
        outcomes = Counter(each["status"] for each in apart.values())
        experts = "; ".join(f"{count} {status}" for status, count in outcomes.items())
        experts = "equal" if set(outcomes) == {"equal"} else experts
        whys = (found.get("why"), found.get("unpacked"), found.get("padding"), *(one["why"] for one in apart.values()))
        why = next(filter(None, whys), "")
        marks = ["yes" if yes else "no" for yes in (found.get("packed"), not found.get("padding"))]
        shown = marks if "packed" in found else ["", ""]
        lines.append(f"| {name} | {result} | {shown[0]} | {shown[1]} | {experts} | {why.replace('|', '/')} |")
    return "\n".join([*lines, ""])


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="types of transformers; all causal ones by default")
    parser.add_argument("--folder", type=Path, default=Path("runs/sweep"), help="where results are kept")
    parser.add_argument("--page", type=Path, help="write the table of all types to this file")
    parser.add_argument("--again", action="store_true", help="forget what is known")
    parser.add_argument("--limit-s", type=float, default=600.0, help="seconds for one type")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args(words)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    torch.set_num_threads(1)
    names = args.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    args.folder.mkdir(parents=True, exist_ok=True)
    files = {name: args.folder / f"{name}.json" for name in names}
    todo = [name for name, file in files.items() if args.again or not file.exists()]
    for name in todo:
        files[name].unlink(missing_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {name: pool.submit(_in_a_process, name, files[name], args.limit_s) for name in todo}
        for i, (name, done) in enumerate(running.items()):
            done.result()
            found = json.loads(files[name].read_text())
            print(f"{i + 1}/{len(todo)} {name}: {found['status']} {found.get('why', '')[:120]}", flush=True)
    results = {name: json.loads(file.read_text()) for name, file in files.items()}
    page = table(results)
    if args.page and not args.types:  # a page of some types would forget the others
        args.page.write_text(page)
    wrong = [name for name, found in results.items() if found["status"] == "wrong"]
    print(page.splitlines()[5])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
