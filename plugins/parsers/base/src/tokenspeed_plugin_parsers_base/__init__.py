"""Parsers that find nothing: all text is content."""
