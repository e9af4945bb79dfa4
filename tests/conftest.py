"""Every test sees eight simulated CPU devices and strict promotion of dtypes, which jax must know when it starts."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

_flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in _flags:
    os.environ["XLA_FLAGS"] = (
        f"{_flags} --xla_force_host_platform_device_count=8"
        " --xla_cpu_collective_call_warn_stuck_timeout_seconds=60"
        " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    ).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# No dtype is widened without a word, here and in the processes that tests start.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")


@pytest.fixture(scope="session")
def ordered_collectives() -> None:
    """For tests of several processes that compute together."""
    import jax

    if jax.__version_info__ < (0, 11):
        pytest.skip(
            "jax 0.10 starts a CPU program's collectives in any order: on a busy machine two processes can wait for "
            "each other's for ever; run this with Python 3.12 and its jax"
        )


Environs = Callable[[int], list[dict[str, str]]]


@pytest.fixture(scope="session")
def environs() -> Environs:
    """For starting processes: the environments of as many as wanted, which share eight devices and find each other."""

    def of(count: int) -> list[dict[str, str]]:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        flags = f"--xla_force_host_platform_device_count={8 // count}"
        shared = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{flags} --xla_cpu_collective_call_terminate_timeout_seconds=600",
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        if count == 1:
            return [shared]
        shared |= {"JAX_COORDINATOR_ADDRESS": address, "LWM_NUM_PROCESSES": str(count)}
        return [shared | {"LWM_PROCESS_ID": str(number)} for number in range(count)]

    return of
