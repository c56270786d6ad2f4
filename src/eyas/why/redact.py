"""Make a snapshot fit to attach to an issue: no names of people and hosts, no addresses, no tokens; the same judgement.

Log bytes keep their length, so offsets, sizes and buffer edges stay true.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

_HOME = re.compile(r"(?<=/home/)[^/\s'\":]+|(?<=/Users/)[^/\s'\":]+")
_ADDRESS = re.compile(r"\b(?!127\.0\.0\.1\b|0\.0\.0\.0\b)(?:\d{1,3}\.){3}\d{1,3}\b")
_MAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.]+")
_TOKENS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\b(?:sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA|ASIA|ya29\.|eyJ)[\w\-.=]{8,}"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
    r"|(?i:(?:api[_-]?key|token|secret|passw(?:or)?d|credential)s?[\"']?\s*[=:]\s*[\"']?)[^\s\"',]{6,}"
    r"|\b[0-9a-f]{40}\b"
)
_KEEP = {"root", "user", "localhost", "nobody", "home", "work", "data", "python", "train", "job"}


def redact(snap: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without what identifies people, machines or accounts."""
    names = _names(snap)
    done: dict[str, Any] = _walk(snap, names)
    meta = done.setdefault("meta", {})
    meta["redacted"] = True
    for entry in done.get("logs") or []:
        for part in ("head", "tail"):
            if (entry.get(part) or {}).get("b64"):
                entry[part]["b64"] = _blob(entry[part]["b64"], names)
    return done


def _names(snap: Mapping[str, Any]) -> dict[str, str]:
    """Literal names to replace: users, the host, what was asked for."""
    meta, target = snap.get("meta") or {}, snap.get("target") or {}
    found: dict[str, str] = {}
    users = {meta.get("user")} | {p.get("user") for p in (snap.get("processes") or {}).values()}
    for number, user in enumerate(sorted({str(u) for u in users if u} - _KEEP)):
        found[user] = f"user{number or ''}"
    for host in (meta.get("host"), target.get("host")):
        if host and str(host) not in _KEEP:
            found[str(host)] = "host"
            found.setdefault(str(host).split(".", 1)[0], "host")
    return {name: word for name, word in found.items() if len(name) > 2}


def _text(text: str, names: Mapping[str, str], fixed: bool = False) -> str:
    """`fixed`: every replacement keeps the length of what it replaces."""

    def put(word: str) -> Any:
        return lambda m: (word * len(m.group(0)))[: len(m.group(0))] if fixed else word

    text = _TOKENS.sub(put("#" if fixed else "[token]"), text)
    text = _MAIL.sub(put("m" if fixed else "[mail]"), text)
    text = _HOME.sub(put("u" if fixed else "user"), text)
    text = _ADDRESS.sub(lambda m: _mask_address(m.group(0)), text)
    for name, word in names.items():
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", put("h" if fixed else word), text)
    return text


def _mask_address(address: str) -> str:
    """Same length, same number of parts; still told apart by their last digits."""
    return re.sub(r"\d", "0", address[:-1]) + address[-1]


def _walk(value: Any, names: Mapping[str, str], key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {_text(str(k), names): _walk(v, names, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_walk(v, names, key) for v in value]
    if isinstance(value, str) and key not in ("b64", "boot_id", "schema"):
        return _text(value, names)
    return value


def _blob(b64: str, names: Mapping[str, str]) -> str:
    raw = base64.b64decode(b64)
    text = raw.decode("latin-1")  # one character a byte: lengths stay
    return base64.b64encode(_text(text, names, fixed=True).encode("latin-1")).decode()
