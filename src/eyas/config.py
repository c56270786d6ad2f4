"""The settings of a training run: one typed object, flag over file over default, saved with the run as `run.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eyas.errors import EyasError


class TrainConfig(BaseModel):
    """Everything `eyas train` can be told. The command line's flags are these names with dashes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    verifier_path: str = Field(description="The verifier: a folder with config.json and safetensors, or a hub id")
    data_dir: Path = Field(description="A store made by `eyas capture`, or a folder of data_*.pt files")
    vocab_mapping_dir: Path | None = Field(None, description="Folder with d2t and t2d; without it the full vocabulary")
    output_dir: Path = Field(description="The run directory")

    epochs: int = Field(10, ge=1)
    lr: float = Field(1e-3, gt=0, description="Peak learning rate")
    scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = Field(0.05, ge=0, lt=1, description="Share of all steps that warm the learning rate up")
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this global norm")

    max_seq_len: int = Field(2048, ge=4, description="Longer samples are cut to this many tokens")
    batch_tokens: int | None = Field(None, ge=4, description="Tokens of one packed batch; default max_seq_len")
    val_ratio: float = Field(0.1, ge=0, lt=1, description="Share of the samples kept for validation")
    num_workers: int = Field(4, ge=0, description="Threads that read; 0 reads in the training loop")
    cache_gb: Literal["auto"] | Annotated[float, Field(ge=0)] = Field(
        "auto", description="Page cache to count on, in GB: a fixed part of the data stays in it, the rest goes past it"
    )

    ttt_steps: int = Field(3, ge=1, le=16, description="Training-time test steps K")
    ttt_warmup_epochs: int = Field(0, ge=0, description="First epochs that train TTT step 0 alone, at 0.4 of the cost")
    loss: Literal["kl", "reverse_kl", "tv", "lk"] = "kl"
    step_weight_decay: float = Field(1.0, gt=0, le=1, description="TTT step k counts decay**k")
    state_weight: float = Field(0.0, ge=0, description="weight of the distance to the verifier's last state")
    noise_std: float = Field(
        0.0, ge=0, description="Uniform noise on the states while training: width, times 512 / rows of the pack"
    )

    intermediate_size: int | None = Field(None, ge=1, description="Drafter's MLP; default the verifier's")
    num_heads: int | None = Field(None, ge=1, description="Drafter's attention heads; default the verifier's")
    num_kv_heads: int | None = Field(None, ge=1, description="Drafter's key/value heads; default the verifier's")
    head_dim: int | None = Field(None, ge=2, description="Drafter's head size; default the verifier's")
    init: Literal["verifier", "random"] = Field(
        "verifier", description="Start from the verifier's own head, norm and layer where they fit, or at random"
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

    seed: int = Field(0, ge=0)
    dtype: Literal["auto", "bf16", "fp32"] = Field("auto", description="Compute dtype; masters are always fp32")
    device: str = "auto"
    trust_remote_code: bool = Field(False, description="Run the code that the verifier's folder brings")

    def resolved(self) -> dict[str, Any]:
        """Plain values, as run.yaml holds them; not `notify`, whose addresses hold passwords."""
        return self.model_dump(mode="json")

    def sinks(self) -> list[str]:
        """Who else hears of the run, in the words of `eyas.record`."""
        found = ["tensorboard"] if self.tensorboard else []
        for name, value in (("wandb", self.wandb), ("trackio", self.trackio), ("prometheus", self.metrics_port)):
            found += [f"{name}={value}"] if value is not None else []
        return found + [f"notify={url}" for url in self.notify]


def load_config(flags: dict[str, Any], file: Path | None = None) -> TrainConfig:
    """Flags that are not None, over the YAML file, over the defaults; EyasError in one line for anything wrong."""
    values: dict[str, Any] = {}
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
        if first["type"] == "missing":
            raise EyasError(f"{name} is missing: give it as a flag or in --config") from None
        if first["type"] == "extra_forbidden":
            raise EyasError(f"{name} is no setting of eyas train: see `eyas train --help`") from None
        raise EyasError(f"{name} {first['input']!r}: {first['msg'].lower()}") from None
