"""The TPU compiler takes the kernel, for chips that are not there, and hides the ring's transfers behind it."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = pathlib.Path(__file__).with_name("compile_for_tpu.py")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the TPU compiler, is not installed (pip install lwm[plan])",
)


def compile_for(chip: str, num_shards: int, dim: int) -> dict[str, Any]:
    """In a child: the compiler reads its environment once, and tests must not see TPUs."""
    quiet = {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(PROGRAM.parents[2]),
    }
    command = [sys.executable, str(PROGRAM), chip, str(num_shards), str(dim)]
    done = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)[str(dim)]


@pytest.mark.parametrize(
    ("chip", "dim", "kind"), [("v4", 128, "TPU v4"), ("v5e", 64, "TPU v5 lite"), ("v6e", 256, "TPU v6 lite")]
)
def test_one_hop(chip: str, dim: int, kind: str) -> None:
    """Backend "auto" takes the kernel, and its blocks fit the chip's vector memory."""
    compiled = compile_for(chip, 1, dim)
    assert compiled["device_kind"] == kind
    assert kernels_in(compiled["text"]) == {"ring_forward": 1, "ring_backward_queries": 1, "ring_backward_keys": 1}
    # No [S, S] is ever made. Copies of queries or outputs with their heads first may be in main memory or in the chip's
    # own; scores of 16 heads would take 128 MiB in bfloat16.
    assert not re.search(r"\[(\d+,)*2048,(\d+,)*2048[,\]]", compiled["text"])
    assert compiled["temp_bytes"] < 64 * 2**20


def test_ring() -> None:
    """A kernel runs between the start and the end of each transfer of a shard or its gradients, in the loops over hops
    and around them, and of positions in the loops. No loop copies a shard."""
    text = compile_for("v5p", 8, 128)["text"]
    bodies = [body for body in re.split(r"\n(?=(?:ENTRY )?%)", text) if "collective-permute-start(" in body]
    loops = [body for body in bodies if not body.startswith("ENTRY")]
    assert len(loops) == 2, "one loop over hops for each pass"
    shard_bytes = 2 * 2048 * 128 * 2
    for body in bodies:
        for start in re.finditer(r"%(\S+) = \((\S+\[\S+), .* collective-permute-start\(", body):
            between = body[start.end() : body.index(f"collective-permute-done(%{start[1]})")]
            if num_bytes(start[2]) >= shard_bytes or body in loops:
                assert re.search(r"%ring_(forward|backward)", between), f"{start[1]} is waited for, with nothing to do"
    for body in loops:
        for copy in re.finditer(r" = (\S+\[\S+) copy\(", body):
            assert num_bytes(copy[1]) < shard_bytes, f"a shard is copied: {copy[0]}"


def kernels_in(text: str) -> dict[str, int]:
    names = re.findall(r"%(ring_[a-z_]+)[.\d]* = [^\n]* custom-call\(", text)
    return {name: names.count(name) for name in names}


def num_bytes(shape: str) -> int:
    printed = re.match(r"([a-z]+\d*)\[([\d,]*)\]", shape)
    assert printed is not None
    dtype, dims = printed.groups()
    size = {"pred": 1, "bf16": 2}.get(dtype, 4)
    for dim in filter(None, dims.split(",")):
        size *= int(dim)
    return size
