"""Every command's arguments and help, in the order in which people use them. No logic, and nothing heavy imported.

Exit codes: 0 done; 2 something in the input or on the machine is wrong, said in one line; 130 and 143 interrupted, by
Ctrl-C and by SIGTERM. `why` and `ps` have their own (docs/why.md) and read their own words.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from eyas.interrupt import ANSWERS, GOES_ON, RESUME, interruptible
from eyas.record.console import say

ORDER = (
    "prepare", "plan", "capture", "store", "vocab", "train", "eval", "export", "check", "import", "bench", "why", "ps",
    "demo",
)  # fmt: skip


class InOrder(TyperGroup):
    """The commands in the order in which people use them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names."""
        return sorted(super().list_commands(ctx), key=ORDER.index)


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
CodecOption = Annotated[str, typer.Option(help="bf16, or 8-bit states: fp8, int8")]
LastOption = Annotated[
    str, typer.Option(help="Rows of the last state: all, trained (of trained tokens alone), or logits:64 in its place")
]


def written(path: Path | None) -> Path | None:
    """What a command will write to: EyasError for a URL, before anything is read or made. Every such option has it."""
    from eyas.store.remote import check_local

    if path is not None:
        check_local(path)
    return path


StageOption = Annotated[
    Path | None,
    typer.Option(
        callback=written, help="Where data in an object store is kept [EYAS_STAGE_DIR, or ~/.cache/eyas/staged]"
    ),
]
DtypeOption = Annotated[str, typer.Option(help="auto (bf16 where the hardware computes it), bf16, fp32")]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code that the verifier's folder brings")
]


def stage_into(folder: Path | None) -> None:
    """Keep the data of URLs below this folder, in this process."""
    if folder is not None:
        os.environ["EYAS_STAGE_DIR"] = str(folder)


def layer_list(text: str | None) -> Any:
    """2,30,58 as three numbers; EyasError for anything else."""
    from eyas.errors import EyasError

    if text is None:
        return None
    try:
        return tuple(int(k) for k in text.split(","))
    except ValueError:
        raise EyasError(f"--layers {text}: name three numbers, as 2,30,58") from None


def json_object(option: str, text: str) -> dict[str, Any]:
    """The JSON object that an option holds; EyasError where it is none."""
    import json

    from eyas.errors import EyasError

    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        raise EyasError(f'{option} {text}: give a JSON object, as {{"tensor_parallel_size": 8}}') from None


@app.command()
def prepare(
    verifier_path: VerifierPath,
    data: Annotated[list[Path], typer.Option(help="JSONL, JSON or Parquet files, or folders of them; may be repeated")],
    output_dir: Annotated[Path, typer.Option(callback=written, help="Where prepared.parquet and prepare.json go")],
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
    kept = (ANSWERS, output_dir / "conversations.jsonl") if regenerate else ()
    with interruptible(*kept):
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
    output_dir: Annotated[Path, typer.Option(callback=written, help="The store")],
    layers: Annotated[
        str | None, typer.Option(help="HF indices of the three states, as 2,30,58; default 2, n//2, n-3")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one forward pass (local)")] = 4096,
    engine: Annotated[str, typer.Option(help="local (transformers, in this process) or vllm")] = "local",
    regenerate: Annotated[
        bool, typer.Option("--regenerate", help="vllm: answer anew, and keep the states of the same pass")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest new answer")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="Of new answers; 0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Of new answers")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of new answers")] = 0,
    in_flight: Annotated[int, typer.Option(min=1, help="vllm: sequences in the engine at a time")] = 64,
    engine_args: Annotated[
        str, typer.Option(help='vllm: more of its engine\'s arguments, as {"tensor_parallel_size": 8}')
    ] = "{}",
    url: Annotated[
        str | None, typer.Option(help="vllm: a server with eyas' connector; without one, how to start it is said")
    ] = None,
    codec: CodecOption = "bf16",
    last: LastOption = "all",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
) -> None:
    """Run the verifier over prepared samples and keep its hidden states in a store. Started again, it goes on."""
    from eyas.errors import EyasError
    from eyas.record.record import Record

    recorder = Record(output_dir / "record", "eyas capture", unit="sample")
    with interruptible(GOES_ON, output_dir), recorder as record:
        from eyas.capture import local, vllm
        from eyas.verifier import Verifier

        ready = "capture: the store is {0} · next: eyas vocab --data {0}, then eyas train --data-dir {0}"
        chosen = layer_list(layers)
        verifier = Verifier(verifier_path, trust_remote_code=trust_remote_code)
        if engine == "vllm":
            if codec != "bf16" or last != "all":
                raise EyasError("--codec and --last need --engine local: capture, then eyas store convert")
            more = json_object("--engine-args", engine_args)
            if trust_remote_code:
                more["trust_remote_code"] = True
            answers = vllm.Answers(max_new_tokens, temperature, top_p, seed) if regenerate else None
            vllm.capture(
                verifier,
                prepared,
                output_dir,
                layers=chosen,
                dtype=dtype,
                answers=answers,
                in_flight=in_flight,
                engine_args=more,
                url=url,
                say=record.line,
                record=record,
            )
            record.line(ready.format(output_dir))
            return
        if url:
            raise EyasError("--url needs --engine vllm")
        if engine != "local":
            raise EyasError(f"--engine {engine}: local or vllm")
        if regenerate:
            raise EyasError(
                "--regenerate needs --engine vllm; without it: eyas prepare --regenerate, then eyas capture"
            )
        local.capture(
            verifier,
            prepared,
            output_dir,
            layers=chosen,
            batch_tokens=batch_tokens,
            codec=codec,
            last=last,
            dtype=dtype,
            device=device,
            say=record.line,
            record=record,
        )
        record.line(ready.format(output_dir))


@app.command()
def vocab(
    verifier_path: VerifierPath,
    data: Annotated[Path, typer.Option(help="Prepared samples, a store, or a folder of data_*.pt files")],
    output_dir: Annotated[Path, typer.Option(callback=written, help="Where d2t.npy, t2d.npy and vocab.json go")],
    size: Annotated[
        int, typer.Option(min=1, help="Tokens in the draft vocabulary; few data: 4096 (the coverage is told)")
    ] = 32_000,
    stage_dir: StageOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Choose the draft vocabulary: the tokens that are trained on most often."""
    stage_into(stage_dir)
    with interruptible():
        from eyas.verifier import Verifier
        from eyas.vocab import build

        build(data, Verifier(verifier_path, trust_remote_code=trust_remote_code), size, output_dir, say)


@app.command()
def train(
    verifier_path: Annotated[str | None, typer.Option(help="The verifier: a folder, or a hub id")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="A store, or a folder of data_*.pt files, here or in s3://...")
    ] = None,
    stage_dir: StageOption = None,
    vocab_mapping_dir: Annotated[
        Path | None, typer.Option(help="Folder with d2t and t2d; without it the full vocabulary")
    ] = None,
    output_dir: Annotated[Path | None, typer.Option(callback=written, help="The run directory")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML with these settings; flags go over it")] = None,
    resume: Annotated[bool | None, typer.Option("--resume", help="Go on with the run in output-dir, if any")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data [10]")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate [1e-3]")] = None,
    optimiser: Annotated[
        str | None, typer.Option(help="adamw, adamw8bit, or muon for the layer's matrices [adamw]")
    ] = None,
    scheduler: Annotated[str | None, typer.Option(help="cosine, linear or constant [cosine]")] = None,
    warmup_ratio: Annotated[float | None, typer.Option(help="Share of the steps that warm up [0.05]")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="[0]")] = None,
    max_grad_norm: Annotated[float | None, typer.Option(help="Gradients are clipped to this norm [1]")] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Longer samples are cut to this many tokens [2048]")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens of one packed batch [max-seq-len]")] = None,
    grad_accumulation: Annotated[int | None, typer.Option(help="Packs a rank takes to one step [1]")] = None,
    ema: Annotated[float | None, typer.Option(help="Decay of an average of the weights to export, as 0.999")] = None,
    ttt_steps: Annotated[int | None, typer.Option(help="Training-time test steps [3]")] = None,
    ttt_warmup_epochs: Annotated[int | None, typer.Option(help="First epochs that train step 0 alone [0]")] = None,
    loss: Annotated[str | None, typer.Option(help="kl, reverse_kl, tv, lk, or a sum: kl+0.5*tv [kl]")] = None,
    outside: Annotated[
        str | None, typer.Option(help="keep or drop positions whose first choice no draft can be [keep]")
    ] = None,
    step_weight_decay: Annotated[float | None, typer.Option(help="TTT step k counts decay**k [1]")] = None,
    state_weight: Annotated[float | None, typer.Option(help="Weight of the distance to the last state [0]")] = None,
    noise_std: Annotated[
        float | None, typer.Option(help="Uniform noise on the states, scaled by 512 / rows [0]")
    ] = None,
    val_ratio: Annotated[float | None, typer.Option(help="Share of samples kept for validation [0.1]")] = None,
    num_workers: Annotated[int | None, typer.Option(help="Threads that read [4]")] = None,
    cache_gb: Annotated[
        str | None, typer.Option(help="Page cache to count on, GB: a fixed part of the data stays in it [auto]")
    ] = None,
    recompute: Annotated[
        bool | None, typer.Option("--recompute", help="Make the MLP's numbers again when going back: less memory")
    ] = None,
    parallel: Annotated[str | None, typer.Option(help="Under torchrun: ddp, or fsdp [ddp]")] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between saved states [epoch's end alone]")] = None,
    keep: Annotated[int | None, typer.Option(help="States and checkpoints kept, beside the best [2]")] = None,
    max_minutes: Annotated[float | None, typer.Option(help="Stop after this time, validated and saved")] = None,
    patience: Annotated[int | None, typer.Option(help="Stop after so many validations without gain")] = None,
    attention: Annotated[
        str | None, typer.Option(help="Drafter's kind: llama, or mla for DeepSeek's latent attention [llama]")
    ] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="Drafter's MLP [the verifier's]")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Drafter's heads [the verifier's]")] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="Drafter's key/value heads [the verifier's]")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Drafter's head size [the verifier's]")] = None,
    q_lora_rank: Annotated[int | None, typer.Option(help="mla: latent of queries [the verifier's]")] = None,
    kv_lora_rank: Annotated[int | None, typer.Option(help="mla: latent of keys, values [the verifier's]")] = None,
    qk_nope_head_dim: Annotated[int | None, typer.Option(help="mla: head without RoPE [the verifier's]")] = None,
    qk_rope_head_dim: Annotated[int | None, typer.Option(help="mla: part with RoPE [the verifier's]")] = None,
    v_head_dim: Annotated[int | None, typer.Option(help="mla: head size of values [the verifier's]")] = None,
    init: Annotated[str | None, typer.Option(help="Start from the verifier's weights, or random [verifier]")] = None,
    init_from: Annotated[Path | None, typer.Option(help="Start from this checkpoint, with its vocabulary")] = None,
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
    """Train a drafter with training-time test, from the verifier's weights on (--init, --init-from say otherwise)."""
    flags = {name: value for name, value in locals().items() if name != "config"}
    with interruptible(RESUME, output_dir or "the run directory", signals=[signal.SIGINT]):
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
    output: Annotated[
        Path | None, typer.Option(callback=written, help="Where the JSON goes; default eval.json in the run")
    ] = None,
    dtype: DtypeOption = "auto",
    stream_dtype: Annotated[str | None, typer.Option(help="Of the one-stream speed alone [--dtype]")] = None,
    device: DeviceOption = "auto",
    stage_dir: StageOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Measure a drafter: accept length (tokens per verification) on held-out states and by lossless decoding."""
    from eyas.record.record import Record

    stage_into(stage_dir)
    recorder = Record((output.parent if output else checkpoint) / "eval", "eyas eval", unit="prompt")
    with interruptible(), recorder as record:
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
def bench(
    checkpoint: Annotated[Path, typer.Argument(help="A run directory, or a folder that the engine loads")],
    verifier_path: Annotated[str | None, typer.Option(help="Default: the run's")] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(help="Conversations to ask; default: those the run kept for validation")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts, at most")] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens for each")] = 64,
    draft_tokens: Annotated[int, typer.Option(min=1, max=16, help="Drafts a round")] = 3,
    sweep: Annotated[str | None, typer.Option(help="Several of them, as 1..7 or 1,3,5; names the best")] = None,
    streams: Annotated[int, typer.Option(min=1, help="Sequences at a time")] = 16,
    singles: Annotated[int, typer.Option(min=1, help="Prompts of the one-stream run")] = 8,
    temperature: Annotated[float, typer.Option(min=0, help="Of the sampled run; 0 leaves it out")] = 1.0,
    dtype: DtypeOption = "auto",
    url: Annotated[str | None, typer.Option(help="A server with the drafter, instead of starting vLLM")] = None,
    url_alone: Annotated[str | None, typer.Option(help="A server without it")] = None,
    engine_python: Annotated[str | None, typer.Option(help="A Python that has vLLM; default: this one")] = None,
    engine_args: Annotated[str, typer.Option(help='More of vLLM\'s arguments, as {"tensor_parallel_size": 8}')] = "{}",
    speculative_args: Annotated[
        str, typer.Option(help='More of vLLM\'s speculative_config, as {"draft_sample_method": "probabilistic"}')
    ] = "{}",
    explain: Annotated[
        bool, typer.Option("--explain", help="Show that outputs differ at near-ties only (loads the verifier twice)")
    ] = False,
    agree: Annotated[
        bool, typer.Option("--agree", help="Hold the engine's accept lengths against eyas's own: within 3 %")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(callback=written, help="Where the JSON goes; default bench.json in the run")
    ] = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Measure a drafter in the engine that serves it: accept length, speed with and without, equal outputs."""
    with interruptible():
        from eyas.evaluate.engines import BenchOptions, drafts_of
        from eyas.evaluate.engines import bench as run

        options = BenchOptions(
            verifier_path=verifier_path,
            prompts=prompts or [],
            count=count,
            max_new_tokens=max_new_tokens,
            draft_tokens=drafts_of(sweep) if sweep else (draft_tokens,),
            streams=streams,
            singles=singles,
            temperature=temperature,
            dtype=dtype,
            url=url,
            url_alone=url_alone,
            engine_python=engine_python,
            engine_args=json_object("--engine-args", engine_args),
            speculative=json_object("--speculative-args", speculative_args),
            explain=explain,
            agree=agree,
            trust_remote_code=trust_remote_code,
        )
        run(checkpoint, options, output, say)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A run directory (its best checkpoint) or a checkpoint folder")],
    output_dir: Annotated[Path, typer.Option(callback=written, help="Where the engines' checkpoint goes")],
    form: Annotated[
        str, typer.Option("--format", help="eagle3 (SGLang and vLLM), or speculators (vLLM and speculators' tools)")
    ] = "eagle3",
    verifier_path: Annotated[str | None, typer.Option(help="Default: the run's")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: bf16 or fp32")] = "bf16",
    with_embedding: Annotated[
        bool, typer.Option("--with-embedding", help="Also store the verifier's embedding")
    ] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Write the checkpoint that SGLang and vLLM load, a model card, and the commands to serve it."""
    with interruptible():
        from eyas.export import export as run

        run(
            checkpoint,
            output_dir,
            form=form,
            verifier_path=verifier_path,
            dtype=dtype,
            with_embedding=with_embedding,
            trust_remote_code=trust_remote_code,
            say=say,
        )


store_app = typer.Typer(name="store", help="Look at stores of states, and put them together.", no_args_is_help=True)
app.add_typer(store_app)
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of words")]


@store_app.command(name="info")
def store_info(
    data: Annotated[Path, typer.Argument(help="A store, or a folder of data_*.pt files")],
    stage_dir: StageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sizes, lengths and trained share, from the index alone."""
    import json

    with interruptible():
        from eyas.store.info import describe, info

        stage_into(stage_dir)
        told = info(data, None if as_json else say)
    say(json.dumps(told, indent=1, ensure_ascii=False) if as_json else describe(told))


@store_app.command(name="merge")
def store_merge(
    folders: Annotated[list[Path], typer.Argument(help="The stores to merge; they stay as they are")],
    output_dir: Annotated[Path, typer.Option(callback=written, help="The merged store; what is there already stays")],
    as_json: JsonOption = False,
) -> None:
    """Many stores of one verifier into one. On one file system no state is copied. Started again, it goes on. Exit
    code 1: some left out."""
    import json

    from eyas.store.info import size

    with interruptible(GOES_ON, output_dir):
        from eyas.store.merge import merge

        done = merge(folders, output_dir, (lambda _: None) if as_json else say)
    if as_json:
        say(json.dumps(done.to_dict(), indent=1, ensure_ascii=False))
        raise typer.Exit(1 if done.damaged else 0)
    for name, why in done.damaged[:5]:
        say(f"left out {name}: {why}")
    if len(done.damaged) > 5:
        say(f"left out: {len(done.damaged):,} in all")
    say(
        f"{output_dir}: {done.samples:,} samples, {done.added:,} added · {done.duplicates:,} were there already "
        f"({done.differing:,} of them with other states) · {size(done.linked)} linked, {size(done.copied)} copied"
    )
    raise typer.Exit(1 if done.damaged else 0)


@store_app.command(name="check")
def store_check(
    data: Annotated[Path, typer.Argument(help="A store, or a folder of another tool's files")],
    verifier_path: Annotated[str | None, typer.Option(help="Also ask its head whether it understands them")] = None,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Leave faulty samples out from now on (quarantine.json)")
    ] = False,
    against: Annotated[Path | None, typer.Option(help="What it was converted from: compare with that")] = None,
    num_workers: Annotated[int, typer.Option(min=1, help="Threads that read")] = 4,
    stage_dir: StageOption = None,
    as_json: JsonOption = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Look at every sample: checksums, NaN, zeros, copies, shifted rows. Exit code 1: faults were found."""
    import json

    stage_into(stage_dir)
    with interruptible():
        from eyas.store.check import check
        from eyas.verifier import Verifier

        verifier = None if verifier_path is None else Verifier(verifier_path, trust_remote_code=trust_remote_code)
        quiet = (lambda _line: None) if as_json else say
        report = check(data, verifier, quarantine=quarantine, against=against, threads=num_workers, say=quiet)
    if as_json:
        say(json.dumps(report, indent=1, ensure_ascii=False))
    raise typer.Exit(0 if report["ok"] else 1)


@store_app.command(name="convert")
def store_convert(
    data: Annotated[Path, typer.Argument(help="A store, or a folder of another tool's files")],
    output_dir: Annotated[Path, typer.Argument(callback=written, help="The store that is made of it")],
    verifier_path: Annotated[str | None, typer.Option(help="Whose states they are; a store says it itself")] = None,
    codec: CodecOption = "bf16",
    last: LastOption = "all",
    num_workers: Annotated[int, typer.Option(min=1, help="Threads that read")] = 4,
    stage_dir: StageOption = None,
    as_json: JsonOption = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Make a store of any source, or a store in another codec. Started again, it goes on. Exit code 1: some lost."""
    import json

    stage_into(stage_dir)
    with interruptible(GOES_ON, output_dir):
        from eyas.store.convert import convert
        from eyas.verifier import Verifier

        verifier = None if verifier_path is None else Verifier(verifier_path, trust_remote_code=trust_remote_code)
        quiet = (lambda _line: None) if as_json else say
        report = convert(data, output_dir, verifier, codec=codec, last=last, threads=num_workers, say=quiet)
    if as_json:
        say(json.dumps(report, indent=1, ensure_ascii=False))
    raise typer.Exit(1 if report["skipped"] else 0)


@app.command()
def plan(
    verifier_path: VerifierPath,
    data_dir: Annotated[Path | None, typer.Option(help="A store, or a folder of another tool's files")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Instead of data: how many tokens there will be")] = None,
    trained_share: Annotated[float, typer.Option(min=0, max=1, help="Of those tokens")] = 0.5,
    gpu: Annotated[str | None, typer.Option(help="The GPU that will train, as H100; default: real steps here")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="How many of them, fed by one disk")] = 1,
    utilisation: Annotated[float, typer.Option(min=0.01, max=1, help="Of the GPU's published peak")] = 0.5,
    disk_gb_s: Annotated[float | None, typer.Option(min=0.001, help="What the disk gives; default: measured")] = None,
    ram_gb: Annotated[
        float | None, typer.Option(min=0, help="Memory of the machine that trains; default: this one's")
    ] = None,
    codec: CodecOption = "bf16",
    last: LastOption = "all",
    draft_vocab: Annotated[
        int | None, typer.Option(min=1, help="Tokens in the draft vocabulary, with --gpu [32,000]")
    ] = None,
    vocab_mapping_dir: Annotated[Path | None, typer.Option(help="Or its folder, for real steps")] = None,
    output_dir: Annotated[
        Path | None, typer.Option(callback=written, help="Where a capture would go: is there room?")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    max_seq_len: Annotated[int, typer.Option(min=4, help="Longer samples are cut to this many tokens")] = 2048,
    batch_tokens: Annotated[int | None, typer.Option(min=4, help="Tokens of one packed batch [max-seq-len]")] = None,
    ttt_steps: Annotated[int, typer.Option(min=1, max=16, help="Training-time test steps")] = 3,
    num_workers: Annotated[int, typer.Option(min=0, help="Threads that read")] = 4,
    attention: Annotated[str, typer.Option(help="Drafter's kind: llama, or mla with the verifier's sizes")] = "llama",
    intermediate_size: Annotated[int | None, typer.Option(help="Drafter's MLP [the verifier's]")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Drafter's heads [the verifier's]")] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="Drafter's key/value heads [the verifier's]")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Drafter's head size [the verifier's]")] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    stage_dir: StageOption = None,
    as_json: JsonOption = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Before a run: bytes, disk, step time, memory, hours, what binds, and the cheapest remedy."""
    import json

    from eyas.config import load_config
    from eyas.errors import EyasError
    from eyas.plan.report import lines
    from eyas.plan.run import Asked, make_plan

    stage_into(stage_dir)
    if (data_dir is None) == (tokens is None):
        raise EyasError("name either the data (--data-dir) or how many tokens there will be (--tokens)")
    names = (
        "verifier_path", "vocab_mapping_dir", "epochs", "max_seq_len", "batch_tokens", "ttt_steps", "num_workers",
        "attention", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "dtype", "device",
        "trust_remote_code",
    )  # fmt: skip
    given = locals()
    settings = {name: given[name] for name in names}
    config = load_config({**settings, "data_dir": data_dir or Path(), "output_dir": Path()})
    asked = Asked(
        config, tokens, trained_share, gpu, gpus, utilisation, disk_gb_s, ram_gb, codec, last, draft_vocab, output_dir
    )
    with interruptible():
        report = make_plan(asked, (lambda _line: None) if as_json else say)
    for line in [json.dumps(report, indent=1, ensure_ascii=False)] if as_json else lines(report):
        say(line)


@app.command(name="import")
def import_(
    folder: Annotated[Path, typer.Argument(help="Somebody's EAGLE-3 drafter: a folder with config.json and weights")],
    verifier_path: VerifierPath,
    output_dir: Annotated[Path, typer.Option(callback=written, help="Where the checkpoint folder goes")],
    layers: Annotated[
        str | None, typer.Option(help="HF indices it was trained on, where its config.json does not settle them")
    ] = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Somebody's drafter -> a checkpoint folder of ours, its vocabulary kept: to evaluate it or to train it further."""
    with interruptible():
        from eyas.importing import import_drafter as run

        chosen = layer_list(layers)
        run(folder, verifier_path, output_dir, layers=chosen, trust_remote_code=trust_remote_code, say=say)


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="An EAGLE-3 drafter's folder, whoever wrote it, or a run directory")],
    verifier_path: Annotated[
        str | None, typer.Option(help="Its verifier; more is checked and repaired with it")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="sglang or vllm: judge for this one only")] = None,
    layers: Annotated[str | None, typer.Option(help="HF indices it was trained on, as 2,30,58, if you know")] = None,
    fix: Annotated[Path | None, typer.Option(callback=written, help="A new folder for a repaired copy")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The answer as JSON")] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """What engines will do with a drafter. Exit code 0: fine, 1: works with remarks, 2: broken."""
    with interruptible():
        from eyas.check.run import check as run

        chosen = layer_list(layers)
        code = run(
            folder,
            verifier_path=verifier_path,
            engine=engine,
            layers=chosen,
            fix=fix,
            as_json=as_json,
            trust_remote_code=trust_remote_code,
            say=say,
        )
    sys.exit(code)


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
    run_dir: Annotated[Path, typer.Option(callback=written, help="Where everything goes")] = Path("runs/demo"),
    cache_dir: Annotated[Path, typer.Option(callback=written, help="Where the dequantised verifier is kept")] = Path(
        ".cache"
    ),
    conversations: Annotated[Path, typer.Option(help="JSONL of conversations")] = Path("demo/conversations.jsonl"),
) -> None:
    """The whole path on a small real model: prepare, capture, vocab, train, eval, export; then one table."""
    with interruptible("the captured states in {} are kept: run the same command again", run_dir / "store"):
        from eyas.demo import demo as run

        run(run_dir, cache_dir, conversations, say)


def version(show: bool) -> None:
    """Print the version and stop."""
    if show:
        from eyas import __version__

        typer.echo(f"eyas {__version__}")
        raise typer.Exit


@app.callback(cls=InOrder)
def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Show the version and stop")
    ] = False,
) -> None:
    """Make EAGLE-3 drafters for large language models, and see what a training run is doing."""


def fail(message: str) -> None:
    """Say what is wrong in one line, and stop."""
    rank = os.environ.get("RANK", "0")  # set by torchrun
    print("eyas: " + (f"rank {rank}: " if rank != "0" else "") + " ".join(message.split("\n")), file=sys.stderr)
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

    # Read by torch when it is imported: on a CPU its large buffers then lie in huge pages, a step takes 4 % less.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
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
