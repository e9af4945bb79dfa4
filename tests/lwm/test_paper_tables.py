"""The two 7B configurations are the paper's tables, number by number (Liu et al., arXiv 2402.08268)."""

import math

import pytest

from lwm.config import MeshConfig, RunConfig, StageConfig, load_config, resolve_stage

# name, starts from, seq_len, RoPE theta, steps, warm-up steps, learning rates (max, min), mesh (dp, fsdp, tp, sp)
TEXT = [
    ("text-32k", "LLaMA-2 7B", 2**15, 1e6, 1200, 100, (4e-5, None), (1, -1, 4, 1)),
    ("text-128k", "previous", 2**17, 10e6, 3000, 200, (4e-5, None), (1, -1, 8, 1)),
    ("text-256k", "previous", 2**18, 10e6, 3000, 200, (4e-5, None), (1, -1, 16, 1)),
    ("text-512k", "previous", 2**19, 25e6, 720, 50, (4e-5, None), (1, -1, 16, 2)),
    ("text-1m", "previous", 2**20, 50e6, 450, 25, (4e-5, None), (1, -1, 16, 4)),
]
VISION = [
    ("vision-1k", "Text-1M", 2**10, 50e6, 45000, 1000, (6e-4, 6e-5), (1, -1, 1, 1)),
    ("vision-8k", "previous", 2**13, 50e6, 14000, 500, (6e-4, 6e-5), (1, -1, 1, 1)),
    ("chat-32k", "previous", 2**15, 50e6, 1200, 100, (8e-5, 8e-5), (1, -1, 4, 1)),
    ("chat-128k", "previous", 2**17, 50e6, 450, 50, (8e-5, 8e-5), (1, -1, 8, 1)),
    ("chat-1m", "previous", 2**20, 50e6, 50, 5, (8e-5, 8e-5), (1, -1, 16, 4)),
]
# Tokens of the whole stage as the paper prints them, in 10^9.
BILLIONS = {
    **{"text-32k": 4.8, "text-128k": 12, "text-256k": 12, "text-512k": 3, "text-1m": 1.8},
    **{"vision-1k": 363, "vision-8k": 107, "chat-32k": 10, "chat-128k": 3.5, "chat-1m": 0.4},
}


def text_config() -> RunConfig:
    return load_config("lwm_text_7b")


def vision_config() -> RunConfig:
    return load_config("lwm_7b")


@pytest.mark.parametrize(
    ("config", "rows", "batch_tokens", "schedule"),
    [(text_config(), TEXT, 2**22, "constant"), (vision_config(), VISION, 2**23, "cosine")],
    ids=["text", "vision"],
)
def test_every_stage_is_the_papers(config: RunConfig, rows: list[tuple], batch_tokens: int, schedule: str) -> None:
    assert [stage.name for stage in config.stages] == [row[0] for row in rows]
    for stage, (name, start, seq_len, theta, steps, warmup, (peak, least), mesh) in zip(
        config.stages, rows, strict=True
    ):
        assert (stage.seq_len, stage.rope_theta, stage.steps) == (seq_len, theta, steps), name
        assert stage.tokens_per_step == batch_tokens, name
        assert stage.tokens_per_step * stage.steps == pytest.approx(BILLIONS[name] * 1e9, rel=0.1), name
        # The shipped meshes ring where the paper splits heads (their head says why); the paper's own fit as well.
        assert config.devices is not None
        papers = stage.model_copy(
            update={"mesh": MeshConfig(**dict(zip(("dp", "fsdp", "tp", "sp"), mesh, strict=True)))}
        )
        for each in (stage, papers):
            assert math.prod(resolve_stage(config, each, config.devices).mesh_sizes.values()) == config.devices, name
        optimizer = stage.optimizer
        assert (optimizer.peak_lr, optimizer.warmup_steps, optimizer.schedule) == (peak, warmup, schedule), name
        assert least is None or optimizer.min_lr == least, name
        assert (optimizer.b2, optimizer.weight_decay, stage.accumulate) == (0.95, 0.1, 1), name
        assert (stage.init_from == "previous") == (start == "previous"), name
        assert stage.carry == "weights", name


def test_models_pods_and_starts() -> None:
    text, vision = text_config(), vision_config()
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_layers": 32, "num_heads": 32, "num_kv_heads": 32}
    for config, vision_ids in ((text, 0), (vision, 8192 + 256)):
        assert {name: getattr(config.model, name) for name in sizes} == sizes
        assert (config.model.text_vocab_size, config.model.vision_vocab_size) == (32000, vision_ids)
    # v4-512 and v4-1024 count cores, two to a device.
    assert (text.devices, vision.devices) == (256, 512)
    assert vision.stages[0].init_from == text.output_dir
    assert {stage.compute_dtype for stage in text.stages} == {"float32"}
    assert vision.vqgan is not None
    assert (vision.vqgan.codes_per_frame, vision.vqgan.num_embeddings) == (256, 8192)


def test_mixtures() -> None:
    config = vision_config()

    def share(stage: StageConfig, name: str) -> float:
        return stage.shares.get(name, 0.0) / sum(stage.shares.values())

    for stage in config.stages[:2]:
        assert share(stage, "text") == pytest.approx(0.16), stage.name
    tasks = ("chat_text_to_image", "chat_image_to_text", "chat_text_to_video", "chat_video_to_text")
    for stage in config.stages[2:]:
        assert [share(stage, name) for name in tasks] == [0.25] * 4, stage.name
