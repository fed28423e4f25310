"""The latency of a program on a backend, and the share of each group of operators.

A backend's costs are measured on this machine, through what every artifact has: `run`, and
`profile` where the runtime tells the time of an operator. Where it does not, a call's time is
divided as torch's time of the float program is.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.analysis.profile import profile_graph
from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.profile import Profile
from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.qdq import is_dequantize, is_qdq
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.graph.meta import origin_name

_CALLS = 15
_SECONDS = 3.0
"""A call is timed so many times, or for so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """The latency of a program on a backend.

    Args:
        call_us: a whole call; the shortest of some, because other work only makes them longer.
        groups: microseconds of each group with what follows it up to the next one.
    """

    call_us: float
    groups: Mapping[str, float]


class Stopwatch:
    """Times converted graphs of one program on one backend.

    Args:
        backend: where they run.
        call: (args, kwargs) of one call.
        float_gm: the program without a quantized tensor, converted.
    """

    def __init__(
        self, backend: Backend, call: tuple[Sequence[Any], Mapping[str, Any]], float_gm: GraphModule
    ) -> None:
        self.backend = backend
        self.args, self.kwargs = call
        self.float_gm = float_gm

    def measure(self, gm: GraphModule, groups: Collection[str] = ()) -> Latency:
        """Lower a graph and time it.

        Args:
            gm: converted; it is not changed.
            groups: the names of operators of the float program, each of which begins a group.
        """
        artifact = self.backend.lower(gm, verify=False, strict=False)
        call_us = self._call_us(artifact)
        return Latency(call_us=call_us, groups=self._divided(artifact, gm, groups, call_us))

    def _call_us(self, artifact: Artifact) -> float:
        artifact.run(*self.args, **self.kwargs)
        found: list[float] = []
        begin = time.perf_counter()
        while len(found) < _CALLS and (len(found) < 3 or time.perf_counter() - begin < _SECONDS):
            if artifact.capture.mutated_buffers:
                artifact.reset()  # a .pte is loaded anew
            start = time.perf_counter()
            artifact.run(*self.args, **self.kwargs)
            found.append(1e6 * (time.perf_counter() - start))
        return min(found)

    def _divided(
        self, artifact: Artifact, gm: GraphModule, groups: Collection[str], call_us: float
    ) -> dict[str, float]:
        if not groups:
            return {}
        try:
            profile, timed = artifact.profile(*self.args, **self.kwargs), gm
        except UnsupportedError:  # the runtime does not tell
            profile, timed = self._torch_profile(), self.float_gm
        owned = shares(profile, owners(timed, groups))
        return {group: call_us * share for group, share in owned.items()}

    def _torch_profile(self) -> Profile:
        gm = self.float_gm
        capture = capture_of(gm)
        return profile_graph(gm, capture, capture.bind(self.args, self.kwargs))


def owners(gm: GraphModule, groups: Collection[str]) -> dict[str, str]:
    """Node to the group that its time counts for; nodes in front of all groups have none.

    A group's operator and what computes with its result count for it, up to the next group; so do
    the q/dq of what it reads. The same node counts for the same group in every graph of a program.
    """
    found: dict[str, str] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        named = (
            [n for n in _that_read(node) if n in groups] if is_qdq(node) else [origin_name(node)]
        )
        owner = next((name for name in named if name in groups), None)
        if owner is None:
            before = (found.get(source.name) for source in node.all_input_nodes)
            owner = next((name for name in before if name is not None), None)
        if owner is not None:
            found[node.name] = owner
            if not is_qdq(node):  # a runtime may have the operator's name in the program
                found.setdefault(origin_name(node), owner)
    return found


def _that_read(node: Node) -> list[str]:
    """The operators of the program that read what a q/dq gives."""
    readers = [r for user in node.users for r in (user.users if is_dequantize(user) else [user])]
    return [origin_name(reader) for reader in readers]


def shares(profile: Profile, owned_by: Mapping[str, str]) -> dict[str, float]:
    """Group to its share of the time of a profile.

    An operator that the runtime made, and that has no node's name, counts for the group of the
    next one that has.
    """
    whole = sum(node.time_us for node in profile.nodes) or 1.0
    found = dict.fromkeys(owned_by.values(), 0.0)
    waiting = 0.0
    for node in profile.nodes:
        waiting += node.time_us / whole
        if (owner := owned_by.get(node.node)) is not None:
            found[owner] += waiting
            waiting = 0.0
    return found
