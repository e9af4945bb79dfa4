"""The README's example runs as it stands and agrees with the oracle."""

import pathlib
import re

import numpy as np

import ring
from ring import reference


def test_the_example_runs() -> None:
    readme = pathlib.Path(ring.__file__).with_name("README.md").read_text()
    example = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert example is not None
    names: dict = {}
    # The devices are already simulated here, and the flag must not outlive this test.
    exec(example[1].replace("os.environ[", "os.environ.copy()["), names)
    positions, segments = np.asarray(names["positions"]), np.asarray(names["segment_ids"])
    q, k, v = (np.asarray(names[name]) for name in "qkv")
    expected = reference.attention(q, k, v, reference.visibility(positions, segments)).out
    assert np.abs(np.asarray(names["out"]) - expected[:, names["order"]]).max() <= 2e-6 * np.abs(expected).max()
