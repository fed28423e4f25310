"""The graph in exact integer arithmetic."""
