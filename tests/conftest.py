"""Eight fake CPU devices for every test; nothing of the user's caches is read or written."""

import os
import signal
import tempfile

import pytest

# Before JAX is imported by any test module.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    # Level 0: the tests' time is compilation, which this halves.
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
# A shell's background job ignores Ctrl-C, and so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
_cache = tempfile.TemporaryDirectory(prefix="jaxpretrain-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name


@pytest.fixture
def topology():
    """`aot.topology`; without the compiler a test skips, or fails where JAXPRETRAIN_REQUIRE_AOT=1."""
    from jaxpretrain.plan import aot

    def topology(target: str, count: int = 1):
        try:
            return aot.topology(target, count)
        except ValueError as error:
            if os.environ.get("JAXPRETRAIN_REQUIRE_AOT") == "1":
                raise
            pytest.skip(str(error))

    return topology
