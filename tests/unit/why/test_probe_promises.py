"""The probe runs anywhere and changes nothing: what can be read off its source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from eyas.why import probe

SOURCE = Path(probe.__file__).read_text("utf-8")


def test_it_parses_as_python_3_6() -> None:
    ast.parse(SOURCE, feature_version=(3, 6))


def test_it_uses_no_library_newer_than_3_6_unguarded() -> None:
    newer = {
        "preadv",
        "pidfd_open",
        "time_ns",
        "monotonic_ns",
        "removeprefix",
        "removesuffix",
        "walk_packages",
        "cached_property",
        "math.prod",
        "posix_spawn",
    }
    used = {node.attr for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.Attribute)} & newer
    assert used <= {"preadv"}, used
    assert 'hasattr(os, "preadv")' in SOURCE


def test_it_imports_the_standard_library_only() -> None:
    names = set()
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    assert names <= set(sys.stdlib_module_names), names - set(sys.stdlib_module_names)


def test_it_opens_nothing_for_writing_and_signals_only_its_children() -> None:
    tree = ast.parse(SOURCE)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name != "open", "the builtin open is not used at all"
            assert name not in (
                "os.mkdir",
                "os.makedirs",
                "os.unlink",
                "os.remove",
                "os.rename",
                "os.replace",
                "os.chmod",
                "os.utime",
                "os.rmdir",
                "os.link",
            )
            if name == "os.open":
                flags = ast.unparse(node.args[1])
                assert "O_WRONLY" not in flags and "O_CREAT" not in flags and "O_TRUNC" not in flags
                assert "O_RDWR" not in flags or ast.unparse(node.args[0]) == "os.devnull"
            if name in ("os.kill", "os.killpg", "kill"):
                assert ast.unparse(node.args[0]) in ("self.pid", "child"), ast.unparse(node)


def test_asking_why_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, eyas.why, eyas.why.command, eyas.why.judge, eyas.why.answer; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
