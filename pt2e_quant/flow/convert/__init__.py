"""Turn observers into q/dq nodes and weights into integers."""
