"""Analysis of quantized models: comparison, sensitivity, search of precisions, profiles, pages."""
