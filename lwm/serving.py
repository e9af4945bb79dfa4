"""A trained run, opened to be used: its configuration, tokenizers and a sampler around its last checkpoint."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from data.text import TextTokenizer
from data.vocabulary import Vocabulary
from lwm import checkpoint, cluster
from lwm.checkpoint import MANIFEST_FILE, find_checkpoint, read_manifest
from lwm.config import ConfigError, MeshConfig, RunConfig, StageConfig, resolve_mesh
from lwm.corpora import text_tokenizer_of, vision_tokenizer_of, vocabulary_of
from lwm.following import follow
from lwm.run_directory import find_run
from lwm.sample import Sampler
from lwm.sharding import make_mesh
from lwm.vision_tokenizer import VisionTokenizer


@dataclass(frozen=True, eq=False)
class OpenRun:
    """`identity` changes with the weights. `vision` is None where the run has no vision tokenizer."""

    config: RunConfig
    sampler: Sampler
    text: TextTokenizer
    vision: VisionTokenizer | None
    vocabulary: Vocabulary
    identity: str

    def need_vision(self) -> VisionTokenizer:
        """The vision tokenizer; ValueError where there is none."""
        if self.vision is None:
            raise ConfigError(f"{self.config.name} has no vision tokenizer; it can neither see nor draw")
        return self.vision


def open_run(
    checkpoint_dir: str | Path,
    config: str | None = None,
    overrides: Sequence[str] = (),
    *,
    max_length: int | None = None,
    max_batch: int = 8,
    one_row: bool = False,
    **options: Any,
) -> OpenRun:
    """Load a checkpoint with its tokenizers, on all devices there are; on a cluster, all hosts do so.

    Of several processes only the first returns: what it has the sampler do, the others do with it. They end, with
    SystemExit(0), when it does.

    checkpoint_dir: a run directory, its `checkpoints`, or one step in it. max_length: the context; by default the
    seq_len of the stage that the checkpoint was trained in. one_row: spread every device along the sequence, for one
    prompt at a time. options: other arguments of `Sampler`. ValueError where anything is missing or does not fit.
    """
    run = find_run(checkpoint_dir, config, overrides)
    cluster.connect(run.cluster)
    path = find_checkpoint(checkpoint_dir)
    manifest = read_manifest(path)
    names = [stage.name for stage in run.stages]
    # Imported weights were trained in no stage of this run: they go by its last one.
    stage = run.stage(manifest.stage) if manifest.stage in names else run.stages[-1]
    model = checkpoint.load_model_config(path)
    mesh = serving_mesh(stage, one_row=one_row)
    text, vocabulary = text_tokenizer_of(run), vocabulary_of(run)
    vision = None if run.vqgan is None or run.tokenizers.vision is None else vision_tokenizer_of(run)
    sampler = Sampler.for_stage(
        model,
        checkpoint.load_params(path, mesh),
        stage.model_copy(update={"rope_theta": model.rope_theta}),
        mesh,
        vocabulary=vocabulary,
        max_length=stage.seq_len if max_length is None else max_length,
        max_batch=max_batch,
        **options,
    )
    if jax.process_index() > 0:
        follow(sampler.generate)
        raise SystemExit(0)
    if jax.process_count() > 1:
        cluster.lead()
    digest = hashlib.sha256((path / MANIFEST_FILE).read_bytes()).hexdigest()
    return OpenRun(run, sampler, text, vision, vocabulary, f"{run.name}-{manifest.step}-{digest[:16]}")


def serving_mesh(stage: StageConfig, num_devices: int | None = None, *, one_row: bool = False) -> Mesh | None:
    """The stage's own mesh where it fits the devices, else one ring over all of them; None for a single device.

    one_row: its rows' devices join the ring, which so has all but those of `tp` and `ulysses`.
    """
    num_devices = jax.device_count() if num_devices is None else num_devices
    if num_devices == 1:
        return None
    try:
        resolve_mesh(stage.mesh, num_devices)
    except ConfigError:
        return make_mesh(MeshConfig(fsdp=1, sp=-1))
    if one_row:
        return make_mesh(stage.mesh.model_copy(update={"dp": 1, "fsdp": 1, "sp": -1}))
    return make_mesh(stage.mesh)
