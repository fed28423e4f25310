"""Programs for ExecuTorch, run by its XNNPACK delegate."""
