"""Conformance suites and stand-ins for plugin authors and for core's own tests.

A plugin subclasses the suite of its kind (``ModelSuite``, ``AttentionBackendSuite``, ``KernelSuite``, ``PlatformSuite``, ...) and names its spec; pytest
collects the inherited tests. Needs the extra ``tokenspeed-core[testing]``.
"""
