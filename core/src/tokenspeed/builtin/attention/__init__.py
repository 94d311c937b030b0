"""Reference attention backend."""
