"""What teams of a model take, for `fxpar rounds MODEL`: strategies of all devices, lowered and priced on a cluster."""

from __future__ import annotations

from collections.abc import Callable

from fxpar.cli.console import show_notes
from fxpar.cli.request import collected_warnings
from fxpar.cli.rounds_commands import RoundsRequest
from fxpar.cli.shallow import Shallow
from fxpar.cost.cluster import ClusterSpec, usual_cluster
from fxpar.errors import RoundCostError
from fxpar.ir.axes import ROLE_AXES
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import replicas_of_ranks
from fxpar.rounds import TeamCost
from fxpar.search.chosen import kv_heads, of_ranks
from fxpar.search.known import KnownModel
from fxpar.search.price import Priced, anchors_of
from fxpar.search.space import with_rings


def model_teams(
    request: RoundsRequest, degrees: tuple[int, ...], longest: int, most: int, said: Callable[[str], object]
) -> tuple[dict[int, TeamCost], int]:
    """What teams of these degrees take, and the devices of a node. A team of some ranks is a replica of the strategy
    that has as many replicas on all devices as fit; it holds up to `most` tokens, and `longest` is the longest sequence
    that memory is predicted for.

    Raises ClusterError, PlanOptionError, RoundCostError, StrategySyntaxError, WorldSizeError, and what `fxpar.lower`
    raises.
    """
    found_cluster = (
        usual_cluster(request.devices) if request.cluster is None else ClusterSpec.from_file(request.cluster)
    )
    cluster = of_ranks(found_cluster, request.devices)
    memory = request.memory_bytes or cluster.sustained.memory_bytes
    if memory is None:
        raise RoundCostError(request.priced_by, "it does not say how much memory a device has", "Add --memory 80GB")
    _, token_axis, *_ = ROLE_AXES
    asked = Strategy.parse(request.strategy or f"{token_axis}{request.devices}+zero3", world=request.devices)
    replicas_of_ranks(asked, degrees)
    with collected_warnings([]):
        said(f"capturing {request.source.model}")
        model = Shallow(request.source)
        model.require_sequences(longest, "rounds are", request.tokenizer)
        heads = kv_heads(model.rows(model.depth.samples(1)[0]))
        if request.strategy is None and heads is not None:
            *_, asked = with_rings([asked], heads)
        anchors = min(256, longest), max(2 * longest, most)
        known = KnownModel(model.lower, model.outlines, cluster, model.depth, anchors)
        found = {}
        for degree, strategy in replicas_of_ranks(asked, degrees).items():
            said(f"lowering {strategy}")
            one = known.named(strategy)
            known.anchors = one.anchors = anchors_of(one)
            found[degree] = _team(one, memory, most, request.priced_by)
    show_notes(model.notes([]))
    return found, cluster.devices_per_node


def _team(one: Priced, memory: int, most: int, cost: str) -> TeamCost:
    """Raises RoundCostError if its weights and a few tokens take more than `memory`."""
    room = memory - one.stays.stays_bytes - one.stays.weight_bytes
    tokens = one.most_tokens(min(one.anchors[0], most), room, most)
    if tokens is None:
        why = f"under {one.name} the model takes more than {memory / 2**30:.1f} GiB of a device, with few tokens"
        raise RoundCostError(cost, why, "Plan for more devices or more memory, or leave small teams out")
    spent = one.group_cost
    return TeamCost(1e3 * spent.fixed_s, 1e3 * spent.per_token_s, 1e3 * spent.per_square_s, tokens)
