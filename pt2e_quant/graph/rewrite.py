"""Rules as values: one walk collects all matches, one rewrites them, one recompile ends it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.pattern import Match, Op, find_matches
from pt2e_quant.graph.pipeline import Note, PassResult

__all__ = ["Editor", "Rule", "Skip", "rewrite"]


@dataclass(frozen=True, slots=True)
class Skip:
    """Why a rule declines a match."""

    reason: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern and what takes its place.

    Attributes:
        name: shown in notes.
        find: the pattern, or one for each variant.
        build: makes the replacement of the anchor through the editor, which inserts before
            the anchor, or says why not. It may return the anchor itself after editing in place.
    """

    name: str
    find: Op | tuple[Op, ...]
    build: Callable[[Match, Editor], Node | Skip]


def rewrite(gm: GraphModule, rules: Sequence[Rule]) -> PassResult:
    """Apply each rule wherever its pattern holds; the widest pattern wins, whatever the order.

    Matches are collected once, before any edit: a rule never sees another rule's result.
    """
    patterns = [
        (rule, op)
        for rule in rules
        for op in (rule.find if isinstance(rule.find, tuple) else (rule.find,))
    ]
    matches = find_matches(gm.graph, patterns)
    if not matches:
        return PassResult(changed=False)
    editor = Editor(gm)
    notes = [_apply(rule, match, editor) for rule, match in matches]
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _apply(rule: Rule, match: Match, editor: Editor) -> Note:
    anchor = match.anchor
    editor.cursor = anchor
    mark = editor.mark()
    editor.declined.clear()
    built = rule.build(match, editor)
    editor.cursor = None
    if isinstance(built, Skip):
        editor.roll_back(mark)
        return Note(anchor.name, built.reason, skipped=True)
    if built is not anchor:
        editor.replace(anchor, built)
    editor.discard(match.covered)
    editor.changed = True
    if editor.declined:
        return Note(anchor.name, "; ".join(editor.declined), skipped=True)
    return Note(anchor.name, rule.name)
