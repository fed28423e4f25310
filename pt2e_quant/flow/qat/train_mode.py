"""train() and eval() of exported graphs: the training flags of their operators, set in place.

Only the flag changes: the p of a dropout, the momentum and eps of a batch norm stay. Attention has
no flag: its dropout_p is 0 in inference.
"""

from functools import cache
from types import MethodType

from torch import nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from pt2e_quant.accelerate.recompile import recompile
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.graph.meta import ATTENTION_DROPOUT_KEY
from pt2e_quant.graph.ops import SDPA, arguments, aten, is_call
from pt2e_quant.graph.subgraphs import bodies

_FLAGS = ("train", "training")


def model_is_exported(m: nn.Module) -> bool:
    """True if a module is a graph that torch.export made."""
    return isinstance(m, GraphModule) and any("val" in node.meta for node in m.graph.nodes)


def move_exported_model_to_train(model: GraphModule) -> GraphModule:
    """Let dropout, batch norm and every operator with a training flag train; in place."""
    return _move(model, True)


def move_exported_model_to_eval(model: GraphModule) -> GraphModule:
    """Let dropout, batch norm and every operator with a training flag infer; in place."""
    return _move(model, False)


def has_training_operators(gm: GraphModule) -> bool:
    """True if some operator of a graph trains: whether the model was exported in training."""
    return any(_flag(node) is True or _dropped(node) for node in gm.graph.nodes)


def allow_exported_model_train_eval(model: GraphModule) -> GraphModule:
    """Let `model.train()` and `model.eval()` switch the graph, also of deep copies."""
    model.train = MethodType(_train, model)  # type: ignore[method-assign]  # of this module only
    model.eval = MethodType(_eval, model)  # type: ignore[method-assign]  # as above
    # Deep copies of a graph module leave such attributes behind.
    model._register_deepcopy_hook(_allow_copy)
    return model


def _allow_copy(model: GraphModule) -> None:
    if "train" not in vars(model):
        allow_exported_model_train_eval(model)


def _train(self: GraphModule, mode: bool = True) -> GraphModule:
    return _move(self, mode)


def _eval(self: GraphModule) -> GraphModule:
    return _move(self, False)


def _move(model: GraphModule, training: bool) -> GraphModule:
    if not isinstance(model, GraphModule):
        raise ConfigError(
            f"an exported graph is needed, found {type(model).__name__}",
            fix="torch.export.export(model, inputs).module()",
        )
    nn.Module.train(model, training)
    for gm in set_training_flags(model, training):
        recompile(gm)
    return model


def set_training_flags(model: GraphModule, training: bool) -> list[GraphModule]:
    """Set every operator's training flag; returns the graphs that changed, to be recompiled."""
    graphs = (model, *(body.gm for body in bodies(model)))
    # A list: every node is set, not only those up to the first that changed.
    return [gm for gm in graphs if any([_set_flag(n, training) for n in gm.graph.nodes])]


def _set_flag(node: Node, training: bool) -> bool:
    """Set the training flag of a call if it has one; returns whether it changed."""
    if _counts_batches(node):
        before: object = node.args[1]
        node.update_arg(1, int(training))
        return bool(before != training)
    if is_call(node, SDPA):
        return _set_attention(node, training)
    before = _flag(node)
    name = None if before is None else _flag_name(node.target)
    if name is None:
        return False
    position = list(arguments(node)).index(name)
    if name not in node.kwargs and position < len(node.args):
        node.update_arg(position, training)
    else:
        node.update_kwarg(name, training)
    return bool(before != training)


def _dropped(node: Node) -> float:
    """The share of weights that an attention drops as it is."""
    return float(arguments(node)["dropout_p"]) if is_call(node, SDPA) else 0.0


def _set_attention(node: Node, training: bool) -> bool:
    """Set the share of weights that an attention drops; returns whether it changed."""
    before = _dropped(node)
    trained = node.meta.setdefault(ATTENTION_DROPOUT_KEY, before)
    wanted = trained if training else 0.0
    if before == wanted:
        return False
    position = list(arguments(node)).index("dropout_p")
    if "dropout_p" not in node.kwargs and position < len(node.args):
        node.update_arg(position, wanted)
    else:
        node.update_kwarg("dropout_p", wanted)
    return True


@cache
def _flag_name(target: object) -> str | None:
    """The name of an operator's training flag."""
    if not isinstance(target, OpOverload):
        return None
    return next((a.name for a in target._schema.arguments if a.name in _FLAGS), None)


def _flag(node: Node) -> bool | None:
    """The training flag of a call, None if it has none or is to keep it."""
    name = _flag_name(node.target)
    if name is None:
        return None
    given = arguments(node)
    if "running_mean" in given and given["running_mean"] is None:
        return None  # a batch norm without statistics uses the batch's in inference too
    return bool(given[name])


def _counts_batches(node: Node) -> bool:
    """True if a call counts the batches of a batch norm, which the export in training wrote out."""
    if not is_call(node, (aten.add_.Tensor,)) or node.users:
        return False
    counter = node.args[0]
    return isinstance(counter, Node) and str(counter.target).endswith("num_batches_tracked")
