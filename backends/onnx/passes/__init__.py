"""Rewrites of the canonical graph that only ONNX needs, before the exporter."""
