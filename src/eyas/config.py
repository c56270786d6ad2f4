"""The settings of a training run: one typed object, flag over file over default, saved with the run as `run.yaml`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from eyas.errors import EyasError
from eyas.store.remote import check_local, url_of

Share = Annotated[float, Field(ge=0, lt=1)]
LOSSES = ("kl", "reverse_kl", "tv", "lk")  # defined in drafter/loss.py


def parse_loss(text: str) -> dict[str, float]:
    """`kl`, or a weighted sum such as `kl+0.5*tv`, as a weight for each loss. Raises ValueError for anything else."""
    terms: dict[str, float] = {}
    for term in text.split("+"):
        weight, _, kind = (part.strip() for part in term.rpartition("*"))
        if kind not in LOSSES or kind in terms:
            raise ValueError(f"not {', '.join(LOSSES)} or a sum of them such as kl+0.5*tv")
        try:
            terms[kind] = float(weight or 1)
        except ValueError:
            raise ValueError(f"{weight!r} before {kind} is no number") from None
        if not 0 < terms[kind] < math.inf:
            raise ValueError(f"the weight of {kind} must be greater than 0")
    return terms


class TrainConfig(BaseModel):
    """Everything `eyas train` can be told. The command line's flags are these names with dashes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    verifier_path: str = Field(description="The verifier: a folder with config.json and safetensors, or a hub id")
    data_dir: Path = Field(description="A store made by `eyas capture`, or a folder of data_*.pt files")
    stage_dir: Path | None = Field(
        None, description="Where data in an object store (s3://...) is kept; default ~/.cache/eyas/staged"
    )
    vocab_mapping_dir: Path | None = Field(None, description="Folder with d2t and t2d; without it the full vocabulary")
    output_dir: Path = Field(description="The run directory")

    resume: bool = Field(False, description="Go on with the run in output_dir, or start it where there is none")

    epochs: int = Field(10, ge=1)
    lr: float = Field(1e-3, gt=0, description="Peak learning rate")
    optimiser: Literal["adamw", "adamw8bit", "muon"] = Field(
        "adamw", description="muon: of the layer's matrices, AdamW of the rest; adamw8bit: torchao's, moments in 8 bits"
    )
    scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = Field(0.05, ge=0, lt=1, description="Share of all steps that warm the learning rate up")
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Share, Share] = (0.9, 0.95)
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this global norm")

    max_seq_len: int = Field(2048, ge=4, description="Longer samples are cut to this many tokens")
    batch_tokens: int | None = Field(None, ge=4, description="Tokens of one packed batch; default max_seq_len")
    grad_accumulation: int = Field(1, ge=1, description="Packs that each rank takes to one optimiser step")
    ema: float | None = Field(
        None, gt=0, lt=1, description="Decay of a moving average of the weights, which is validated and exported"
    )
    val_ratio: float = Field(0.1, ge=0, lt=1, description="Share of the samples kept for validation")
    num_workers: int = Field(4, ge=0, description="Threads that read; 0 reads in the training loop")
    cache_gb: Literal["auto"] | Annotated[float, Field(ge=0)] = Field(
        "auto", description="Page cache to count on, in GB: a fixed part of the data stays in it, the rest goes past it"
    )

    ttt_steps: int = Field(3, ge=1, le=16, description="Training-time test steps K")
    ttt_warmup_epochs: int = Field(0, ge=0, description="First epochs that train TTT step 0 alone, at 0.4 of the cost")
    loss: str = Field("kl", description="kl, reverse_kl, tv or lk, or a weighted sum such as kl+0.5*tv")
    outside: Literal["keep", "drop"] = Field(
        "keep", description="Positions where the verifier's first choice is outside the draft vocabulary"
    )
    step_weight_decay: float = Field(1.0, gt=0, le=1, description="TTT step k counts decay**k")
    state_weight: float = Field(0.0, ge=0, description="weight of the distance to the verifier's last state")
    noise_std: float = Field(
        0.0, ge=0, description="Uniform noise on the states while training: width, times 512 / rows of the pack"
    )

    recompute: bool = Field(
        False, description="Make the MLP's numbers again in the backward pass: a third less memory for long packs"
    )
    parallel: Literal["ddp", "fsdp"] = Field("ddp", description="How ranks share the drafter")
    save_every: int | None = Field(
        None, ge=1, description="Steps between two saved states; one is saved at each epoch's end"
    )
    keep: int = Field(2, ge=1, description="How many states and checkpoints are kept, beside the best checkpoint")
    max_minutes: float | None = Field(None, gt=0, description="Stop after this time, validated and saved")
    patience: int | None = Field(
        None, ge=1, description="Stop after this many validations in a row without a longer accept length"
    )

    attention: Literal["llama", "mla"] = Field(
        "llama", description="The drafter's kind; mla: DeepSeek's latent attention, as Kimi's own"
    )
    intermediate_size: int | None = Field(None, ge=1, description="Drafter's MLP; default the verifier's")
    num_heads: int | None = Field(None, ge=1, description="Drafter's attention heads; default the verifier's")
    num_kv_heads: int | None = Field(None, ge=1, description="Drafter's key/value heads; default the verifier's")
    head_dim: int | None = Field(None, ge=2, description="Drafter's head size; default the verifier's")
    q_lora_rank: int | None = Field(None, ge=1, description="With mla: width of the queries' latent")
    kv_lora_rank: int | None = Field(None, ge=1, description="With mla: width of the keys' and values' latent")
    qk_nope_head_dim: int | None = Field(None, ge=1, description="With mla: head size of queries and keys without RoPE")
    qk_rope_head_dim: int | None = Field(None, ge=2, description="With mla: head size of the part with RoPE")
    v_head_dim: int | None = Field(None, ge=1, description="With mla: head size of values")
    init: Literal["verifier", "random"] = Field(
        "verifier", description="Start from the verifier's own head, norm and layer where they fit, or at random"
    )

    init_from: Path | None = Field(
        None, description="Start from a checkpoint or a run's best, with its sizes and its own draft vocabulary"
    )
    freeze_head: bool = Field(
        False, description="Leave lm_head as it starts: less to overfit on little data, and cheaper"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="On the attention's input and the MLP's middle, train only")

    on_nan: Literal["stop", "skip"] = Field("stop", description="What a step whose loss or gradient is no number does")
    tensorboard: bool = Field(False, description="Write TensorBoard files into the run directory")
    wandb: str | None = Field(None, description="Weights & Biases project")
    trackio: str | None = Field(None, description="trackio project")
    metrics_port: int | None = Field(None, ge=1, le=65535, description="Answer Prometheus on this port")
    notify: list[str] = Field(
        [], exclude=True, description="Where a stall, a crash and the end are told (apprise URLs)"
    )

    seed: int = Field(0, ge=0, lt=2**64)
    dtype: Literal["auto", "bf16", "fp32"] = Field("auto", description="Compute dtype; masters are always fp32")
    device: str = "auto"
    trust_remote_code: bool = Field(False, description="Run the code that the verifier's folder brings")

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, value: str) -> str:
        parse_loss(value)
        return value

    @field_validator("output_dir", "stage_dir")
    @classmethod
    def _no_url(cls, value: Path | None) -> Path | None:
        if value is not None:
            check_local(value)
        return value

    def resolved(self) -> dict[str, Any]:
        """Plain values, as run.yaml holds them; not `notify`, whose addresses hold passwords."""
        values = self.model_dump(mode="json", exclude={"resume"})
        return values | {"data_dir": url_of(self.data_dir) or values["data_dir"]}

    def sinks(self) -> list[str]:
        """Who else hears of the run, in the words of `eyas.record`."""
        found = ["tensorboard"] if self.tensorboard else []
        for name, value in (("wandb", self.wandb), ("trackio", self.trackio), ("prometheus", self.metrics_port)):
            found += [f"{name}={value}"] if value is not None else []
        return found + [f"notify={url}" for url in self.notify]


def found_again(about: dict[str, Any]) -> dict[str, Any]:
    """The settings that a run.yaml holds; relative folders as they are found from here: below the folder that the run
    was started in, or else below this one. Raises ValueError, TypeError or KeyError for what is no run.yaml."""
    config = dict(about["config"])
    started_in = str(about.get("folder", ""))
    for name in ("verifier_path", "data_dir", "vocab_mapping_dir", "init_from", "stage_dir"):
        there = Path(started_in, str(config.get(name, "")))
        if config.get(name) and there.is_dir() and there.absolute() != Path(config[name]).absolute():
            config[name] = str(there)
    return config


def load_config(flags: dict[str, Any], file: Path | None = None) -> TrainConfig:
    """Flags that are not None, over the YAML file, over the defaults; EyasError in one line for anything wrong.

    Without a file, a run that is resumed has the settings that it saved.
    """
    values: dict[str, Any] = {}
    if file is None and flags.get("resume") and flags.get("output_dir"):
        saved = Path(flags["output_dir"]) / "run.yaml"
        file = saved if saved.exists() else None
    if file is not None:
        try:
            values = yaml.safe_load(file.read_text()) or {}
        except OSError as e:
            raise EyasError(f"--config {file}: {e.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as e:
            raise EyasError(f"--config {file} is not YAML: {' '.join(str(e).split())}") from None
        if not isinstance(values, dict):
            raise EyasError(f"--config {file} must hold names and values, one a line")
        # A saved run.yaml also tells versions and host; they are not settings.
        if isinstance(values.get("config"), dict):
            values = {**values, "config": found_again(values)}
        values = values.get("config", values)
        if not isinstance(values, dict):
            raise EyasError(f"--config {file}: 'config' must hold names and values")
        values = {str(name).replace("-", "_"): value for name, value in values.items()}
    values.update({name: value for name, value in flags.items() if value is not None})
    try:
        return TrainConfig(**values)
    except ValidationError as e:
        first = e.errors()[0]
        name = "--" + str(first["loc"][0]).replace("_", "-") if first["loc"] else "settings"
        if first["type"] == "missing" and flags.get("resume") and file is None:
            if not flags.get("output_dir"):
                raise EyasError("--output-dir is missing: --resume goes on with the run in it") from None
            where = Path(flags["output_dir"]).absolute()
            raise EyasError(f"--resume: no run lies in {where}, and {name} is missing to begin one there") from None
        if first["type"] == "missing":
            raise EyasError(f"{name} is missing: give it as a flag or in --config") from None
        if first["type"] == "extra_forbidden":
            raise EyasError(f"{name} is no setting of eyas train: see `eyas train --help`") from None
        raise EyasError(f"{name} {first['input']!r}: {first['msg'].removeprefix('Value error, ').lower()}") from None
