"""Floor 2: graph to graph, one job each."""
