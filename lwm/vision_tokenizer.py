"""A trained VQGAN as a directory: `vision_tokenizer.json` (what it is) and `params.npz` (its arrays).

The directory gets its name when all of it is on disk, so what a killed process leaves behind is never taken for one.
"""

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from lwm import vqgan
from lwm.config import VQGANConfig, canonical_json
from lwm.sharding import flatten, nest
from lwm.vqgan import Params

FORMAT = 1
INFO_FILE, PARAMS_FILE = "vision_tokenizer.json", "params.npz"


class VisionTokenizer:
    """Frames to codes and back with one set of weights.

    config, params: as in `lwm.vqgan`. metrics: what its training measured (`psnr_db`, `codes_used`), JSON values.
    fingerprint: sha256 (hex) of config and weights; codes of tokenizers with other fingerprints do not mix.
    """

    def __init__(self, config: VQGANConfig, params: Params, metrics: Mapping[str, Any] | None = None):
        self.config, self.params = config, params
        self.metrics: dict[str, Any] = dict(metrics or {})
        self._arrays = {name: np.asarray(leaf, np.float32) for name, leaf in flatten(params).items()}
        self.fingerprint = _fingerprint(config, self._arrays)

    @property
    def codes_per_frame(self) -> int:
        """Codes of a frame of the configured resolution."""
        return self.config.codes_per_frame

    def encode(self, pixels: np.ndarray) -> np.ndarray:
        """Frames uint8 [T, H, W, 3] -> codes int32 [T, n], row by row; a frame's codes depend on that frame alone."""
        return vqgan.encode_frames(self.config, self.params, pixels)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Codes int [T, n] of square frames -> uint8 [T, H, W, 3]; ValueError for a code that is not in the book."""
        return vqgan.decode_frames(self.config, self.params, codes)

    def save(self, directory: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the directory whole or not at all; returns it.

        ValueError where there is something already, unless `overwrite`; OSError when the disk is full.
        """
        final = Path(directory).absolute()
        if final.exists() and not overwrite:
            raise ValueError(f"{directory} is there already; overwrite it, or give another directory")
        partial, old = (final.with_name(f".{final.name}.{suffix}") for suffix in ("partial", "old"))
        final.parent.mkdir(parents=True, exist_ok=True)
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
        info = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "config": self.config.model_dump(mode="json"),
            "metrics": self.metrics,
        }
        arrays: dict[str, Any] = {name.replace("/", "."): array for name, array in self._arrays.items()}
        try:
            partial.mkdir()
            with open(partial / PARAMS_FILE, "wb") as file:
                np.savez(file, **arrays)
                _sync(file)
            with open(partial / INFO_FILE, "w", encoding="utf-8") as text:
                json.dump(info, text, indent=1)
                _sync(text)
            if final.exists():
                os.rename(final, old)
            os.rename(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        shutil.rmtree(old, ignore_errors=True)
        return final

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> "VisionTokenizer":
        """Read what `save` wrote; ValueError when it is not there, damaged, or of another format."""
        root = Path(directory)
        if not (root / INFO_FILE).is_file():
            raise ValueError(
                f"there is no vision tokenizer in {directory}; train one with `lwm tokenizer train-vision`, or set "
                "tokenizers.vision to its directory"
            )
        try:
            info = json.loads((root / INFO_FILE).read_text(encoding="utf-8"))
            version, claimed, metrics = info["format"], info["fingerprint"], info["metrics"]
            if version != FORMAT:
                raise ValueError(f"it has format {version}, and this version of lwm reads format {FORMAT}")
            config = VQGANConfig.model_validate_json(json.dumps(info["config"]))
            with np.load(root / PARAMS_FILE, allow_pickle=False) as file:
                arrays = {name.replace(".", "/"): file[name] for name in file.files}
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            reason = "its config is not one of this version" if isinstance(error, ValidationError) else str(error)
            raise ValueError(
                f"vision tokenizer {directory} cannot be read: {reason}; train or copy it again"
            ) from error
        expected = flatten(vqgan.table(config))
        shapes = {name: array.shape for name, array in arrays.items()}
        if (
            shapes != {name: weight.shape for name, weight in expected.items()}
            or _fingerprint(config, arrays) != claimed
        ):
            raise ValueError(
                f"vision tokenizer {directory} is damaged: its arrays are not those it was saved with; train or copy "
                "it again"
            )
        return cls(config, nest(arrays), metrics)


def _fingerprint(config: VQGANConfig, arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(canonical_json(config).encode())
    for name in sorted(arrays):
        digest.update(f"\n{name} {arrays[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name], "<f4").tobytes())
    return digest.hexdigest()


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
