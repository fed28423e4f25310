"""One file for a prepared or a converted program; see docs/file_format.md."""
