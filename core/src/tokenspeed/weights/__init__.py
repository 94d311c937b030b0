"""Where weights come from. The package itself imports nothing: ``describe``, ``gguf_file`` and ``gguf_tokenizer`` are torch-free, the rest is not."""
