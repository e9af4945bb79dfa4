"""How the TPU compiler is set up: kept out of processes without a TPU, and given the flags that training wants.

On v4 the compiler by default gathers weights with all-reduces of zero-padded parts, which move twice the bytes and
beside which nothing runs. With `FLAGS` it gathers them in the background, one layer ahead of the layer that uses them.
On other generations gathers stay in the foreground with these flags, too, so only v4 has them.
"""

import glob
import importlib.util
import os
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "LIBTPU_INIT_ARGS"
FLAGS = {
    "v4": (
        "--xla_enable_async_all_gather=true",
        "--xla_tpu_prefer_async_allgather_to_allreduce=true",
        "--xla_tpu_enable_ici_ag_pipelining=true",
        # Transfers of the ring one after the other: two at once would share a link, and hold memory for both.
        "--xla_max_concurrent_async_collective_permutes=1",
    ),
}
_GOOGLE, _PCI_DEVICES = "0x1ae0", {"0x005e": "v4"}


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Before jax is imported: keep libtpu out where there is no TPU, or give it the flags of the one that is here."""
    keep_out(environ)
    if (kind := local_generation()) is not None and (arguments := init_args(kind, environ.get(VARIABLE, ""))):
        environ[VARIABLE] = arguments


def keep_out(environ: MutableMapping[str, str]) -> None:
    """Where libtpu is installed but no TPU is (nor a GPU's plugin), have jax start the CPU alone: looking for the TPU
    would load libtpu, which complains about what it does not find. A platform that is already chosen stays."""
    if "JAX_PLATFORMS" in environ or importlib.util.find_spec("libtpu") is None:
        return
    has_tpu = any(glob.glob(pattern) for pattern in ("/dev/accel*", "/dev/vfio/[0-9]*"))
    if not has_tpu and importlib.util.find_spec("jax_plugins") is None:
        environ["JAX_PLATFORMS"] = "cpu"


def init_args(kind: str, chosen: str) -> str:
    """LIBTPU_INIT_ARGS for a generation: what the user has `chosen`, and those of our flags that it does not set."""
    names = {each.split("=")[0].lstrip("-") for each in chosen.split()}
    ours = [each for each in FLAGS.get(kind, ()) if each.split("=")[0].lstrip("-") not in names]
    return " ".join([*chosen.split(), *ours])


def local_generation(devices: Path = Path("/sys/bus/pci/devices")) -> str | None:
    """Which TPU generation that has flags this host holds, by its PCI devices; None for any other and for none."""
    for vendor in devices.glob("*/vendor"):
        try:
            if vendor.read_text().strip() == _GOOGLE:
                return _PCI_DEVICES.get(vendor.with_name("device").read_text().strip())
        except OSError:
            continue  # unplugged, or not ours to read
    return None
