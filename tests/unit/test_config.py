"""Settings: flag over file over default, and one line for whatever is wrong with them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from eyas.config import TrainConfig, load_config
from eyas.errors import EyasError

NEEDED: dict[str, Any] = {"verifier_path": "V", "data_dir": "D", "output_dir": "O"}


def test_a_flag_goes_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("epochs: 7\nlr: 5e-4\nttt-steps: 5\nverifier_path: other\n")
    config = load_config({**NEEDED, "epochs": 3, "lr": None}, file)
    assert config.epochs == 3  # flag
    assert config.verifier_path == "V"  # flag
    assert config.lr == 5e-4  # file; YAML reads 5e-4 as text
    assert config.ttt_steps == 5  # file, with a dash
    assert config.max_seq_len == 2048  # default
    assert load_config(NEEDED).epochs == TrainConfig.model_fields["epochs"].default


def test_a_false_or_zero_flag_is_a_flag(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("val_ratio: 0.3\nnum_workers: 8\n")
    config = load_config({**NEEDED, "val_ratio": 0.0, "num_workers": 0}, file)
    assert (config.val_ratio, config.num_workers) == (0.0, 0)


def test_a_saved_run_is_read_back_as_it_was(tmp_path: Path) -> None:
    config = load_config({**NEEDED, "lr": 3e-5, "noise_std": 0.05, "betas": (0.9, 0.99), "intermediate_size": 64})
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"config": config.resolved(), "eyas": "0.1", "host": "h"}))
    assert load_config({}, file) == config
    file.write_text(yaml.safe_dump(config.resolved()))
    assert load_config({}, file) == config


def test_every_setting_but_the_betas_is_a_flag_with_the_same_default_in_its_help() -> None:
    from eyas.cli import train

    flags = inspect.signature(train).parameters
    hints = get_type_hints(train, include_extras=True)
    assert set(TrainConfig.model_fields) - set(flags) == {"betas"}
    assert set(flags) - set(TrainConfig.model_fields) == {"config"}
    assert all(p.default is None for p in flags.values())
    for name, field in TrainConfig.model_fields.items():
        told = re.search(r"\[([\d.e-]+)\]", get_args(hints[name])[1].help or "") if name in flags else None
        if told and isinstance(field.default, int | float):
            assert float(told[1]) == field.default, name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"verifier_path": None}, "--verifier-path is missing: give it as a flag or in --config"),
        ({"data_dir": None}, "--data-dir is missing: give it as a flag or in --config"),
        ({"epochs": 0}, "--epochs 0: input should be greater than or equal to 1"),
        ({"lr": 0.0}, "--lr 0.0: input should be greater than 0"),
        ({"lr": float("inf")}, "--lr inf: input should be a finite number"),
        ({"lr": float("nan")}, "--lr nan: input should be a finite number"),
        ({"scheduler": "cosinus"}, "--scheduler 'cosinus': input should be 'cosine', 'linear' or 'constant'"),
        ({"seed": 2**64}, "--seed 18446744073709551616: input should be less than 18446744073709551616"),
        ({"betas": (0.9, 1.0)}, "--betas 1.0: input should be less than 1"),
        ({"betas": (-0.1, 0.9)}, "--betas -0.1: input should be greater than or equal to 0"),
        ({"val_ratio": 1.0}, "--val-ratio 1.0: input should be less than 1"),
        ({"ttt_steps": 17}, "--ttt-steps 17: input should be less than or equal to 16"),
        ({"loss": "mse"}, "--loss 'mse': not kl, reverse_kl, tv, lk or a sum of them such as kl+0.5*tv"),
        ({"loss": "kl+kl"}, "--loss 'kl+kl': not kl, reverse_kl, tv, lk or a sum of them such as kl+0.5*tv"),
        ({"loss": "kl+half*tv"}, "--loss 'kl+half*tv': 'half' before tv is no number"),
        ({"loss": "-1*tv"}, "--loss '-1*tv': the weight of tv must be greater than 0"),
        ({"outside": "maybe"}, "--outside 'maybe': input should be 'keep' or 'drop'"),
        ({"seed": -1}, "--seed -1: input should be greater than or equal to 0"),
        ({"learning_rate": 1.0}, "--learning-rate is no setting of eyas train: see `eyas train --help`"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_its_flag(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(EyasError) as error:
        load_config({**NEEDED, **flags})
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"epochs: [1", "is not YAML"),
        (b"- a\n- b\n", "must hold names and values"),
        (b"just text", "must hold names and values"),
        (b"config: 3", "'config' must hold names and values"),
        (b"\xff\xfe\x00\x80", "is not YAML"),
        (b"!!python/object/apply:os.system ['true']", "is not YAML"),
        (b"epocs: 3\n", "--epocs is no setting"),
        (b"epochs: many\n", "--epochs 'many'"),
        (b"betas: [0.9]\n", "--betas"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(EyasError) as error:
        load_config(NEEDED, file)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"--config .*nowhere\.yaml: No such file"):
        load_config(NEEDED, tmp_path / "nowhere.yaml")
    with pytest.raises(EyasError, match=r"Is a directory"):
        load_config(NEEDED, tmp_path)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    assert load_config(NEEDED, tmp_path / "run.yaml") == load_config(NEEDED)


def test_a_resume_of_nothing_says_that_no_run_lies_there(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"--resume: no run lies in .*/nosuch, and --verifier-path is missing to begin"):
        load_config({"resume": True, "output_dir": tmp_path / "nosuch"})
    with pytest.raises(EyasError, match="--output-dir is missing: --resume goes on with the run in it"):
        load_config({"resume": True})
