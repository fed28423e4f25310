"""oneDNN in torch: its operators as calls of a graph, shared by the units that run on CPUs."""
