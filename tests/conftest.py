"""Every test sees eight simulated CPU devices; the flag must be set before jax is imported."""

import os

_flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in _flags:
    os.environ["XLA_FLAGS"] = (
        f"{_flags} --xla_force_host_platform_device_count=8"
        " --xla_cpu_collective_call_warn_stuck_timeout_seconds=60"
        " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    ).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
