"""ONNX for operators that torch's exporter has none for, or translates so that nothing fuses."""
