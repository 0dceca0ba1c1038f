"""The package as a whole: what importing it does, and which way its imports go."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_kvplus

PACKAGE = Path(hf_kvplus.__file__).parent
EXTRAS = (
    "numba",
    "triton",
    "matplotlib",
    "datasets",
    "evaluate",
    "accelerate",
    "typer",
    "rich",
    "gguf",
    "hqq",
    "optimum",
    "xxhash",
)

# A module may import from those named before it, never from those after.
ORDER = [
    "registry",
    "checks",
    "projections",
    "policies",
    "codecs",
    "stores",
    "recipes",
    "layer",
    "layer_build",
    "caches",
    "presets",
    "strategies",
    "memory",
]
ORDER += ["probe", "estimate", "devices", "compute", "recommend"]


def test_importing_starts_nothing_and_needs_no_extra():
    program = (
        "import sys, torch, transformers.generation, transformers.modeling_utils, transformers.cache_utils as utils\n"
        "before, types = set(sys.modules), dict(utils.DYNAMIC_LAYER_TYPE_MAPPING)\n"
        "import hf_kvplus\n"
        f"extras = [name for name in {EXTRAS} if name in set(sys.modules) - before]\n"
        "assert not extras, extras\n"
        "assert utils.DYNAMIC_LAYER_TYPE_MAPPING == types\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def imported_parts(path: Path) -> set[str]:
    """Returns the first parts below hf_kvplus that a file imports from anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hf_kvplus."):
            names.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("hf_kvplus.")}
    return names


@pytest.mark.parametrize("part", ORDER)
def test_imports_go_one_way(part):
    files = [PACKAGE / f"{part}.py"] if (PACKAGE / f"{part}.py").exists() else sorted((PACKAGE / part).rglob("*.py"))
    assert files
    later = set(ORDER[ORDER.index(part) + 1 :])
    assert not {(file.name, name) for file in files for name in imported_parts(file) & later}


def test_the_package_never_imports_its_evaluation():
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            module = getattr(node, "module", None) or ""
            assert not module.startswith("kvplus_eval"), file
            assert not [alias for alias in getattr(node, "names", []) if alias.name.startswith("kvplus_eval")], file


def test_every_public_name_exists_and_is_documented():
    for name in hf_kvplus.__all__:
        assert getattr(hf_kvplus, name).__doc__, name
