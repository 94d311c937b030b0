"""Constrained decoding with XGrammar."""
