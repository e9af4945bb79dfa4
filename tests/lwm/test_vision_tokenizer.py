"""A vision tokenizer on disk: what was saved comes back, and nothing that is half there is taken for one."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from lwm import vqgan
from lwm.config import VQGANConfig
from lwm.vision_tokenizer import INFO_FILE, PARAMS_FILE, VisionTokenizer

CONFIG = VQGANConfig(
    resolution=16,
    hidden_channels=4,
    channel_mult=(1, 2),
    num_res_blocks=1,
    z_channels=4,
    num_embeddings=12,
    quantized_embed_dim=3,
)


@pytest.fixture(scope="module")
def tokenizer() -> VisionTokenizer:
    return VisionTokenizer(CONFIG, vqgan.init(CONFIG, jax.random.key(0)), {"psnr_db": 21.5, "codes_used": 9})


def test_round_trip(tokenizer: VisionTokenizer, tmp_path: Path) -> None:
    directory = tokenizer.save(tmp_path / "deep" / "vqgan")
    loaded = VisionTokenizer.load(directory)
    assert loaded.config == CONFIG
    assert loaded.metrics == {"psnr_db": 21.5, "codes_used": 9}
    assert loaded.fingerprint == tokenizer.fingerprint
    jax.tree.map(np.testing.assert_array_equal, loaded.params, tokenizer.params)
    frames = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
    codes = loaded.encode(frames)
    assert (codes.shape, codes.dtype, loaded.codes_per_frame) == ((5, 64), np.int32, 64)
    np.testing.assert_array_equal(codes, vqgan.encode_frames(CONFIG, tokenizer.params, frames))
    assert loaded.decode(codes).shape == frames.shape
    assert [path.name for path in directory.parent.iterdir()] == ["vqgan"]


def test_fingerprint_tells_weights_and_shapes_apart(tokenizer: VisionTokenizer) -> None:
    params: Any = jax.tree.map(np.array, tokenizer.params)
    assert VisionTokenizer(CONFIG, params).fingerprint == tokenizer.fingerprint
    params["codebook"][3, 1] += 1e-6
    changed = VisionTokenizer(CONFIG, params).fingerprint
    other = VisionTokenizer(CONFIG.model_copy(update={"resolution": 32}), tokenizer.params).fingerprint
    assert len({changed, other, tokenizer.fingerprint}) == 3


def test_what_is_there_stays_unless_asked(tokenizer: VisionTokenizer, tmp_path: Path) -> None:
    directory = tokenizer.save(tmp_path / "vqgan")
    with pytest.raises(ValueError, match="is there already"):
        tokenizer.save(directory)
    other = VisionTokenizer(CONFIG, jax.tree.map(lambda leaf: leaf + 1, tokenizer.params))
    other.save(directory, overwrite=True)
    assert VisionTokenizer.load(directory).fingerprint == other.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["vqgan"]


def test_an_attempt_that_fails_leaves_nothing(
    tokenizer: VisionTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tokenizer.save(tmp_path / "vqgan")

    def full(*arguments: object, **arrays: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    for directory in (tmp_path / "other", kept):
        with pytest.raises(OSError, match="No space"):
            tokenizer.save(directory, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["vqgan"]
    assert VisionTokenizer.load(kept).fingerprint == tokenizer.fingerprint


def test_refusals(tokenizer: VisionTokenizer, tmp_path: Path) -> None:
    def refusal(directory: Path) -> str:
        with pytest.raises(ValueError) as error:
            VisionTokenizer.load(directory)
        assert str(directory) in str(error.value)
        return str(error.value)

    assert "there is no vision tokenizer" in refusal(tmp_path / "nothing")
    directory = tokenizer.save(tmp_path / "vqgan")
    info_file, params_file = directory / INFO_FILE, directory / PARAMS_FILE
    info, arrays = info_file.read_text(), params_file.read_bytes()

    info_file.write_text(info[:-20])
    assert "cannot be read" in refusal(directory)
    info_file.write_text(json.dumps({**json.loads(info), "format": 7}))
    assert "format 7" in refusal(directory)
    info_file.write_text(json.dumps({**json.loads(info), "config": {"resolution": 16}}))
    assert "its config is not one" in refusal(directory)
    fewer = {**json.loads(info), "config": {**json.loads(info)["config"], "num_embeddings": 11}}
    info_file.write_text(json.dumps(fewer))
    assert "is damaged" in refusal(directory)

    info_file.write_text(info)
    params_file.write_bytes(arrays[: len(arrays) // 2])
    assert "cannot be read" in refusal(directory)
    middle = len(arrays) // 2
    params_file.write_bytes(arrays[:middle] + bytes([arrays[middle] ^ 1]) + arrays[middle + 1 :])
    refusal(directory)
    params_file.unlink()
    assert "cannot be read" in refusal(directory)
