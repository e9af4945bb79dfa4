"""Compiles attention and its gradients for absent TPUs: compile_for_tpu.py CHIP NUM_SHARDS HEAD_DIM... prints JSON.

A program of its own, because the TPU compiler wants an environment that ordinary runs do not have.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding

import ring

TOPOLOGIES = {
    "v4": ("v4:2x2x1", {"chip_config_name": "megacore"}),
    "v5e": ("v5e:2x2", {}),
    "v5p": ("v5p:2x2x2", {}),
    "v6e": ("v6e:2x2", {}),
}


def compile_for(chip: str, num_shards: int, dim: int) -> dict[str, object]:
    """The compiled program's text and temporary bytes; 16 query heads share one key head."""
    name, options = TOPOLOGIES[chip]
    devices = np.array(topologies.get_topology_desc(name, "tpu", **options).devices).reshape(-1)
    mesh = Mesh(devices[:num_shards], ("sp",), axis_types=(AxisType.Auto,))
    plan = ring.Plan(mesh=mesh)

    def run(q, k, v, positions, segments, dout):
        call = lambda q, k, v: ring.attention(q, k, v, positions=positions, segment_ids=segments, plan=plan)
        out, pull_back = jax.vjp(call, q, k, v)
        return out, *pull_back(dout)

    length = 2048 * num_shards
    placed = NamedSharding(mesh, plan.spec("batch", "sequence"))
    array = lambda *shape, dtype: jax.ShapeDtypeStruct((1, length, *shape), dtype, sharding=placed)
    q, kv = array(16, dim, dtype=jnp.bfloat16), array(1, dim, dtype=jnp.bfloat16)
    meta = array(dtype=jnp.int32)
    started = time.process_time()
    compiled = jax.jit(run).lower(q, kv, kv, meta, meta, q).compile()
    return {
        "device_kind": devices[0].device_kind,
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "seconds": time.process_time() - started,
        "text": compiled.as_text(),
    }


if __name__ == "__main__":
    chip, num_shards, *dims = sys.argv[1:]
    print(json.dumps({dim: compile_for(chip, int(num_shards), int(dim)) for dim in dims}))
