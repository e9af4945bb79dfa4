"""Compares ring.attention on simulated CPU devices with the reference and with dense attention.

    pip install ringattention==0.1.2 einops      # the reference; without it its rows are left out
    python scripts/bench_ring.py [--json FILE] [--repeats N]

Every contender of a group runs in turn, round by round, so that a busy machine slows all of them alike;
the smallest CPU-seconds and wall-clock of the rounds are reported, with the temporary memory per device
that the compiler planned. Case: B1 S8192 H8 D64, causal, 4 simulated devices. Below each group: the time of 16
packed documents, as a multiple of the sixteenth that they need of the unpacked row's products, and that of a row of
padding, which is what it costs to send keys and values round the ring and to attend to none of them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=4"
    + " --xla_cpu_collective_call_terminate_timeout_seconds=600"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ring

B, S, H, D, DEVICES, DOCUMENTS = 1, 8192, 8, 64, 4, 16
PACKED, PADDING = f"ring {DOCUMENTS} documents", "ring padding only"
TOKENS = P(None, "sp", None, None)


def reference_attention(mesh: jax.sharding.Mesh, chunk: int) -> Callable | None:
    """PyPI ringattention 0.1.2, or None if it is not installed."""
    if not hasattr(jax.lib, "xla_bridge"):
        vars(jax.lib)["xla_bridge"] = jax.extend.backend  # the package looks for it there
    try:
        from ringattention import ringattention_jax
    except ImportError:
        return None
    options = {
        "causal_block_size": 1, "deterministic": True, "dropout_rng": None, "attn_pdrop": 0.0, "policy": None,
        "query_chunk_size": chunk, "key_chunk_size": chunk, "dtype": jnp.float32, "precision": None,
        "prevent_cse": True,
    }  # fmt: skip

    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = ringattention_jax(q, k, v, None, None, None, "sp", True, options)
        return out.astype(q.dtype)

    return jax.shard_map(local, mesh=mesh, in_specs=(TOKENS,) * 3, out_specs=TOKENS, check_vma=False)


def ring_attention(mesh: jax.sharding.Mesh, layout: str, documents: int = 1) -> Callable:
    """ring.attention over rows packed with ``documents`` equal documents, or of padding alone for 0 of them."""
    plan = ring.Plan(mesh=mesh, layout=layout)
    order = ring.layout.permutation(layout, S, DEVICES)
    length = S // max(documents, 1)
    positions = jnp.asarray(order % length, jnp.int32)[None]
    segments = jnp.asarray((order // length + 1) * (documents > 0), jnp.int32)[None]
    return lambda q, k, v: ring.attention(q, k, v, positions=positions, segment_ids=segments, plan=plan)


def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """jax.nn.dot_product_attention, the sequence sharded by the compiler."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def both_passes(attend: Callable) -> Callable:
    def run(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        return jax.vjp(attend, q, k, v)[1](dout)

    return run


def measure(contenders: dict[str, Callable], arguments: tuple, repeats: int) -> dict[str, dict[str, float]]:
    compiled, rows = {}, {}
    for name, function in contenders.items():
        start = time.perf_counter()
        compiled[name] = jax.jit(function).lower(*arguments).compile()
        memory = compiled[name].memory_analysis()
        rows[name] = {
            "cpu_s": float("inf"),
            "wall_s": float("inf"),
            "temp_mib": memory.temp_size_in_bytes / 2**20 if memory is not None else float("nan"),
            "compile_s": time.perf_counter() - start,
        }
        jax.block_until_ready(compiled[name](*arguments))
    for _ in range(repeats):
        for name, function in compiled.items():
            cpu, wall = time.process_time(), time.perf_counter()
            jax.block_until_ready(function(*arguments))
            rows[name]["cpu_s"] = min(rows[name]["cpu_s"], time.process_time() - cpu)
            rows[name]["wall_s"] = min(rows[name]["wall_s"], time.perf_counter() - wall)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the numbers to this file as well")
    parser.add_argument("--repeats", type=int, default=3, help="rounds per group (default 3)")
    parser.add_argument("--no-dense", action="store_true", help="leave out dense attention, which needs S x S memory")
    options = parser.parse_args()
    mesh = jax.make_mesh((DEVICES,), ("sp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    rng = np.random.default_rng(0)
    report: dict[str, Any] = {"case": {"B": B, "S": S, "H": H, "D": D, "devices": DEVICES}, "jax": jax.__version__}
    print(f"{'pass':<24} {'contender':<22} {'CPU s':>7} {'of ref':>7} {'wall s':>7} {'temp MiB':>9} {'compile s':>9}")
    for dtype in (jnp.float32, jnp.bfloat16):
        sharding = NamedSharding(mesh, TOKENS)
        arrays = [jax.device_put(jnp.asarray(rng.standard_normal((B, S, H, D)), dtype), sharding) for _ in range(4)]
        contenders: dict[str, Callable] = {
            "ring striped": ring_attention(mesh, "striped"),
            "ring zigzag": ring_attention(mesh, "zigzag"),
            PACKED: ring_attention(mesh, "zigzag", DOCUMENTS),
            PADDING: ring_attention(mesh, "zigzag", 0),
        }
        for chunk in (256, 512):
            reference = reference_attention(mesh, chunk)
            if reference is not None:
                contenders[f"ringattention {chunk}"] = reference
        if not options.no_dense:
            contenders["jax.nn dense"] = dense_attention
        for kind, wrap, count in (("forward", lambda f: f, 3), ("forward+backward", both_passes, 4)):
            rows = measure({n: wrap(f) for n, f in contenders.items()}, tuple(arrays[:count]), options.repeats)
            best = min((r["cpu_s"] for n, r in rows.items() if n.startswith("ringattention")), default=float("nan"))
            group = f"{jnp.dtype(dtype).name} {kind}"
            for name, row in rows.items():
                row["of_reference"] = row["cpu_s"] / best
                print(
                    f"{group:<24} {name:<22} {row['cpu_s']:7.2f} {row['of_reference']:7.2f} {row['wall_s']:7.2f} "
                    f"{row['temp_mib']:9.1f} {row['compile_s']:9.1f}",
                    flush=True,
                )
            needed = rows["ring zigzag"]["cpu_s"] / DOCUMENTS
            for name in (PACKED, PADDING):
                rows[name]["of_needed"] = rows[name]["cpu_s"] / needed
                print(f"{group:<24} {name}: {rows[name]['of_needed']:.2f}x of {needed:.3f} s", flush=True)
            report[group] = rows
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
