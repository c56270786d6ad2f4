"""Rules on the tensors: is everything there, under names that engines take, in the right shape, with sane values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from eyas.check.engines import EMBEDDING, Loading, borrows, useless
from eyas.check.subject import LITTLE, NOTHING, Finding, Subject, listed, titles
from eyas.drafter.conventions import FLAG_TENSORS, MAPS, canonical, parameters
from eyas.drafter.folder import FLOATS

ROWS = 8192  # rows looked through at a time
# What quantising tools put beside a weight, or in its place.
SCALES = ("_scale", "_scale_inv", "_zero_point", ".qweight", ".qzeros", ".scales", ".g_idx", "_packed")
SWAPPED = "config.json and weights are of two drafters: take the config.json that was written with the weights"


def rules(s: Subject) -> Iterator[Finding]:
    """Everything that the tensors show by themselves."""
    yield from names(s)
    yield from quantised(s)
    yield from missing(s)
    yield from strangers(s)
    yield from shapes(s)
    yield from values(s)


def names(s: Subject) -> Iterator[Finding]:
    """Tensors that are there, under a name that an engine passes over or stops at."""
    wanted = (*parameters(s.kind), EMBEDDING)
    hurt: list[Loading] = []
    first: list[str] = []
    for x in s.loadings:
        if x.kind != s.kind:
            continue  # it makes another drafter, whatever the names: the rule on the architecture
        lost = [t.name for n, t in s.folder.tensors.items() if n in wanted and n not in x.loads]
        lost = [n for n in lost if x.engine.own_embedding or canonical(n) != EMBEDDING]
        if lost:
            hurt.append(x)
            first = first or lost
    if hurt:
        quiet = [x for x in hurt if x.engine.unknown == "ignored"]
        loud = [x for x in hurt if x.engine.unknown == "refused"]
        sees = [f"{titles(quiet)} passes over them and drafts with random ones: {NOTHING}"] if quiet else []
        sees += [f"{titles(loud)} stops at loading: it has no place for {first[0]}"] if loud else []
        yield Finding(
            "names",
            any(x.engine.current for x in hurt),
            f"{len(first)} tensors have names that not every engine takes, as {first[0]}",
            "; ".join(sees),
            "names them as the contract does, which every engine takes",
        )
    if s.folder.twice:
        yield Finding(
            "twice",
            True,
            f"{listed(s.folder.twice)} is there twice, under two names or in two files",
            "which of the two an engine keeps depends on the order in which it reads them",
            todo="find out which is the trained one, and delete the other",
        )


def quantised(s: Subject) -> Iterator[Finding]:
    """Weights in numbers that mean nothing without their scales."""
    found = [t for n, t in s.folder.tensors.items() if n in (*parameters(s.kind), EMBEDDING) and t.dtype not in FLOATS]
    scales = [t.name for t in s.folder.tensors.values() if t.name.endswith(SCALES)]
    if found or scales:
        kinds = f" ({', '.join(sorted({t.dtype for t in found}))})" if found else ""
        yield Finding(
            "quantised",
            True,
            f"the weights are quantised: {listed([*(t.name for t in found), *scales])}{kinds}",
            "engines take the numbers without their scales, or stop: " + LITTLE,
            todo="export it in bfloat16, which every engine loads",
        )


def missing(s: Subject) -> Iterator[Finding]:
    """Parameters that no tensor fills."""
    lost = [n for n in parameters(s.kind) if n not in s.folder.tensors]
    if "lm_head.weight" in lost:
        lost.remove("lm_head.weight")
        yield _no_head(s)
    if "fc.weight" in lost:
        lost.remove("fc.weight")
        yield Finding(
            "fc-missing",
            True,
            "fc.weight, which reads the verifier's states, is missing",
            f"engines leave it random: {NOTHING}",
            todo="export the checkpoint again: the trainer left out the projection",
        )
    if lost:
        yield Finding(
            "tensor-missing",
            True,
            f"{listed(lost)} {'is' if len(lost) == 1 else 'are'} missing",
            f"engines leave {'it' if len(lost) == 1 else 'them'} as made, norms at one and the rest random: {NOTHING}",
            todo="export the checkpoint again; the training is not lost if the trainer's own checkpoint has them",
        )


def _no_head(s: Subject) -> Finding:
    full, borrowed = s.Vd == s.V, borrows(s.folder)
    sees, hurt = [], False
    for said, loadings in (
        (f"leaves it random: {NOTHING}", [x for x in s.loadings if x.kind and "lm_head.weight" in x.random]),
        (
            "shares the verifier's, which is right if the trainer froze it"
            if full
            else f"drafts with the first rows of the verifier's whole head: {NOTHING}",
            [x for x in s.loadings if x.kind and "lm_head.weight" not in x.random],
        ),
    ):
        if loadings:
            sees.append(f"{titles(loadings)} {said}")
            hurt = hurt or (NOTHING in said and any(x.engine.current for x in loadings))
    able = s.verifier is not None and s.verifier.config.hidden_size == s.H
    return Finding(
        "head-missing",
        hurt,
        "lm_head.weight is missing" + (" and draft_vocab_size is null" if borrowed else ""),
        "; ".join(sees),
        "takes the verifier's rows of the draft vocabulary" if able else None,
        "name --verifier-path: its rows can stand in where the trainer froze the head"
        if s.verifier is None
        else "the drafter's hidden size is not the verifier's, whose head cannot stand in: export it again",
    )


def strangers(s: Subject) -> Iterator[Finding]:
    """Tensors that are no part of a drafter of this kind."""
    known = (*parameters(s.kind), EMBEDDING, *MAPS)
    strange = [t.name for n, t in s.folder.tensors.items() if n not in known and not t.name.endswith(SCALES)]
    dead = [n for n in strange if useless(n)]
    quiet = [x for x in s.loadings if x.engine.unknown == "ignored"]
    loud = [x for x in s.loadings if x.engine.unknown == "refused"]
    if dead:
        yield Finding(
            "useless",
            any(x.engine.current for x in loud),
            f"{listed(dead)}: of no use to a drafter",
            f"{titles(loud)} may stop at loading" if loud else "nothing: they are passed over",
            "leaves them out",
        )
    more = [n for n in strange if n not in dead and canonical(n).startswith("layers.")]
    if more:
        yield _more_layers(more)
    rest = [n for n in strange if n not in dead and n not in more]
    on = [prefix for prefix, flags in FLAG_TENSORS.items() if any(s.config.get(f) for f in flags)]
    rest = [n for n in rest if not canonical(n).startswith(tuple(on))]
    if s.kind == "qwen3":
        rest = [t.name for n, t in s.folder.tensors.items() if n.endswith(("q_norm.weight", "k_norm.weight"))] + rest
        quiet, loud = ([x for x in group if x.kind != "qwen3"] for group in (quiet, loud))
    if rest and (quiet or loud):
        sees = []
        if quiet:
            sees.append(f"{titles(quiet)} passes over them and computes another function than was trained: {LITTLE}")
        if loud:
            sees.append(f"{titles(loud)} stops at loading")
        yield Finding(
            "other-function",
            any(x.engine.current for x in (*quiet, *loud)),
            f"{listed(rest)}: no part of the EAGLE-3 drafter that every engine computes",
            "; ".join(sees),
            todo="vLLM computes norms on queries and keys for the architecture Eagle3Qwen3ForCausalLM, SGLang for none"
            if s.kind == "qwen3"
            else "it was trained with parts (biases, more norms) that engines do not compute: train without them",
        )


def _more_layers(more: list[str]) -> Finding:
    count = 1 + len({canonical(n).split(".")[1] for n in more})
    return Finding(
        "two-layers",
        True,
        f"{count} layers ({listed(more, 1)})",
        "SGLang 0.5.5 to 0.5.9 stops; SGLang 0.5.14 and later norms the input of a further layer with hidden_norm, "
        f"vLLM with input_layernorm: {LITTLE} in one of them",
        todo="train one layer: more are not portable",
    )


def shapes(s: Subject) -> Iterator[Finding]:
    """Shapes against config.json."""
    wanted = _mla_shapes(s) if s.kind == "mla" else _llama_shapes(s)
    for name, sides in wanted.items():
        found = s.folder.shape(name)
        if found is None or None in sides or found == sides:
            continue
        if name == "fc.weight" and len(found) == 2 and found[0] == sides[0]:
            yield _fc_width(s, found[1])
            continue
        yield Finding(
            "shape",
            True,
            f"{name} is {list(found)}, config.json says {list(sides)}",
            "engines stop at loading, with a shape mismatch",
            *_shape_repair(s, name, found),
        )


def _shape_repair(s: Subject, name: str, found: tuple[int, ...]) -> tuple[str | None, str]:
    """config.json can be set right where one number explains every tensor that it is in."""
    wanted = (_mla_shapes(s) if s.kind == "mla" else _llama_shapes(s))[name]
    axis = int(name.endswith(("down_proj.weight", "o_proj.weight")))  # of the side that the number explains
    if len(found) != len(wanted) or any(
        a != b for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if i != axis
    ):
        return None, SWAPPED
    inner = {s.shape("midlayer.mlp.gate_proj.weight", 0), s.shape("midlayer.mlp.up_proj.weight", 0)}
    inner.add(s.shape("midlayer.mlp.down_proj.weight", 1))
    if name.startswith("midlayer.mlp.") and len(inner) == 1:
        return f"sets intermediate_size to {inner.pop()}, as the three tensors are", ""
    heads, rows = s.whole("num_attention_heads"), s.shape("midlayer.self_attn.q_proj.weight", 0)
    if s.kind != "mla" and name.startswith("midlayer.self_attn.") and head_dim_by_shape(s):
        return f"sets head_dim to {(rows or 0) // (heads or 1)}, as the projections are", ""
    return None, SWAPPED


def head_dim_by_shape(s: Subject) -> int | None:
    """The head size that makes all four projections fit the counts of heads in config.json; None for none."""
    heads, pairs = s.whole("num_attention_heads"), s.whole("num_key_value_heads") or s.whole("num_attention_heads")
    q, k, v = (s.shape(f"midlayer.self_attn.{n}_proj.weight", 0) for n in "qkv")
    o = s.shape("midlayer.self_attn.o_proj.weight", 1)
    if not heads or not pairs or not q or q % heads:
        return None
    size = q // heads
    return size if (k, v, o) == (pairs * size, pairs * size, q) else None


def _fc_width(s: Subject, width: int) -> Finding:
    states, rest = divmod(width, s.Ht or 1)
    what = f"fc.weight reads {width} numbers" + (
        f", {states} states of {s.Ht}" if not rest else f", no multiple of {s.Ht}"
    )
    return Finding(
        "fc-width",
        True,
        f"{what}, where engines hand it three states of {s.Ht}",
        "engines stop at loading, or at the first draft, with a shape mismatch",
        todo="set target_hidden_size to the verifier's hidden size if that is what differs; other counts of states are "
        "not portable",
    )


def _llama_shapes(s: Subject) -> dict[str, tuple[int | None, ...]]:
    H, inner, heads = s.whole("hidden_size"), s.whole("intermediate_size"), s.whole("num_attention_heads")
    pairs = s.whole("num_key_value_heads") or heads
    d = s.whole("head_dim") or (H // heads if H and heads else None)
    q, k = (heads * d if heads and d else None), (pairs * d if pairs and d else None)
    double = 2 * H if H else None
    layer: dict[str, tuple[int | None, ...]] = {
        "self_attn.q_proj": (q, double),
        "self_attn.k_proj": (k, double),
        "self_attn.v_proj": (k, double),
        "self_attn.o_proj": (H, q),
    }
    return _around(s, H, inner, layer)


def _mla_shapes(s: Subject) -> dict[str, tuple[int | None, ...]]:
    H, inner, heads = s.whole("hidden_size"), s.whole("intermediate_size"), s.whole("num_attention_heads")
    ql, kl = s.whole("q_lora_rank"), s.whole("kv_lora_rank")
    nope, rope, value = s.whole("qk_nope_head_dim"), s.whole("qk_rope_head_dim"), s.whole("v_head_dim")
    double = 2 * H if H else None
    layer: dict[str, tuple[int | None, ...]] = {"self_attn.q_a_proj": (ql, double), "self_attn.q_a_layernorm": (ql,)}
    layer["self_attn.kv_a_layernorm"] = (kl,)
    if heads and nope and rope and value and kl:
        layer["self_attn.q_b_proj"] = (heads * (nope + rope), ql)
        layer["self_attn.kv_a_proj_with_mqa"] = (kl + rope, double)
        layer["self_attn.kv_b_proj"] = (heads * (nope + value), kl)
        layer["self_attn.o_proj"] = (H, heads * value)
    return _around(s, H, inner, layer)


def _around(
    s: Subject, H: int | None, inner: int | None, layer: dict[str, tuple[int | None, ...]]
) -> dict[str, tuple[int | None, ...]]:
    layer = {
        **layer,
        "mlp.gate_proj": (inner, H),
        "mlp.up_proj": (inner, H),
        "mlp.down_proj": (H, inner),
        **dict.fromkeys(("hidden_norm", "input_layernorm", "post_attention_layernorm"), (H,)),
    }
    return {
        "fc.weight": (H, 3 * s.Ht if s.Ht else None),
        **{f"midlayer.{n}.weight": shape for n, shape in layer.items()},
        "norm.weight": (H,),
        "lm_head.weight": (s.Vd, H),
        EMBEDDING: (s.V, H),
    }


def values(s: Subject) -> Iterator[Finding]:
    """Numbers that no training leaves behind."""
    bad: dict[str, list[str]] = {"not-finite": [], "all-zero": []}
    for name in (*parameters(s.kind), EMBEDDING):
        stored = s.folder.tensors.get(name)
        if stored is None or stored.dtype not in FLOATS or not stored.shape or not stored.shape[0]:
            continue  # no rows: the shape is the fault
        finite, zero = True, True
        for start in range(0, stored.shape[0], ROWS):
            part = s.folder.array(name)[start : start + ROWS]
            if stored.dtype == "BF16":
                finite = finite and not ((part & 0x7F80) == 0x7F80).any()
                zero = zero and not (part & 0x7FFF).any()
            else:
                finite = finite and bool(np.isfinite(part).all())
                zero = zero and not part.any()
        if not finite:
            bad["not-finite"].append(name)
        elif zero:
            bad["all-zero"].append(name)
    if bad["not-finite"]:
        yield Finding(
            "not-finite",
            True,
            f"{listed(bad['not-finite'])} holds NaN or infinity",
            f"every draft is token 0 or noise: {NOTHING}",
            todo="the training diverged: go back to an earlier checkpoint",
        )
    if bad["all-zero"]:
        yield Finding(
            "all-zero",
            True,
            f"{listed(bad['all-zero'])} is all zeros",
            f"what it computes is lost: {NOTHING}",
            todo="the trainer saved a tensor it had not gathered (FSDP, ZeRO): export again",
        )
    if untrained(s):
        yield Finding(
            "fc-untrained",
            True,
            "fc.weight is plain noise, as a fresh layer has it: no training moved it",
            f"the drafter is blind to the verifier's states: {LITTLE}",
            todo="the trainer saved it before training, or did not train it: export again",
        )


def untrained(s: Subject) -> bool:
    """Whether fc.weight is as torch or transformers make a fresh layer: independent numbers of one known spread.

    Of n independent numbers with kurtosis q the mean square of a row scatters by sqrt((q - 1) / n). Training moves
    rows and columns apart: in a trained fc both scatter several times more.
    """
    shape = s.folder.shape("fc.weight")
    if shape is None or len(shape) != 2 or min(shape) < 16 or s.folder.tensors["fc.weight"].dtype not in FLOATS:
        return False
    w = s.folder.floats("fc.weight", np.arange(min(shape[0], 1024))).astype(np.float64)
    if not np.isfinite(w).all():
        return False
    std = float(w.std())
    fresh = [0.02, 1 / np.sqrt(3 * shape[1])]  # transformers' initializer_range; torch.nn.Linear: U(-1, 1) / sqrt(in)
    if not any(abs(std / f - 1) < 0.02 for f in fresh):
        return False
    kurtosis = float((w**4).mean() / std**4)
    for axis, n in ((1, w.shape[1]), (0, w.shape[0])):
        squares = (w**2).mean(axis)
        expected = np.sqrt((kurtosis - 1) / n)
        if squares.std() / squares.mean() > 1.5 * expected:
            return False
    return True


def nothing_there(s: Subject) -> bool:
    """Whether the folder holds no EAGLE-3 drafter at all: nothing that only such a drafter has."""
    return not {"fc.weight", "midlayer.hidden_norm.weight"} & set(s.folder.tensors)
