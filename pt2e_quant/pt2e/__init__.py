"""The whole of PT2E under torchao's names: change the import, and a script runs."""

from pt2e_quant.core.granularity import (
    Granularity,
    PerAxis,
    PerBlock,
    PerGroup,
    PerRow,
    PerTensor,
    PerToken,
)
from pt2e_quant.flow.qat.train_mode import (
    allow_exported_model_train_eval,
    move_exported_model_to_eval,
    move_exported_model_to_train,
)
from pt2e_quant.observers.base import ObserverBase, UniformQuantizationObserverBase
from pt2e_quant.observers.partial_wrapper import PartialWrapper
from pt2e_quant.observers.run_time.placeholder import NoopObserver, PlaceholderObserver
from pt2e_quant.observers.static.derived import DerivedObserverOrFakeQuantize
from pt2e_quant.observers.static.fixed import FixedQParamsObserver
from pt2e_quant.observers.static.histogram import HistogramObserver
from pt2e_quant.observers.static.minmax import MinMaxObserver, PerChannelMinMaxObserver
from pt2e_quant.observers.static.moving_average import (
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)
from pt2e_quant.observers.training.fake_quantize import (
    FakeQuantize,
    FakeQuantizeBase,
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
    enable_observer,
)
from pt2e_quant.observers.training.fixed_fake_quantize import FixedQParamsFakeQuantize
from pt2e_quant.observers.training.fused_fake_quantize import FusedMovingAvgObsFakeQuantize
from pt2e_quant.observers.training.learnable_fake_quantize import (
    LearnableFakeQuantize,
    disable_range_learning,
    enable_range_learning,
)
from pt2e_quant.passes.batch_norm.trained_batch_norm import freeze_bn_stats, update_bn_stats
from pt2e_quant.pt2e.export_utils import WrapperModule
from pt2e_quant.pt2e.fake_quantize import (
    default_dynamic_fake_quant,
    default_fake_quant,
)
from pt2e_quant.pt2e.graph_utils import (
    bfs_trace_with_node_process,
    find_sequential_partitions,
    get_equivalent_types,
    update_equivalent_types_dict,
)
from pt2e_quant.pt2e.numeric_debugger import (
    CUSTOM_KEY,
    FROM_NODE_KEY,
    NUMERIC_DEBUG_HANDLE_KEY,
    OutputLogger,
    compare_results,
    extract_results_from_loggers,
    generate_numeric_debug_handle,
    prepare_for_propagation_comparison,
)
from pt2e_quant.pt2e.observer import (
    ObserverOrFakeQuantize,
    ObserverOrFakeQuantizeConstructor,
)
from pt2e_quant.pt2e.observers.affine import AffineQuantizedObserverBase
from pt2e_quant.pt2e.observers.affine_qparams import MappingType, TorchAODType, ZeroPointDomain
from pt2e_quant.pt2e.observers.block_size import get_block_size
from pt2e_quant.pt2e.observers.recording import RecordingObserver
from pt2e_quant.pt2e.observers.reuse_input import ReuseInputObserver

__all__ = [
    "CUSTOM_KEY",
    "FROM_NODE_KEY",
    "NUMERIC_DEBUG_HANDLE_KEY",
    "AffineQuantizedObserverBase",
    "DerivedObserverOrFakeQuantize",
    "FakeQuantize",
    "FakeQuantizeBase",
    "FixedQParamsFakeQuantize",
    "FixedQParamsObserver",
    "FusedMovingAvgObsFakeQuantize",
    "Granularity",
    "HistogramObserver",
    "LearnableFakeQuantize",
    "MappingType",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "NoopObserver",
    "ObserverBase",
    "ObserverOrFakeQuantize",
    "ObserverOrFakeQuantizeConstructor",
    "OutputLogger",
    "PartialWrapper",
    "PerAxis",
    "PerBlock",
    "PerChannelMinMaxObserver",
    "PerGroup",
    "PerRow",
    "PerTensor",
    "PerToken",
    "PlaceholderObserver",
    "RecordingObserver",
    "ReuseInputObserver",
    "TorchAODType",
    "UniformQuantizationObserverBase",
    "WrapperModule",
    "ZeroPointDomain",
    "allow_exported_model_train_eval",
    "bfs_trace_with_node_process",
    "compare_results",
    "default_dynamic_fake_quant",
    "default_fake_quant",
    "disable_fake_quant",
    "disable_observer",
    "disable_range_learning",
    "enable_fake_quant",
    "enable_observer",
    "enable_range_learning",
    "extract_results_from_loggers",
    "find_sequential_partitions",
    "freeze_bn_stats",
    "generate_numeric_debug_handle",
    "get_block_size",
    "get_equivalent_types",
    "move_exported_model_to_eval",
    "move_exported_model_to_train",
    "prepare_for_propagation_comparison",
    "update_bn_stats",
    "update_equivalent_types_dict",
]
