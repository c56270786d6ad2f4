"""Every command's arguments and help, in the order in which people use them. No logic, and nothing heavy imported.

Exit codes: 0 done; 2 something in the input or on the machine is wrong, said in one line; 130 interrupted. `why` and
`ps` have their own (docs/why.md) and read their own words.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from eyas.record.console import say

app = typer.Typer(
    name="eyas",
    help="Make EAGLE-3 drafters for large language models, and see what a training run is doing.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

VerifierPath = Annotated[
    str, typer.Option("--verifier-path", help="The verifier: a folder with config.json and safetensors, or a hub id")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")]
DtypeOption = Annotated[str, typer.Option(help="auto (bf16 where the hardware computes it), bf16, fp32")]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code that the verifier's folder brings")
]


@app.command()
def prepare(
    verifier_path: VerifierPath,
    data: Annotated[list[Path], typer.Option(help="JSONL, JSON or Parquet files, or folders of them; may be repeated")],
    output_dir: Annotated[Path, typer.Option(help="Where prepared.parquet and prepare.json go")],
    max_seq_len: Annotated[int, typer.Option(min=4, help="Longer samples are cut to this many tokens")] = 2048,
    show: Annotated[int, typer.Option(min=0, help="Samples to print with the trained part marked")] = 3,
    regenerate: Annotated[bool, typer.Option("--regenerate", help="Replace the answers by the verifier's own")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest regenerated answer")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="Of regenerated answers; 0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Of regenerated answers")] = 1.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Conversations regenerated together")] = 64,
    seed: Annotated[int, typer.Option(help="Of regenerated answers")] = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
) -> None:
    """Conversations -> token ids and loss mask, through the verifier's chat template."""
    from eyas.device import pick_device
    from eyas.prepare import prepare as run
    from eyas.regenerate import Regenerate
    from eyas.verifier import Verifier

    again = None
    if regenerate:
        again = Regenerate(max_new_tokens, temperature, top_p, batch_size, seed, dtype, str(pick_device(device)))
    verifier = Verifier(verifier_path, trust_remote_code=trust_remote_code)
    run(verifier, data, output_dir, max_seq_len=max_seq_len, regenerate=again, show=show, say=say)


@app.command()
def capture(
    verifier_path: VerifierPath,
    prepared: Annotated[Path, typer.Option(help="A folder made by eyas prepare")],
    output_dir: Annotated[Path, typer.Option(help="The store")],
    layers: Annotated[
        str | None, typer.Option(help="HF indices of the three states, as 2,30,58; default 2, n//2, n-3")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one forward pass")] = 4096,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
) -> None:
    """Run the verifier over prepared samples and keep its hidden states in a store. Started again, it goes on."""
    from eyas.errors import EyasError
    from eyas.record.record import Record

    chosen: Any = None
    if layers is not None:
        try:
            chosen = tuple(int(k) for k in layers.split(","))
        except ValueError:
            raise EyasError(f"--layers {layers}: name three numbers, as 2,30,58") from None
    with Record(output_dir / "record", "eyas capture", unit="sample") as record:
        from eyas.capture.local import capture as run
        from eyas.verifier import Verifier

        run(
            Verifier(verifier_path, trust_remote_code=trust_remote_code), prepared, output_dir, layers=chosen,
            batch_tokens=batch_tokens, dtype=dtype, device=device, say=record.line, record=record,
        )  # fmt: skip


@app.command()
def vocab(
    verifier_path: VerifierPath,
    data: Annotated[Path, typer.Option(help="Prepared samples, a store, or a folder of data_*.pt files")],
    output_dir: Annotated[Path, typer.Option(help="Where d2t.npy, t2d.npy and vocab.json go")],
    size: Annotated[int, typer.Option(min=1, help="Tokens in the draft vocabulary")] = 32_000,
    trust_remote_code: TrustOption = False,
) -> None:
    """Choose the draft vocabulary: the tokens that are trained on most often."""
    from eyas.verifier import Verifier
    from eyas.vocab import build

    build(data, Verifier(verifier_path, trust_remote_code=trust_remote_code), size, output_dir, say)


@app.command()
def train(
    verifier_path: Annotated[str | None, typer.Option(help="The verifier: a folder, or a hub id")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="A store, or a folder of data_*.pt files")] = None,
    vocab_mapping_dir: Annotated[
        Path | None, typer.Option(help="Folder with d2t and t2d; without it the full vocabulary")
    ] = None,
    output_dir: Annotated[Path | None, typer.Option(help="The run directory")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML with these settings; flags go over it")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data [10]")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate [1e-3]")] = None,
    scheduler: Annotated[str | None, typer.Option(help="cosine, linear or constant [cosine]")] = None,
    warmup_ratio: Annotated[float | None, typer.Option(help="Share of the steps that warm up [0.05]")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="[0]")] = None,
    max_grad_norm: Annotated[float | None, typer.Option(help="Gradients are clipped to this norm [1]")] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Longer samples are cut to this many tokens [2048]")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens of one packed batch [max-seq-len]")] = None,
    ttt_steps: Annotated[int | None, typer.Option(help="Training-time test steps [3]")] = None,
    ttt_warmup_epochs: Annotated[int | None, typer.Option(help="First epochs that train step 0 alone [0]")] = None,
    loss: Annotated[str | None, typer.Option(help="kl, reverse_kl, tv or lk [kl]")] = None,
    step_weight_decay: Annotated[float | None, typer.Option(help="TTT step k counts decay**k [1]")] = None,
    state_weight: Annotated[float | None, typer.Option(help="Weight of the distance to the last state [0]")] = None,
    noise_std: Annotated[
        float | None, typer.Option(help="Uniform noise on the states, scaled by 512 / rows [0]")
    ] = None,
    val_ratio: Annotated[float | None, typer.Option(help="Share of samples kept for validation [0.1]")] = None,
    num_workers: Annotated[int | None, typer.Option(help="Threads that read [4]")] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="Drafter's MLP [the verifier's]")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Drafter's heads [the verifier's]")] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="Drafter's key/value heads [the verifier's]")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Drafter's head size [the verifier's]")] = None,
    init: Annotated[str | None, typer.Option(help="Start from the verifier's weights, or random [verifier]")] = None,
    freeze_head: Annotated[
        bool | None, typer.Option("--freeze-head/--train-head", help="Leave lm_head as it starts [train]")
    ] = None,
    dropout: Annotated[float | None, typer.Option(help="On attention input and MLP, train only [0]")] = None,
    on_nan: Annotated[
        str | None, typer.Option(help="A step whose loss or gradient is no number: stop, or skip it [stop]")
    ] = None,
    tensorboard: Annotated[
        bool | None, typer.Option("--tensorboard", help="Write TensorBoard files into the run directory")
    ] = None,
    wandb: Annotated[str | None, typer.Option(help="Weights & Biases project")] = None,
    trackio: Annotated[str | None, typer.Option(help="trackio project")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Answer Prometheus on this port")] = None,
    notify: Annotated[
        list[str] | None, typer.Option(help="Tell a stall, a crash and the end there (apprise URL); may be repeated")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="[0]")] = None,
    dtype: Annotated[str | None, typer.Option(help="Compute dtype: auto, bf16, fp32 [auto]")] = None,
    device: Annotated[str | None, typer.Option(help="[auto]")] = None,
    trust_remote_code: Annotated[
        bool | None, typer.Option("--trust-remote-code", help="Run the code that the verifier's folder brings")
    ] = None,
) -> None:
    """Train a drafter from scratch with training-time test."""
    flags = {name: value for name, value in locals().items() if name != "config"}
    from eyas.config import load_config
    from eyas.train.command import train as run

    run(load_config(flags, config))


@app.command(name="eval")
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A run directory (its best checkpoint) or a checkpoint folder")],
    verifier_path: Annotated[str | None, typer.Option(help="Default: the run's")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Default: the run's")] = None,
    val_ratio: Annotated[float | None, typer.Option(help="Default: the run's")] = None,
    draft_tokens: Annotated[int, typer.Option(min=1, max=16, help="Drafts a round")] = 3,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts to decode, at most")] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded for each")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together")] = 16,
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes; default eval.json in the run")] = None,
    dtype: DtypeOption = "auto",
    stream_dtype: Annotated[str | None, typer.Option(help="Of the one-stream speed alone [--dtype]")] = None,
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
) -> None:
    """Measure a drafter: accept length on held-out states, and by real, lossless decoding of held-out prompts."""
    from eyas.record.record import Record

    with Record((output.parent if output else checkpoint) / "eval", "eyas eval", unit="prompt") as record:
        from eyas.evaluate.run import EvalOptions, evaluate_checkpoint

        options = EvalOptions(
            verifier_path=verifier_path,
            data_dir=data_dir,
            val_ratio=val_ratio,
            draft_tokens=draft_tokens,
            prompts=prompts,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            dtype=dtype,
            stream_dtype=stream_dtype,
            device=device,
            trust_remote_code=trust_remote_code,
        )
        evaluate_checkpoint(checkpoint, options, output, record.line, record)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A run directory (its best checkpoint) or a checkpoint folder")],
    output_dir: Annotated[Path, typer.Option(help="Where the engines' checkpoint goes")],
    verifier_path: Annotated[str | None, typer.Option(help="Default: the run's")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: bf16 or fp32")] = "bf16",
    with_embedding: Annotated[
        bool, typer.Option("--with-embedding", help="Also store the verifier's embedding")
    ] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Write the checkpoint that SGLang and vLLM load, a model card, and the commands to serve it."""
    from eyas.export import export as run

    run(
        checkpoint,
        output_dir,
        verifier_path=verifier_path,
        dtype=dtype,
        with_embedding=with_embedding,
        trust_remote_code=trust_remote_code,
        say=say,
    )


OWN_WORDS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=OWN_WORDS)
def why(context: typer.Context) -> None:
    """What is this silent process doing? PID, name, host:PID, @gpu0, log file, run directory."""
    from eyas.why.__main__ import main as run

    sys.exit(run(context.args))


@app.command(context_settings=OWN_WORDS)
def ps(context: typer.Context) -> None:
    """Training processes here or on another host, the most suspicious first."""
    from eyas.why.__main__ import main as run

    sys.exit(run(["ps", *context.args]))


@app.command()
def demo(
    run_dir: Annotated[Path, typer.Option(help="Where everything goes")] = Path("runs/demo"),
    cache_dir: Annotated[Path, typer.Option(help="Where the dequantised verifier is kept")] = Path(".cache"),
    conversations: Annotated[Path, typer.Option(help="JSONL of conversations")] = Path("demo/conversations.jsonl"),
) -> None:
    """The whole path on a small real model: prepare, capture, vocab, train, eval, export; then one table."""
    from eyas.demo import demo as run

    run(run_dir, cache_dir, conversations, say)


def version(show: bool) -> None:
    """Print the version and stop."""
    if show:
        from eyas import __version__

        typer.echo(f"eyas {__version__}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Show the version and stop")
    ] = False,
) -> None:
    """Make EAGLE-3 drafters for large language models, and see what a training run is doing."""


def fail(message: str) -> None:
    """Say what is wrong in one line, and stop."""
    print("eyas: " + " ".join(message.split("\n")), file=sys.stderr)
    sys.exit(2)


def fault(e: Exception) -> NoReturn:
    """A fault of the program itself: one line if a recorder has written its traceback to a file, else the traceback."""
    notes = [n.removeprefix("eyas: ") for n in getattr(e, "__notes__", []) if n.startswith("eyas: ")]
    if not notes:
        raise e
    print(f"eyas: {type(e).__name__}: {' '.join(str(e).split())[:300]} · {notes[0]}", file=sys.stderr)
    sys.exit(1)


def main() -> None:
    """Entry point: what the user did wrong is one line on stderr and exit code 2, never a traceback."""
    from eyas.errors import EyasError

    try:
        app()
    except EyasError as e:
        fail(str(e))
    except OSError as e:  # what no caller foresaw: the disk, a permission, a network mount that went away
        fail(f"{e.filename}: {e.strerror}" if e.filename and e.strerror else str(e))
    except (MemoryError, RuntimeError) as e:
        if not isinstance(e, MemoryError) and "out of memory" not in str(e) and "can't allocate memory" not in str(e):
            fault(e)
        fail("out of memory: take fewer tokens at a time (--batch-tokens, --max-seq-len, --batch-size)")
    except KeyboardInterrupt:
        print("eyas: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as e:
        fault(e)


if __name__ == "__main__":
    main()
