"""What stands in a graph at a quantized tensor before convert, and what makes it."""

from pt2e_quant.observers.base import ObserverBase
from pt2e_quant.observers.partial_wrapper import PartialWrapper
from pt2e_quant.observers.training.fake_quantize import FakeQuantizeBase

__all__ = ["ObserverOrFakeQuantize", "ObserverOrFakeQuantizeConstructor"]

ObserverOrFakeQuantize = ObserverBase | FakeQuantizeBase
ObserverOrFakeQuantizeConstructor = PartialWrapper | type[ObserverBase] | type[FakeQuantizeBase]
