"""What all tests of the repository share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# The same examples in every run, and no verdict that depends on how busy the machine is.
settings.register_profile(
    "tokenspeed", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tokenspeed")
