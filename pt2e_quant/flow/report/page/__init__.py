"""Reports as one file of HTML: tables, pictures and everything that shows them, without network."""
