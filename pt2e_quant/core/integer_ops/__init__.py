"""One exact definition in integers of each quantized operator."""
