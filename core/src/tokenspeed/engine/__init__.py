"""The engine: assembly of plugins into a plan, the processes that carry it out, and the step loop."""
