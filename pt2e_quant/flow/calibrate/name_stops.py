"""Name the operator at which a batch stops a graph, where torch says only what is wrong."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.fx import GraphModule, Interpreter, Node

from pt2e_quant.core.errors import CalibrationError, Pt2eQuantError
from pt2e_quant.graph.meta import attribute


@contextmanager
def naming_stops(node: Node | Callable[[], Node | None], index: int) -> Iterator[None]:
    """Raise a CalibrationError that names a batch and a node, where torch's operators raise.

    Args:
        node: the one that is computed, or a function that finds it, or None, after the fact.
        index: of the batch.
    """
    try:
        yield
    except Pt2eQuantError:
        raise
    except Exception as error:
        found = node if isinstance(node, Node) else node()
        if found is None:
            raise
        raise CalibrationError(
            f"calibration batch {index} stops the model: {error or type(error).__name__}",
            node=found,
            fix="the float model stops at this batch too: give values that it takes, such as "
            "indices within its tables",
        ) from error


def find_stop(gm: GraphModule, values: Sequence[Any]) -> Node | None:
    """The node of a prepared graph that raises for a call's inputs; None if none does.

    Observers see nothing of the call.
    """
    finder = _Finder(gm)
    try:
        finder.run(*values)
    except Exception:
        return finder.at
    return None


class _Finder(Interpreter):
    """Runs a graph without its observers, and knows at which node it is."""

    at: Node | None = None

    def run_node(self, n: Node) -> Any:
        self.at = n
        return super().run_node(n)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        assert isinstance(self.module, GraphModule)
        is_observer = hasattr(attribute(self.module, str(target)), "calculate_qparams")
        return args[0] if is_observer else super().call_module(target, args, kwargs)
