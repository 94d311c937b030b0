"""DeepSeek V2 and V3. Import ``model`` by name; ``plugin`` imports nothing heavy."""
