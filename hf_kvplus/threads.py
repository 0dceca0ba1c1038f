"""Runs a compiled function on the threads that PyTorch already has.

PyTorch's threads stay awake for a while after an operator, waiting for the next. A second pool beside them would wait
for a free core; so the kernel joins the first one, through the entry that every OpenMP program calls. Where PyTorch is
built without OpenMP (or with one that lacks this entry), plain Python threads do: a compiled function doesn't hold
the interpreter's lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch

Run = Callable[[int, int, int], None]


@lru_cache(maxsize=1)
def find_runner() -> Run:
    """Returns a function `(function address, argument address, threads)` that returns when all threads are done."""
    return _openmp_runner() or run_on_python_threads


def _openmp_runner() -> Run | None:
    """Returns a runner on PyTorch's OpenMP threads, or `None` if there are none."""
    folder = Path(torch.__file__).parent / "lib"
    for library in (*folder.glob("libtorch_cpu.so"), *folder.glob("libtorch_cpu.dylib")):
        # Looked up in the library and all that it is linked to, hence in PyTorch's own OpenMP.
        parallel = getattr(ctypes.CDLL(str(library)), "GOMP_parallel", None)
        if parallel is not None:
            parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            parallel.restype = None
            return lambda function, argument, threads: parallel(function, argument, threads, 0)
    return None


def run_on_python_threads(function: int, argument: int, threads: int) -> None:
    """Runs the function on this thread and on others of a pool."""
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    helpers = [_pool(threads).submit(call, argument) for _ in range(threads - 1)]
    call(argument)
    for helper in helpers:
        helper.result()


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    """Returns a pool with a thread less than asked for: the caller is one."""
    return ThreadPoolExecutor(max_workers=max(1, threads - 1), thread_name_prefix="kvplus")
