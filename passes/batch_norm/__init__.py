"""Batch norms folded into the operator before them, trained and detached for annotation."""
