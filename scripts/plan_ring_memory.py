"""Memory of ring attention on one TPU v4 as the ring grows, at the same tokens per device: forward and backward.

    python scripts/plan_ring_memory.py                 # 8, 64 and 512 devices, 16384 tokens on each
    python scripts/plan_ring_memory.py --tokens 4096 --devices 8 64 --json

Compiled for slices that are not there; the bytes are the TPU compiler's peak. Ends with exit code 1 if a ring needs
over 2% more than the smallest.
"""

import argparse
import json
import os
import sys

from lwm.plan_compile import child_environment
from lwm.topology import Topology, parse

SLICES = {8: "v4:2x2x2", 64: "v4:4x4x4", 512: "v4:8x8x8", 1024: "v4:8x8x16"}


def peak_bytes(where: Topology, tokens: int, heads: int, block: int) -> int:
    """Peak of the gradient of one attention over `tokens` on each device of one ring, bfloat16, head dim 128."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    import ring
    from lwm import sharding
    from lwm.config import MeshConfig

    devices = topologies.get_topology_desc(where.name, "tpu", chip_config_name="megacore").devices
    mesh = sharding.make_mesh(MeshConfig(fsdp=1, sp=-1), devices)
    plan = ring.Plan(mesh=mesh, query_block=block, key_block=block)
    length = tokens * len(devices)
    rows = NamedSharding(mesh, PartitionSpec(None, "sp", None, None))
    whole = jax.ShapeDtypeStruct((1, length, heads, 128), jnp.bfloat16, sharding=rows)
    where_ids = NamedSharding(mesh, PartitionSpec(None, "sp"))
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=where_ids)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
        return jnp.sum(ring.attention(q, k, v, positions=positions, plan=plan).astype(jnp.float32))

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(whole, whole, whole, ids).compile()
    return int(compiled.memory_analysis().peak_memory_in_bytes)


def main() -> None:
    """Compile each ring and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", choices=sorted(SLICES), default=[8, 64, 512])
    parser.add_argument("--tokens", type=int, default=16384, help="on each device")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--block", type=int, default=1024)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ.update(child_environment(parse("v4:2x2x2")))
    found = {}
    for devices in arguments.devices:
        found[devices] = peak_bytes(parse(SLICES[devices]), arguments.tokens, arguments.heads, arguments.block)
        print(f"{devices} devices: {found[devices] / 1e9:.3f} GB on each", file=sys.stderr, flush=True)
    growth = max(found.values()) / min(found.values()) - 1
    if arguments.json:
        print(json.dumps({"tokens": arguments.tokens, "peak_bytes": found, "growth": growth}))
    else:
        print(f"the largest needs {growth:.2%} more than the smallest")
    sys.exit(growth > 0.02)


if __name__ == "__main__":
    main()
