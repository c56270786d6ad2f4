"""What eyas needs of a verifier: its sizes, tokenizer, chat template, embedding, final norm and head.

Tensors are found by the end of their name, under any prefix, and read by byte ranges out of the safetensors files
that hold them. The model itself is loaded only by `load_model`: a trillion-parameter checkpoint costs here what its
three bfloat16 tensors cost (Kimi-K2.5: 2 x 2.3 GB), and the fingerprint a few megabytes: rows of the norm, the head,
the embedding, and the first bytes of what stands in the first, the middle and the last layer.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.errors import EyasError

NESTED = ("text_config", "llm_config", "language_config")  # where multimodal configs keep the language model
REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)
# Families whose RMS norm multiplies by (1 + w); Gemma-3n and Gemma-4 went back to w.
NORM_ADDS_ONE = {
    *("gemma", "gemma2", "gemma3", "vaultgemma"),
    *("qwen3_next", "qwen3_5", "qwen3_5_moe"),
    *("minimax_m3_vl", "step3p5", "step3p7"),
}
# A hub repository without its weights; `*.py` and `*.model` are what some tokenizers consist of.
SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.py"]
TOKENIZER_FILES = ("tokenizer", "vocab", "spiece", "sentencepiece", "tiktoken", "tekken")  # how their names begin
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
FLOATS = ("F32", "F16", "BF16")  # safetensors types that need no scales
CHUNK_ROWS = 8192  # rows converted at a time: bounds the copy in the file's own dtype
FINGERPRINT_ROWS = 256
FINGERPRINT_BYTES = 1 << 16  # of each tensor of a layer
# Experts beyond the first are hundreds; a rotary table is in some copies of a model and not in others.
NOT_IN_FINGERPRINT = re.compile(r"experts\.[1-9]|rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class VerifierConfig:
    """A verifier's sizes, read from config.json (the language model's part of it)."""

    path: Path
    name: str
    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None
    torch_dtype: str
    norm_adds_one: bool
    mla: dict[str, int] | None = None  # sizes of latent attention, by their names in config.json

    def capture_layers(self) -> tuple[int, int, int]:
        """The HF indices of the three auxiliary states: 2, n // 2, n - 3."""
        return 2, self.num_layers // 2, self.num_layers - 3


@dataclass(frozen=True)
class FinalNorm:
    """The verifier's last RMS norm. weight: [Ht] float32."""

    weight: Tensor
    eps: float
    adds_one: bool

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x [..., Ht], computed in float32, in the dtype of x."""
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        weight = self.weight.to(x.device)
        return (h * (weight + 1 if self.adds_one else weight)).to(x.dtype)


def resolve(path_or_id: str | Path) -> Path:
    """The folder of a verifier; a hub id such as `org/name` is fetched first, without its weights.

    Raises EyasError when there is no such folder and no such repository (or no network and no cached copy).
    """
    if not str(path_or_id):
        raise EyasError("the verifier's path is empty: name a folder with a config.json, or a hub id such as org/name")
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise EyasError(f"verifier {path} is a file: name the folder that holds its config.json")
    name = str(path_or_id)
    if not HUB_ID.fullmatch(name):
        raise EyasError(f"no verifier at {path}: name a folder with a config.json, or a hub id such as org/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=SMALL_FILES))
    except RepositoryNotFoundError:
        raise EyasError(f"no folder {name} here, and no such model on the hub: check the name") from None
    except Exception as error:  # offline, refused, disk full, ...: huggingface_hub and httpx raise dozens of types
        raise EyasError(f"no folder {name} here, and the hub did not give it ({first_line(error)})") from None


class Verifier:
    """A verifier on disk. Making one reads config.json and nothing else; the rest is read when asked for.

    trust_remote_code: passed to transformers, for tokenizers and models that are code in the model's folder.
    """

    def __init__(self, path_or_id: str | Path, *, trust_remote_code: bool = False) -> None:
        self.path = resolve(path_or_id)
        self._hub_id = None if Path(path_or_id).expanduser().is_dir() else str(path_or_id)
        self._trust = trust_remote_code
        self.config, self._says_untied = read_config(self.path, self._hub_id)

    @cached_property
    def tokenizer(self) -> Any:
        """The verifier's tokenizer (a transformers fast tokenizer where there is one)."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.path, trust_remote_code=self._trust)
        except Exception as error:  # transformers raises OSError, ValueError, KeyError, TypeError, ... by cause
            if not any(p.name.startswith(TOKENIZER_FILES) for p in self.path.iterdir()):
                raise EyasError(f"no tokenizer in {self.path}: fetch its tokenizer.json") from None
            hint = "; allow it with trust_remote_code" if "trust_remote_code" in str(error) else ""
            said = " ".join(str(error).split())[:200] if first_line(error).endswith(":") else first_line(error)
            raise EyasError(f"cannot read the tokenizer in {self.path}: {said}{hint}") from error

    @cached_property
    def chat_template(self) -> str:
        """The text of the chat template; EyasError for a model that has none (a base model)."""
        try:
            return str(self.tokenizer.get_chat_template())
        except ValueError:
            raise EyasError(f"{self.path} has no chat template: eyas needs a chat model") from None

    @property
    def template_hash(self) -> str:
        """xxh3-64 of the chat template's text, 16 hex digits."""
        from xxhash import xxh3_64_hexdigest

        return xxh3_64_hexdigest(self.chat_template.encode())

    @cached_property
    def fingerprint(self) -> str:
        """xxh3-128, 32 hex digits, of the sizes, the tokenizer's size and some of the weights.

        Those are the final norm, rows of the head and of the embedding, and the first bytes of every tensor, quantised
        or not, of the first, the middle and the last layer: a fine-tune of one name is another verifier. The same for
        every copy of one model however it is cut into files; a few megabytes are read.
        """
        from xxhash import xxh3_128

        sizes = {k: asdict(self.config)[k] for k in ("hidden_size", "num_layers", "vocab_size", "num_heads")}
        digest = xxh3_128(json.dumps({**sizes, "tokenizer": self._tokenizer_size()}, sort_keys=True).encode())
        rows = FINGERPRINT_ROWS
        for name, stop in ((self._norm_name(), None), (self._head_name(), rows), (self._embedding_name(), rows)):
            part = self._slice(name)[:stop].contiguous()
            digest.update(f"{part.dtype}{list(part.shape)}".encode())
            digest.update(part.view(torch.uint8).numpy().tobytes())
        for said, content in self._layers_begin():
            digest.update(said.encode())
            digest.update(content)
        return digest.hexdigest()

    def embedding(self, dtype: torch.dtype = torch.float32, rows: Tensor | None = None) -> Tensor:
        """The input embedding, [V, Ht]; with `rows` (ids, [R]) those rows in that order, [R, Ht]."""
        return self._matrix(self._embedding_name(), rows, dtype)

    def final_norm(self) -> FinalNorm:
        """The norm between the last layer and the head, weight [Ht] float32."""
        name = self._norm_name()
        if name.removesuffix("weight") + "bias" in self._files:
            raise EyasError(f"{self._where(name)} has a bias (a LayerNorm): eyas knows RMS norms only")
        weight = self._slice(name)[:].float()
        if tuple(weight.shape) != (self.config.hidden_size,):
            raise self._wrong_shape(name, list(weight.shape), [self.config.hidden_size])
        return FinalNorm(weight, self.config.rms_norm_eps, self.config.norm_adds_one)

    def lm_head(self, rows: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """The output head, [V, Ht]; with `rows` (ids, [R]) those rows in that order, [R, Ht].

        For a tied model this is the embedding. A row outside the vocabulary raises EyasError.
        """
        return self._matrix(self._head_name(), rows, dtype)

    def decoder_layer(self, index: int) -> dict[str, Tensor]:
        """The float32 weights of decoder layer `index` (0 reads the embedding), by their names in it without `.weight`.

        Quantised tensors and those of experts are left out; empty when the model has no layer of that name.
        """
        prefix = f"{self._layers_prefix()}{index}."
        found = {}
        for name in self._files:
            short = name.removeprefix(prefix).removesuffix(".weight")
            if name.startswith(prefix) and name.endswith(".weight") and "experts" not in short:
                part = self._open(self._files[name]).get_slice(name)
                if part.get_dtype() in FLOATS:
                    found[short] = part[:].float()
        return found

    def load_model(self, dtype: torch.dtype, device: str | torch.device = "cpu") -> Any:
        """The whole model by transformers, in eval mode. This is the one costly call of the class."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # it would garble the command's own lines
        try:
            if self._hub_id:
                self._fetch("*.safetensors")
            model = AutoModelForCausalLM.from_pretrained(self.path, dtype=dtype, trust_remote_code=self._trust)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise EyasError(f"transformers cannot load {self.path}: {first_line(error)}") from error
        return model.to(device).eval()

    # -- tensors by name ---------------------------------------------------------------------------------------------

    @cached_property
    def _files(self) -> dict[str, str]:
        """Tensor name -> the file that holds it, from the index or from the files' headers."""
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise EyasError(f"{index} has no weight_map: fetch it again")
            return weight_map
        if self._hub_id and not (self.path / "model.safetensors").exists():
            self._fetch("model.safetensors")
        single = self.path / "model.safetensors"
        files = [single] if single.exists() else sorted(self.path.glob("*.safetensors"))
        if not files:
            others = sorted(p.name for ext in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in self.path.glob(ext))
            there = f", only {others[0]}: convert it to safetensors" if others else ": fetch the weights"
            raise EyasError(f"no safetensors in {self.path}{there}")
        return {name: file.name for file in files for name in self._open(file.name).keys()}  # noqa: SIM118

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        path = self.path / file
        if self._hub_id and not path.exists():
            self._fetch(file)
        try:
            path.open("rb").close()  # safetensors calls a file that may not be read a missing one
            return safe_open(path, framework="pt")
        except FileNotFoundError:
            raise EyasError(f"{path} is missing, though the index of the weights names it: fetch it") from None
        except PermissionError:
            raise EyasError(f"{path} may not be read by this user: give it the permission") from None
        except (SafetensorError, OSError) as error:
            raise EyasError(f"{path} cannot be read ({first_line(error)}): fetch it again") from None

    def _slice(self, name: str) -> Any:
        """A handle that reads ranges of a tensor; only plain floating types, since others need scales."""
        from safetensors import SafetensorError

        try:
            part = self._open(self._files[name]).get_slice(name)
        except SafetensorError:
            raise self._lacks(name) from None
        if part.get_dtype() not in FLOATS:
            raise EyasError(f"{self._where(name)} is quantised ({part.get_dtype()}): eyas needs bf16, fp16 or fp32")
        return part

    def _layers_begin(self) -> Iterator[tuple[str, bytes]]:
        """("<layer>.<name><type><shape>", first bytes as they are on the disk) of the tensors the fingerprint counts.

        Nothing where the model's layers have other names than `layers.N` beside the embedding.
        """
        prefix, n = self._layers_prefix(), self.config.num_layers
        wanted = tuple(f"{prefix}{k}." for k in sorted({0, n // 2, n - 1}))
        headers: dict[str, dict[str, Any]] = {}
        for name in sorted(n for n in self._files if n.startswith(wanted) and not NOT_IN_FINGERPRINT.search(n)):
            file = self._files[name]
            path = self.path / file
            if file not in headers:
                self._open(file)  # fetches it, and says what is wrong with it
                with path.open("rb") as opened:
                    (length,) = struct.unpack("<Q", opened.read(8))
                    headers[file] = {"at": 8 + length, **json.loads(opened.read(length))}
            if name not in headers[file]:
                raise self._lacks(name)
            about = headers[file][name]
            start, stop = about["data_offsets"]
            with path.open("rb") as opened:
                opened.seek(headers[file]["at"] + start)
                content = opened.read(min(stop - start, FINGERPRINT_BYTES))
            yield f"{name.removeprefix(prefix)}{about['dtype']}{about['shape']}", content

    def _lacks(self, name: str) -> EyasError:
        return EyasError(f"{self.path / self._files[name]} lacks {name}, which the index puts there: fetch it again")

    def _matrix(self, name: str, rows: Tensor | None, dtype: torch.dtype) -> Tensor:
        """All rows or some of a [V, Ht] tensor, converted piece by piece."""
        v, h = self.config.vocab_size, self.config.hidden_size
        part = self._slice(name)
        if list(part.get_shape()) != [v, h]:
            raise self._wrong_shape(name, list(part.get_shape()), [v, h])
        if rows is not None:
            rows = rows.to("cpu", torch.int64)
            if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < v:
                raise EyasError(f"rows {int(rows.min())}..{int(rows.max())} asked of {name}, which has {v}")
        out = torch.empty(v if rows is None else len(rows), h, dtype=dtype)
        for start in range(0, v, CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, v)
            if rows is None:
                out[start:stop] = part[start:stop]
                continue
            wanted = ((rows >= start) & (rows < stop)).nonzero().squeeze(1)
            if len(wanted):
                out[wanted] = part[start:stop][rows[wanted] - start].to(dtype)
        return out

    def _embedding_name(self) -> str:
        """The language model's embedding: never one inside a layer (MTP), and with a final norm beside it if it can."""
        names = [n for n in self._named("embed_tokens.weight") if not re.search(r"layers\.\d+\.", n)]
        beside = [n for n in names if n.removesuffix("embed_tokens.weight") + "norm.weight" in self._files]
        return self._only(beside or names, "embed_tokens.weight")

    def _layers_prefix(self) -> str:
        return self._embedding_name().removesuffix("embed_tokens.weight") + "layers."

    def _norm_name(self) -> str:
        name = self._embedding_name().removesuffix("embed_tokens.weight") + "norm.weight"
        return self._only([name] if name in self._files else [], name)

    def _head_name(self) -> str:
        """The head on disk, or the embedding where the model is tied and the head left out."""
        names = [n for n in self._named("lm_head.weight") if not re.search(r"layers\.\d+\.", n)]
        if not names and not self._says_untied:
            return self._embedding_name()
        return self._only(names, "lm_head.weight")

    def _named(self, suffix: str) -> list[str]:
        return [n for n in self._files if n == suffix or n.endswith("." + suffix)]

    def _only(self, names: list[str], what: str) -> str:
        if not names:
            where = sorted(set(self._files.values()))
            more = f" and {len(where) - 1} more files" if len(where) > 1 else ""
            raise EyasError(f"no tensor named {what} in {self.path / where[0]}{more}: eyas cannot use this model")
        return min(names, key=lambda n: (n.count("."), n))  # the outermost, where several models are in the files

    def _where(self, name: str) -> str:
        return f"{name} in {self.path / self._files[name]}"

    def _wrong_shape(self, name: str, found: list[int], wanted: list[int]) -> EyasError:
        return EyasError(f"{self._where(name)} has shape {found}, but config.json says {wanted}: mixed-up files?")

    def _fetch(self, pattern: str) -> None:
        """Bring a weights file of a hub model into the folder that `resolve` made (the same revision)."""
        from huggingface_hub import snapshot_download

        try:
            snapshot_download(self._hub_id or "", revision=self.path.name, allow_patterns=[pattern])
        except Exception as error:  # as in resolve
            raise EyasError(f"the hub did not give {pattern} of {self._hub_id} ({first_line(error)})") from None

    def _tokenizer_size(self) -> int:
        """Entries of the tokenizer, by the cheapest way: transformers takes seconds to import."""
        file = self.path / "tokenizer.json"
        if file.exists():
            from tokenizers import Tokenizer

            return Tokenizer.from_file(os.fspath(file)).get_vocab_size()
        others = ("tokenizer_config.json", "tokenizer.model", "vocab.json")
        return len(self.tokenizer) if any((self.path / f).exists() for f in others) else 0


def read_config(path: Path, name: str | None = None) -> tuple[VerifierConfig, bool]:
    """config.json of the folder `path`, and whether it says in so many words that head and embedding are two tensors.

    name: the verifier's name, where it is known better than from the file.
    Raises EyasError when the file is missing or a size is.
    """
    top = _read_json(path / "config.json")
    if _is_drafter(top):
        raise EyasError(f"{path} is a drafter, and its verifier is wanted: name the model that it drafts for")
    text = next(_text_configs(top))
    merged = {**top, **{k: v for k, v in text.items() if v is not None}}
    model_type = str(merged.get("model_type", ""))
    if any(merged.get(k) is None for k in REQUIRED):
        merged = {**_family_defaults(model_type, text), **{k: v for k, v in merged.items() if v is not None}}
    if missing := [k for k in REQUIRED if not isinstance(merged.get(k), int)]:
        raise EyasError(f"{path / 'config.json'} gives no {missing[0]}: eyas cannot use a model of type {model_type!r}")
    heads = merged["num_attention_heads"]
    theta, scaling = _rope(merged)
    tied = merged.get("tie_word_embeddings")
    config = VerifierConfig(
        path=path,
        name=name or _name(merged.get("_name_or_path"), path),
        model_type=model_type,
        hidden_size=merged["hidden_size"],
        num_layers=merged["num_hidden_layers"],
        vocab_size=merged["vocab_size"],
        intermediate_size=merged["intermediate_size"],
        num_heads=heads,
        num_kv_heads=merged.get("num_key_value_heads") or heads,
        # MLA models (DeepSeek, Kimi) give no head_dim that fits a plain drafter; their value heads do
        head_dim=merged.get("v_head_dim") or merged.get("head_dim") or merged["hidden_size"] // heads,
        rms_norm_eps=float(merged.get("rms_norm_eps") or merged.get("layer_norm_eps") or 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=merged["max_position_embeddings"],
        tie_word_embeddings=bool(tied),
        bos_token_id=merged.get("bos_token_id"),
        eos_token_id=merged.get("eos_token_id"),
        pad_token_id=merged.get("pad_token_id"),
        torch_dtype=str(merged.get("torch_dtype") or merged.get("dtype") or "bfloat16").removeprefix("torch."),
        norm_adds_one=model_type.removesuffix("_text") in NORM_ADDS_ONE,
        mla={k: merged[k] for k in MLA} if all(isinstance(merged.get(k), int) for k in MLA) else None,
    )
    return config, tied is False


def _is_drafter(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE drafter (and not of a model whose name is Eagle)."""
    named = [str(name).lower() for name in config.get("architectures") or []]
    keys = ("draft_vocab_size", "speculators_model_type", "eagle_config")
    return any(key in config for key in keys) or any("eagle3" in n or n.endswith("causallmeagle") for n in named)


def _text_configs(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The language models' configs inside `config`, the outermost nested one first, `config` itself last."""
    for key in (*NESTED, "thinker_config"):
        if isinstance(config.get(key), dict):
            yield from _text_configs(config[key])
    yield config


def _family_defaults(model_type: str, given: dict[str, Any]) -> dict[str, Any]:
    """Fields that a published config leaves to its class (Gemma-3 does); empty for a type transformers lacks."""
    from transformers import AutoConfig

    try:
        return dict(AutoConfig.for_model(**{**given, "model_type": model_type}).to_dict())
    except (ValueError, KeyError, TypeError):
        return {}


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """theta and scaling, from transformers v5's one `rope_parameters` or v4's two fields.

    As the drafter takes them: it turns whole heads, text only, so what share of a head the verifier turns and which
    parts of it are for pictures is left out.
    """
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)  # one per kind of layer: the drafter attends to everything
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"} or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", "mrope"):
        return float(theta), None
    scaling = {k: v for k, v in scaling.items() if k != "partial_rotary_factor" and "mrope" not in k}
    if kind == "su":  # the name it had first
        scaling = {k: v for k, v in scaling.items() if k != "type"} | {"rope_type": "longrope"}
    return float(theta), scaling


def _name(given: object, path: Path) -> str:
    """`_name_or_path` where it is a name and not somebody's folder."""
    if isinstance(given, str) and given and not given.startswith(("/", ".", "~")):
        return given
    return path.resolve().name


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise EyasError(f"no {path.name} in {path.parent}: is this a model's folder?") from None
    except (OSError, ValueError) as error:
        raise EyasError(f"{path} cannot be read ({first_line(error)}): fetch it again") from None
    if not isinstance(found, dict):
        raise EyasError(f"{path} is no JSON object: fetch it again")
    return found


def first_line(error: BaseException) -> str:
    """An error's message in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
