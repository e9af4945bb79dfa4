"""The commands `lwm import` and `lwm export`. Heavy imports are inside them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lwm.options import CheckpointOption

if TYPE_CHECKING:
    from lwm.config import ModelConfig, RunConfig
    from lwm.telemetry import Progress

import_app = typer.Typer(help="Read other programs' weights.", no_args_is_help=True, rich_markup_mode=None)
export_app = typer.Typer(help="Write weights for other programs.", no_args_is_help=True, rich_markup_mode=None)

OutDirectory = Annotated[Path, typer.Option("--out", metavar="DIR", help="A new directory.")]
_NEARBY = ("config.json", "lwm_config.json", "llama_config.json")


@import_app.command("hf")
def import_hf(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A directory with config.json and *.safetensors.")],
    out: OutDirectory,
) -> None:
    """A LLaMA model of Hugging Face -> a checkpoint to start from (`init_from`), to ask or to evaluate."""
    from lwm.weights import hf, store

    config, pieces = hf.read_hf(source)
    with _progress("import", config) as progress:
        step = store.write(out, config, pieces, progress)
    print(f"{step}: {_told(config)}")


@import_app.command("lwm")
def import_lwm(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A released streaming checkpoint (`params`).")],
    out: OutDirectory,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON|CONFIG",
            help="The model's shape: the JSON of its own configuration, or a run's (lwm_text_1m) whose tokenizers then "
            "go with it [default: config.json or lwm_config.json beside SRC].",
        ),
    ] = None,
) -> None:
    """A released Large World Model -> a checkpoint to start from, to ask or to evaluate."""
    from lwm.run_directory import save_run
    from lwm.weights import lwm_params, store

    shape, run = _shape(source, config)
    model, pieces = lwm_params.read_lwm(source, shape)
    with _progress("import", model) as progress:
        step = store.write(out, model, pieces, progress)
    if run is not None:
        save_run(run.model_copy(update={"output_dir": str(out), "model": model}))
    print(f"{step}: {_told(model)}")


@import_app.command("vqgan")
def import_vqgan(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The released VQGAN, a pickle of arrays.")],
    config: Annotated[Path, typer.Option(metavar="JSON", help="Its shape.")],
    out: OutDirectory,
) -> None:
    """A released vision tokenizer -> a directory for `tokenizers.vision`."""
    from lwm import vqgan
    from lwm.vision_tokenizer import VisionTokenizer

    tokenizer = VisionTokenizer(*vqgan.import_lwm(source, config))
    tokenizer.save(out)
    print(f"{out}: {tokenizer.codes_per_frame} codes a frame of {tokenizer.config.num_embeddings}")


@export_app.command("hf")
def export_hf(
    checkpoint: CheckpointOption,
    out: OutDirectory,
    dtype: Annotated[
        str, typer.Option(help="float32 (exact), bfloat16 or float16: half the size, rounded.")
    ] = "float32",
    max_length: Annotated[int, typer.Option(min=1, help="The context that config.json gives, in tokens.")] = 4096,
) -> None:
    """A checkpoint -> a LlamaForCausalLM directory of Hugging Face."""
    from lwm.weights import hf_export, store

    config, read = store.reader(checkpoint)
    with _progress("export", config) as progress:
        hf_export.write_hf(config, read, out, dtype=dtype, max_length=max_length, progress=progress)
    print(f"{out}: {_told(config)}, {dtype}")


def _progress(title: str, config: "ModelConfig") -> "Progress":
    from lwm.sharding import parameter_table
    from lwm.telemetry import Progress

    layered = sum(path.startswith("layers/") for path in parameter_table(config))
    num_tensors = layered * config.num_layers + len(parameter_table(config)) - layered
    return Progress(title, num_tensors, unit="tensors")


def _shape(source: Path, config: str | None) -> "tuple[Path | ModelConfig, RunConfig | None]":
    if config is None:
        for name in _NEARBY:
            if (source.parent / name).is_file():
                return source.parent / name, None
        raise ValueError(
            f"there is no {' or '.join(_NEARBY)} beside {source}; give --config: a JSON with vocab_size, hidden_size, "
            "intermediate_size, num_hidden_layers, num_attention_heads, rms_norm_eps and theta, or the name of a run's "
            "configuration such as lwm_text_1m"
        )
    if Path(config).suffix == ".json":
        return Path(config), None
    from lwm.config import load_config

    run = load_config(config)
    return run.model, run


def _told(config: "ModelConfig") -> str:
    import math

    from lwm.sharding import parameter_table
    from lwm.telemetry import format_count

    count = sum(math.prod(entry.shape) for entry in parameter_table(config).values())
    vision = f" and {config.vision_vocab_size} vision" if config.vision_vocab_size else ""
    return f"{format_count(count)} parameters, {config.text_vocab_size} text{vision} ids"
