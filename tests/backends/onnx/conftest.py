"""Modules as ONNX before the rewrites, and what a rewrite makes of them."""

import logging
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn


class Exported:
    """A module as `torch.onnx.export` writes it; float32 results of ONNX Runtime, unoptimized."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], shapes: Any = None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.ep = torch.export.export(module.eval(), args, dynamic_shapes=shapes)
        self.module, self.model = module, self._written(self.ep)
        self.before = self._session()
        self.after = self.before

    def _written(self, ep: torch.export.ExportedProgram) -> Any:
        from onnx_ir.passes import common

        from pt2e_quant.backends.onnx.translate.translations import translation_table

        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                ep,
                dynamo=True,
                opset_version=21,
                custom_translation_table=translation_table(),
                verbose=False,
            )
        assert program is not None
        common.RemoveUnusedNodesPass()(program.model)
        program.model.opset_imports["com.microsoft"] = 1
        return program.model

    def compose(self, *rules: Any, fired: int) -> "Exported":
        """The rules fire so often in the graph, which is then written again."""
        from pt2e_quant.flow.reexport import export_again
        from pt2e_quant.graph.idioms.composite import compose_idioms

        gm = self.ep.module()
        assert isinstance(gm, torch.fx.GraphModule)
        notes = compose_idioms(*rules)(gm).notes
        assert sum(not note.skipped for note in notes) == fired, notes
        assert all(note.skipped for note in compose_idioms(*rules)(gm).notes)
        self.declined = [note.text for note in notes if note.skipped]
        self.model = self._written(export_again(gm))
        self.after = self._session()
        return self

    def apply(self, rewrite: Callable[[Any], int], *, fired: int) -> "Exported":
        """The rewrite fires so often, and finds nothing more the second time."""
        assert rewrite(self.model.graph) == fired
        assert rewrite(self.model.graph) == 0
        self.after = self._session()
        return self

    def ops(self) -> Counter[str]:
        return Counter(node.op_type for node in self.model.graph)

    def optimized_ops(self, folder: Any) -> Counter[str]:
        """What ONNX Runtime runs."""
        import onnx

        self._session(folder / "optimized.onnx")
        nodes = onnx.load(folder / "optimized.onnx").graph.node
        return Counter(node.op_type for node in nodes)

    def equals(self, *args: Tensor, bound: float = 0.0) -> list[np.ndarray]:
        """Results before and after differ by `bound` at most, NaN being equal to NaN."""
        before, after = (self._run(s, args) for s in (self.before, self.after))
        for left, right in zip(before, after, strict=True):
            np.testing.assert_allclose(right, left, rtol=0, atol=bound)
        expected = self.module(*args)
        first = expected[0] if isinstance(expected, tuple) else expected
        np.testing.assert_allclose(after[0], first.detach().numpy(), rtol=0, atol=1e-4)
        return after

    def _run(self, session: Any, args: tuple[Tensor, ...]) -> list[np.ndarray]:
        names = [declared.name for declared in session.get_inputs()]
        found: list[np.ndarray] = session.run(
            None, {name: arg.numpy() for name, arg in zip(names, args, strict=True)}
        )
        return found

    def _session(self, optimized: Any = None) -> Any:
        import onnx_ir as ir
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        if optimized is None:
            level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.graph_optimization_level = level
        else:
            options.optimized_model_filepath = str(optimized)
        data = ir.to_proto(self.model).SerializeToString()
        return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="session")
def exported() -> type[Exported]:
    return Exported
