"""One file a table or figure: prints published numbers beside measured ones, writes JSON and PNG."""
