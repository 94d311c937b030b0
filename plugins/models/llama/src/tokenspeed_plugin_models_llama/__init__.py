"""Llama and the models that are Llama in all but name."""
