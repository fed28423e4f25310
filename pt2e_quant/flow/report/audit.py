"""Find the operators of a quantized program that an integer-only chip could not run.

Operators are nodes of the graph: a function (`torch.log`, `torch.cat`, `functional.elu`) is seen as
a module is.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2e_quant.core.data_frame import data_frame
from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.core.json_text import json_text
from pt2e_quant.core.provenance import FloatOperator, FloatRecord, provenance_of
from pt2e_quant.core.qdq import CHOOSE_QPARAMS_OPS, is_qdq
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.flow.convert.integer_reference import REFERENCE_OF_KEY
from pt2e_quant.flow.prepare.prepared import PREPARED_KEY
from pt2e_quant.flow.report.float_islands import float_islands
from pt2e_quant.flow.report.report import FloatRegion, Report
from pt2e_quant.graph.meta import computes_in_float
from pt2e_quant.graph.op_table import operator_name
from pt2e_quant.graph.ops import is_getitem
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.graph.subgraphs import copy_graph, named_graphs
from pt2e_quant.passes.qdq.duplicate_dequantize import duplicate_dequantize
from pt2e_quant.passes.reference.forms.registry import MOVES, form_of, without_form
from pt2e_quant.passes.reference.forms.site import Arithmetic
from pt2e_quant.passes.reference.read_sites import find_sites
from pt2e_quant.passes.reference.write_integers import write_integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The operators of a program that an integer-only chip could and could not run.

    Attributes:
        islands: those that compute in float between the first quantize and the last
            dequantize, in graph order.
        integer_operators: how many operators have an integer form.
        note: what is not known of them; "" if all is.
    """

    islands: tuple[FloatOperator, ...]
    integer_operators: int
    note: str = ""

    @property
    def is_integer_only(self) -> bool:
        """True if nothing computes in float."""
        return not self.islands

    @property
    def share_in_integers(self) -> float:
        """The share of operators in integers, 0 to 1; 1 where nothing computes in float."""
        listed = self.integer_operators + len(self.islands)
        return self.integer_operators / max(listed, 1)

    def to_dicts(self) -> list[dict[str, Any]]:
        """A dict for each operator in float."""
        return [asdict(operator) for operator in self.islands]

    def to_json(self) -> str:
        """Return JSON."""
        return json_text({**asdict(self), "share_in_integers": self.share_in_integers})

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each operator in float.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return data_frame(self.to_dicts())

    def __str__(self) -> str:
        """The operators in float, one paragraph each."""
        count, found = self.integer_operators, len(self.islands)
        lines = [f"{count} operators in integers, {found} in float"]
        for operator in self.islands:
            across = (
                "" if operator.bytes_across is None else f", {operator.bytes_across:,} bytes across"
            )
            place = f" in {operator.module}" if operator.module else ""
            name = f"{operator.node} ({operator.operator})" if operator.node else operator.operator
            lines.append(f"{name}{place}{across}")
            lines += [f"  source  {operator.source}"] if operator.source else []
            lines += [f"  reason  {operator.reason}", f"  remedy  {operator.remedy}"]
        lines += [f"note: {self.note}"] if self.note else []
        return "\n".join(lines)


def audit(program: Any) -> Audit:
    """Find the operators that an integer-only chip could not run.

    Args:
        program: a graph of `convert_pt2e` or of `integer_reference`, an exported program of the
            first, or the artifact of a backend. A graph is judged by the integer forms of this
            package, an artifact by what its backend left float.

    Raises:
        ConfigError: it is something else, or a graph that is not converted yet.
    """
    if isinstance(program, ExportedProgram):
        program = program.module()
    if not isinstance(program, GraphModule):
        return _of_artifact(program)
    if PREPARED_KEY in program.meta:
        raise ConfigError(
            "this graph has observers: what it computes in integers is not known before convert",
            fix="pq.audit(pq.convert_pt2e(prepared))",
        )
    if REFERENCE_OF_KEY in program.meta:
        program = program.meta[REFERENCE_OF_KEY].graph
    found: list[FloatOperator] = []
    count = 0
    for named in named_graphs(program):
        written = _Written(named.gm)
        found += written.float_operators(named.prefix)
        count += written.count
    return Audit(islands=tuple(found), integer_operators=count)


def refuse_float_operators(gm: GraphModule) -> None:
    """Refuse a converted graph that computes in float.

    Raises:
        UnsupportedError: naming the first such operator and its remedy.
    """
    found = audit(gm)
    if found.islands:
        first = found.islands[0]
        nodes = {node.name: node for node in gm.graph.nodes}
        others = len(found.islands) - 1
        more = f"; {others} more, see audit" if others else ""
        raise UnsupportedError(
            f"int_only: {first.node} computes in float: {first.reason}{more}",
            node=nodes.get(first.node),
            fix=first.remedy,
        )


def refuse_left_float(gm: GraphModule) -> None:
    """Refuse a prepared graph with operators left float, or without an integer form.

    What only moves data, and what is made of booleans or integers alone (masks, positions), is
    judged by convert, which sees what it stands between.

    Raises:
        UnsupportedError: naming the first such operator and its remedy.
    """
    left = {record.node: record for record in provenance_of(gm).floats}
    from_integers = _made_of_integers(gm)
    for node in gm.graph.nodes:
        if node.op != "call_function" or form_of(node) in MOVES or node in from_integers:
            continue
        record = left.get(node.name)
        name = operator_name(node)
        if record is not None:
            raise UnsupportedError(
                f"int_only: {name} stays float: {record.reason}",
                node=node,
                fix=record.fix or f'a scheme for it: quantizer.set_operator("{name}", scheme)',
            )
        if Q_ANNOTATION_KEY in node.meta and form_of(node) is None:
            reason, fix = without_form(node)
            raise UnsupportedError(f"int_only: {reason}", node=node, fix=fix)


def _made_of_integers(gm: GraphModule) -> set[Node]:
    """The calls that read no float tensor but those made of booleans and integers in the graph."""
    found: set[Node] = set()
    for node in gm.graph.nodes:
        read = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
        if node.op == "call_function" and all(n in found or _is_integer(n) for n in read):
            found.add(node)
    return found


def _is_integer(node: Node) -> bool:
    return not (node.meta["val"].is_floating_point() or node.meta["val"].is_complex())


def record_islands(
    report: Report, gm: GraphModule, floats: Set[str], left: Sequence[FloatRegion] = ()
) -> None:
    """Put what a program computes in float into its report's record, for its file to keep.

    Args:
        report: of the program; its record becomes another one than the graph's.
        gm: the graph that was lowered.
        floats: the nodes that the program computes in float.
        left: what the report will be told of besides its own regions.
    """
    told = replace(report, float_regions=[*report.float_regions, *left])
    found = _in_program(told, gm, floats)
    report.provenance = replace(report.provenance, islands=found)


def _of_artifact(artifact: Any) -> Audit:
    """The audit of an artifact: from its lowering's record, else its graph, else its file."""
    if not hasattr(artifact, "islands_in_file"):
        raise ConfigError(
            f"audit reads a quantized graph or an artifact, found {type(artifact).__name__}",
            fix="pq.convert_pt2e(prepared), pq.quantize(…), or "
            'pq.backends.get("onnx").load(path) for a file',
        )
    report, gm, note = artifact.report, artifact.quantized, ""
    found = report.provenance.islands
    integers = sum(report.integer_ops.values())
    if found is None and gm is not None:
        found = _in_program(report, gm, artifact.float_operators(gm))
    elif found is None:
        (found, integers), note = artifact.islands_in_file(), _UNRECORDED
        found = found or [_as_recorded(record) for record in report.provenance.floats]
        found = found or _counted(report)
    return Audit(islands=tuple(found), integer_operators=integers, note=note)


_UNRECORDED = (
    "the file keeps no audit, this is what its operators tell, dynamic sizes as in the example "
    'inputs; lower(..., record="full") keeps reasons, remedies and source lines'
)


def _counted(report: Report) -> list[FloatOperator]:
    """The operators that a runtime runs in float, where no node is known of them."""
    return [
        FloatOperator(
            node="",
            operator=f"{count} {name}",
            module="",
            source="",
            bytes_across=None,
            reason=f"{report.backend} runs it in float",
            remedy=OTHER_BACKEND,
        )
        for name, count in report.float_ops.items()
        if "quantize" not in name.lower()
    ]


def _in_program(report: Report, gm: GraphModule, floats: Set[str]) -> list[FloatOperator]:
    """Operators that a quantizer left float, and those in float between q/dq."""
    left = {record.node: record for record in report.provenance.floats}
    regions = {region.node: region.reason for region in report.float_regions}
    graphs = named_graphs(gm)
    names = {node: g.prefix + node.name for g in graphs for node in g.gm.graph.nodes}

    def why(node: Node) -> tuple[str, str]:
        record = left.get(names[node])
        if record is not None:
            return record.reason, record.fix or f"{_remedy(node)}; and {OTHER_BACKEND}"
        if node.target in CHOOSE_QPARAMS_OPS:
            return _RUN_TIME
        return regions.get(names[node], f"{report.backend} runs it in float"), OTHER_BACKEND

    found: list[FloatOperator] = []
    for graph in graphs:
        known = [
            node
            for node in graph.gm.graph.nodes
            if names[node] in left or (names[node] in floats and form_of(node) not in MOVES)
        ]
        found += float_islands(filter(_computes, known), why, graph.prefix)
    # Bodies that were written out have no graph any more.
    gone = [left[name] for name in left.keys() - set(names.values())]
    return found + [_as_recorded(r) for r in sorted(gone, key=list(left.values()).index)]


def _as_recorded(record: FloatRecord) -> FloatOperator:
    """The entry of a node by its record, where there is no graph."""
    return FloatOperator(
        node=record.node,
        operator=record.op,
        module=record.module,
        source="",
        bytes_across=None,
        reason=record.reason,
        remedy=record.fix or OTHER_BACKEND,
    )


OTHER_BACKEND = "a backend that runs it in integers"
_RUN_TIME = (
    "it chooses scales at run time",
    "a static scheme, whose scales are calibrated; static recipes may bring an algorithm that "
    'quantizer.remove_algorithm("run_time_scales") leaves out',
)


def _remedy(node: Node) -> str:
    """Return the remedy that brings an operator into integers."""
    if form_of(node) is None:
        return without_form(node)[1]
    name = operator_name(node)
    return (
        "a spec for its inputs and output: pq.IntegerQuantizer(), or "
        f'quantizer.set_operator("{name}", scheme)'
    )


class _Written:
    """One graph as it would be in integers; the graph itself is not touched."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = copy_graph(gm)  # shares its tensors
        run_passes(self.gm, (duplicate_dequantize,))
        before = {node.name for node in self.gm.graph.nodes}
        self.operators = {site.anchor.name: site.op.name for site in find_sites(self.gm)}
        records = run_passes(self.gm, (write_integers(Arithmetic(accumulator_bits=64)),))
        notes = [note for record in records for note in record.notes]
        self.count = sum(not note.skipped for note in notes)
        self.reasons = {self.operators[note.node]: note.text for note in notes if note.skipped}
        nodes = self.gm.graph.nodes
        self.floats = [n for n in nodes if n.name in before and _computes(n)]

    def float_operators(self, prefix: str) -> Iterator[FloatOperator]:
        """The operators that are left float, those outside of the quantized part excepted."""
        return float_islands(self.floats, self._why, prefix)

    def _why(self, node: Node) -> tuple[str, str]:
        if node.target in CHOOSE_QPARAMS_OPS:
            return _RUN_TIME
        if node.name in self.reasons:
            reason = self.reasons[node.name]
            return reason, "quantize all of its inputs and its output by a spec, per tensor"
        if form_of(node) is None:
            return without_form(node)
        return "its inputs or its result are not quantized", _remedy(node)


def _computes(node: Node) -> bool:
    """True if a node computes in float, q/dq excepted."""
    if is_qdq(node):
        return False
    if is_getitem(node) and node.all_input_nodes[0].target in CHOOSE_QPARAMS_OPS:
        return False  # a scale that is found is no operator of its own
    return computes_in_float(node)
