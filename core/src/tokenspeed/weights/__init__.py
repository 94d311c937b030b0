"""Where weights come from.

The package itself imports nothing: ``describe``, ``locate``, ``gguf_file``, ``gguf_config``, ``gguf_tokenizer`` and ``toy`` are torch-free and used by the
command line; ``stream`` and what stands behind it run in engine processes.
"""
