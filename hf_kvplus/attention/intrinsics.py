"""Functions that write LLVM instructions, made into intrinsics that Numba code can call.

Each takes addresses (64-bit integers) and constants, and writes instructions with explicit vectors (see `vectors.py`).
Constants become part of the compiled code, so every loop has a fixed length.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hf_kvplus.attention.vectors import FLOAT, Builder, Value, constant, pointer

# As in `hf_kvplus.codecs.log_scale`.
CHANNEL_STEPS, TOKEN_STEPS = 8, 16
ZERO = constant(FLOAT, 0.0)
LOWEST = constant(FLOAT, float("-inf"))
# Whether blocks are asked for while the ones before them are worked on.
AHEAD = True
# Tokens, where states aren't packed.
DENSE_AHEAD = 8
STATE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def inner_loop(
    runtime: str, constants: str = "", returns: Any = types.none, *, inline: bool = False
) -> Callable[[Callable], Any]:
    """Turns a function that writes instructions into an intrinsic.

    Each combination of constants becomes a function of its own in the compiled code.

    Args:
        runtime: Names of the arguments known at run time. Those that end in `_at` are addresses, those that begin with
            `float_` are float32, the others 64-bit integers.
        constants: Names of the arguments behind them, which are compile-time constants.
        returns: The Numba type that the intrinsic returns.
        inline: Whether the instructions go into the caller instead.

    Returns:
        A decorator for a function that takes the builder, then a pointer or value per run-time argument, then the
        constants.
    """
    names, fixed_names = runtime.split(), constants.split()
    declared = [types.float32 if name.startswith("float_") else types.int64 for name in names]

    def decorate(write: Callable) -> Any:
        def write_all(builder: Builder, values: Any, fixed: list[Any]) -> Value:
            pairs = zip(names, values, strict=True)
            prepared = [pointer(builder, value) if name.endswith("_at") else value for name, value in pairs]
            return write(builder, *prepared, *fixed)

        def typing(context: Any, *given: Any) -> tuple[Any, Callable]:
            fixed = [type_.literal_value for type_ in given[len(names) :]]

            def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
                values = values[: len(names)]
                if inline:
                    result = write_all(builder, values, fixed)
                else:
                    name = ".".join(["kvplus", write.__name__, *map(str, fixed)])
                    returned = ir.VoidType() if returns is types.none else context.get_value_type(returns)
                    function = _find_function(
                        builder.module, name, returned, [value.type for value in values], write_all, fixed
                    )
                    result = builder.call(function, values)
                return context.get_dummy_value() if returns is types.none else result

            return returns(*declared, *given[len(names) :]), generate

        parameters = ["context", *names, *fixed_names]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        typing.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in parameters])
        typing.__name__, typing.__doc__ = write.__name__, write.__doc__
        return intrinsic(prefer_literal=True)(typing)

    return decorate


def _find_function(
    module: ir.Module, name: str, returned: ir.Type, arguments: list[ir.Type], write_all: Callable, fixed: list[Any]
) -> ir.Function:
    """Returns the function `name` of a module; writes it on first use."""
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(returned, arguments), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    result = write_all(builder, function.args, fixed)
    if isinstance(returned, ir.VoidType):
        builder.ret_void()
    else:
        builder.ret(result)
    return function
