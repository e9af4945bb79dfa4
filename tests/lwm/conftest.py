"""A tiny corpus and a tiny run that several files of tests share."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from data.build import build_corpus
from data.examples import TokenizedExample
from data.vocabulary import Vocabulary
from lwm import stages
from lwm.step import CompiledStep


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty short examples: counting upwards in text, and in vision after a text prefix."""
    directory = tmp_path_factory.mktemp("corpus") / "tiny"
    rng = np.random.default_rng(0)

    def example(number: int) -> TokenizedExample:
        text = (int(rng.integers(32)) + np.arange(int(rng.integers(6, 20)))) % 32
        vision = 32 + (int(rng.integers(14)) + np.arange(9)) % 14
        tokens = np.concatenate([text, vision]) if number % 2 else text
        return TokenizedExample(tokens.astype(np.int32), np.arange(tokens.size) >= 4, str(number), "test")

    vocabulary = Vocabulary(text_size=32, num_codes=14, vision_size=16)
    build_corpus(directory, "tiny", map(example, range(40)), vocabulary=vocabulary, input_fingerprint="test")
    return directory


@pytest.fixture(scope="session")
def worker() -> ModuleType:
    """The module `run_worker`: the tiny run's configuration, and the program that is one process of it."""
    path = Path(__file__).with_name("run_worker.py")
    spec = importlib.util.spec_from_file_location("run_worker", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kept_programs() -> Iterator[None]:
    """Keep compiled steps for the length of a file of tests, because the same run is started again and again.

    In memory: jax's cache on disk loses the order of a CPU program's collectives, and devices then wait for each other.
    """
    kept: dict[Any, CompiledStep] = {}

    def compiled(*arguments: Any) -> CompiledStep:
        if arguments not in kept:
            kept[arguments] = CompiledStep(*arguments)
        return kept[arguments]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stages, "CompiledStep", compiled)
        yield
