"""Remove parameters, buffers and submodules that nothing reads."""

from torch import nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import is_getitem
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass


def _names_read(gm: GraphModule) -> tuple[set[str], set[str]]:
    """The dotted names that nodes read, and the modules that are used as a whole."""
    names: set[str] = set()
    whole: set[str] = set()
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            names.add(str(node.target))
        if node.op in ("get_attr", "call_module"):
            whole.add(str(node.target))
    return names, whole


def _is_inside(name: str, whole: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:i]) in whole for i in range(1, len(parts)))


def _drop_tensors(gm: GraphModule, read: set[str], whole: set[str]) -> list[str]:
    dropped = []
    named = list(gm.named_modules(remove_duplicate=False))
    used = {module for path, module in named if path in whole or _is_inside(path, whole)}
    for prefix, module in named:
        if module in used:  # perhaps by another name of it
            continue
        for table in (module._parameters, module._buffers):
            for leaf in list(table):
                name = f"{prefix}.{leaf}" if prefix else leaf
                if name not in read and not _is_inside(name, whole):
                    delattr(module, leaf)
                    dropped.append(name)
    return dropped


def _drop_empty_modules(gm: GraphModule, whole: set[str]) -> None:
    """Remove modules that hold nothing, innermost first.

    Of a module of `torch.export` tensors that a forward made are plain attributes.
    """
    holders = {name[:at] for name in whole for at, letter in enumerate(name) if letter == "."}
    for prefix, module in reversed(list(gm.named_modules(remove_duplicate=False))):
        for leaf, child in list(module._modules.items()):
            name = f"{prefix}.{leaf}" if prefix else leaf
            is_read = name in whole or name in holders or _is_inside(name, whole)
            if not is_read and not _content(child):
                del module._modules[leaf]


def _content(module: nn.Module | None) -> list[object]:
    if module is None:
        return []
    return [*module._parameters, *module._buffers, *module._modules]


def _is_unread(node: Node) -> bool:
    """True if a node can be erased: nothing reads it, and it has no side effect."""
    if node.users or node.op not in ("get_attr", "call_function"):
        return False
    is_plain = node.op == "get_attr" or isinstance(node.target, OpOverload) or is_getitem(node)
    return is_plain and not node.is_impure()


@graph_pass(needs=(), gives=())
def drop_dead_constants(gm: GraphModule) -> PassResult:
    """Remove constants that no node reads, from the graph and from the module.

    Pure calls that nothing reads go first, with what only they read.

    Only the graph module changes: a tensor with other references stays alive.

    Before:  bn.running_mean is a buffer, `get_attr` node bn_running_mean has no readers
    After:   neither is there
    """
    editor = Editor(gm)
    editor.erase_dead([n for n in gm.graph.nodes if _is_unread(n)])
    read, whole = _names_read(gm)
    dropped = _drop_tensors(gm, read, whole)
    _drop_empty_modules(gm, whole)
    editor.finish()
    return PassResult(
        changed=editor.changed or bool(dropped),
        notes=tuple(Note(name, "nothing reads it") for name in dropped),
    )
