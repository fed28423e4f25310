"""What a machine with a GPU times, one file a kernel."""
