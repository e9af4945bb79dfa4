"""Compares ring's TPU kernel with jax's splash attention, as compiled for TPUs that are not there.

    python scripts/compare_splash.py                         # v5p, 8192 tokens, 8 heads of 128, causal
    python scripts/compare_splash.py --chip v6e --head-dim 64 --no-schedule

Both compile out, dq, dk and dv of bfloat16 [1, S, H, D] arrays with the same blocks. Memory is what the compiled
program holds. The schedule is the TPU compiler's: instruction bundles (one a cycle, if no memory is waited for)
of a pair of blocks, and how full the matrix units are in them. Splash computes every pair with its mask; ring has
one body for wholly visible pairs and one for the others. Needs libtpu: pip install lwm[plan].
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

TOPOLOGIES = {
    "v4": ("v4:2x2x1", {"chip_config_name": "megacore"}),
    "v5e": ("v5e:2x2", {}),
    "v5p": ("v5p:2x2x1", {}),
    "v6e": ("v6e:2x2", {}),
}
KERNELS = {
    "ring": {"forward": "ring_forward", "dq": "ring_backward_queries", "dk, dv": "ring_backward_keys"},
    "splash": {"forward": "splash_mha_fwd", "dq": "splash_mha_dq", "dk, dv": "splash_mha_dkv"},
}
_QUIET_BUNDLES = 40  # a body ends where the matrix units rest for so long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=TOPOLOGIES, default="v5p", help="TPU generation")
    parser.add_argument("--length", type=int, default=8192, help="tokens")
    parser.add_argument("--heads", type=int, default=8, help="query heads, each with its own keys and values")
    parser.add_argument("--head-dim", type=int, default=128, help="64, 128 or 256")
    parser.add_argument("--schedule", action=argparse.BooleanOptionalAction, default=True, help="count bundles too")
    parser.add_argument("--child", choices=KERNELS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(compiled_memory(arguments)))
        return
    shape = f"{arguments.length} tokens, {arguments.heads} heads of {arguments.head_dim}"
    print(f"{arguments.chip}, {shape}, causal, bfloat16")
    for name in KERNELS:
        with tempfile.TemporaryDirectory() as dump:
            memory = run_child(name, dump if arguments.schedule else None)
            print(f"{name:7s} temporary {memory['temp'] / 2**20:7.1f} MiB   peak {memory['peak'] / 2**20:7.1f} MiB")
            if arguments.schedule:
                print_schedule(name, pathlib.Path(dump))


def run_child(name: str, dump: str | None) -> dict[str, int]:
    """Compiles in a process of its own: the compiler reads its environment once."""
    environment = os.environ | {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "JAX_PLATFORMS": "cpu",
    }
    if dump is not None:
        environment["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
    root = str(pathlib.Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, __file__, *sys.argv[1:], "--child", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} does not compile:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def compiled_memory(arguments: argparse.Namespace) -> dict[str, int]:
    """Bytes that the compiled program needs."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, SingleDeviceSharding

    topology, options = TOPOLOGIES[arguments.chip]
    device = topologies.get_topology_desc(topology, "tpu", **options).devices[0]
    length, heads, dim = arguments.length, arguments.heads, arguments.head_dim
    if arguments.child == "ring":
        attend = ring_attention(Mesh(np.array([device]), ("sp",)))
    else:
        attend = splash_attention(device.device_kind, length, heads, dim)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array, positions: jax.Array) -> tuple[jax.Array, ...]:
        out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, positions), q, k, v)
        return out, *pull_back(dout)

    placed = SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((1, length, heads, dim), jnp.bfloat16, sharding=placed)
    positions = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=placed)
    stats = jax.jit(run).lower(x, x, x, x, positions).compile().memory_analysis()
    return {"temp": stats.temp_size_in_bytes, "peak": stats.peak_memory_in_bytes}


def ring_attention(mesh: Mesh) -> Callable[..., jax.Array]:
    """Attention of [1, S, H, D] arrays by ring's kernel; positions are data."""
    import ring

    plan = ring.Plan(mesh=mesh, backend="pallas_tpu")
    return lambda q, k, v, positions: ring.attention(q, k, v, positions=positions, plan=plan)


def splash_attention(device_kind: str, length: int, heads: int, dim: int) -> Callable[..., jax.Array]:
    """The same by splash, whose mask is built on the host, with the blocks that ring would take."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    from ring import pallas_tpu

    query, key, chunk = pallas_tpu.choose_blocks(device_kind, dim, length, length, None, None)
    sizes = splash.BlockSizes(
        block_q=query, block_kv=key, block_kv_compute=chunk, block_q_dkv=query, block_kv_dkv=key,
        block_kv_dkv_compute=chunk, block_q_dq=query, block_kv_dq=key,
    )  # fmt: skip
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    kernel = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, _: jax.Array) -> jax.Array:
        first = lambda x: jnp.swapaxes(x, 1, 2)
        return first(jax.vmap(kernel)(first(q) * jnp.asarray(dim**-0.5, q.dtype), first(k), first(v)))

    return attend


def print_schedule(name: str, dump: pathlib.Path) -> None:
    """The bodies of each kernel: stretches of the schedule in which the matrix units work."""
    files = sorted(dump.glob("*final_hlo-static-per-bundle-utilization.txt"))
    for label, kernel in KERNELS[name].items():
        path = next((path for path in files if re.search(rf"-{kernel}[a-z_]*\.\d+-\d+-final", path.name)), None)
        if path is None:
            sys.exit(f"the compiler left no schedule of {kernel} in {dump}")
        lines = path.read_text().splitlines()
        columns = next(line for line in lines if line.startswith("MXU")).split(", ")
        units = int(lines[lines.index(", ".join(columns)) + 1].split()[0])
        first = lines.index("== UTILIZATION:") + 1
        used = [int(line.split()[0]) for line in lines[first:] if line]
        for start, stop in bodies(used):
            share = sum(used[start:stop]) / (units * (stop - start))
            print(f"   {label:8s} {stop - start:6d} bundles, matrix units {share:4.0%} full")


def bodies(used: list[int]) -> list[tuple[int, int]]:
    """Stretches that are at least a twentieth of all."""
    busy = [index for index, count in enumerate(used) if count]
    edges = [0, *(n + 1 for n in range(len(busy) - 1) if busy[n + 1] - busy[n] > _QUIET_BUNDLES), len(busy)]
    stretches = [(busy[a], busy[b - 1] + 1) for a, b in zip(edges, edges[1:], strict=False)]
    return [(start, stop) for start, stop in stretches if (stop - start) * 20 >= len(used)]


if __name__ == "__main__":
    main()
