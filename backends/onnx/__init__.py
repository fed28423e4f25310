"""ONNX Runtime: QDQ models whose operators its CPU provider runs in integers."""
