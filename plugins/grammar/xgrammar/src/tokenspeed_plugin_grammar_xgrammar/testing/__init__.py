"""What the tests of constrained decoding share: random schemas, random texts that a grammar allows, and a schema for every keyword."""
