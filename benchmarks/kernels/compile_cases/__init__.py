"""What is compiled ahead of time, one file a kernel."""
