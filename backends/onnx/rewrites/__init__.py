"""Rewrites of an ONNX graph into the forms that ONNX Runtime runs in integers."""
