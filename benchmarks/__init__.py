"""One script a question: peers beside this project in one run, a table printed, JSON written."""
