"""What the compiled encoders are told, in which order, and the numbers that they share; needs no Numba."""

from __future__ import annotations

import numpy as np

# Arguments, 64-bit integers: numbers, addresses, and strides in bytes over batch rows, heads, blocks and tokens.
# What is written has no gaps, so it needs no strides. VALID is 0, or the address of a byte for each token of each
# block of each batch row. DTYPE: 0 float32, 1 float16, 2 bfloat16.
COUNTER, TASKS, HEADS, BLOCKS, BLOCKS_PER_TASK, TOKENS, CHANNELS, NBITS, CHANNEL_MAJOR = range(9)
STATES, STATES_B, STATES_H, STATES_N, STATES_T, DTYPE, VALID, CODES = range(9, 17)
# Of dual_scale. CHANNEL_TABLES and TOKEN_TABLES: see `log_code`. EDGES: values that separate LEVELS, if TABLE.
ORDER, MATRIX, ITERATIONS, CLIPS, REFINEMENTS, CORRECT, TABLE, LEVELS, EDGES = range(17, 26)
CHANNEL_TABLES, TOKEN_TABLES, CHANNEL_SCALE, TOKEN_SCALE, MEAN, MEAN_SCALE = range(26, 32)
# Of affine. GROUPS of a line, GROUP elements each.
GROUPS, GROUP, SCALE, ZERO_POINT = range(32, 36)
# Of dual_scale with a metric: a matrix (channels, channels) for each head, see `hf_kvplus.codecs.metric`; or 0.
FACTOR, MOMENT = range(36, 38)
COUNT = 38

MOST_TOKENS, MOST_CHANNELS = 128, 256
STATES_BYTES, CODES_BYTES = 4 * MOST_TOKENS * MOST_CHANNELS, MOST_TOKENS * MOST_CHANNELS
ROW_BYTES, COLUMN_BYTES, BEST_BYTES = 4 * MOST_CHANNELS, 4 * MOST_TOKENS, 16 * MOST_CHANNELS
# Parts of a table of scales, float32 numbers each: scales by byte, the least value of each byte, then a first guess
# of the byte by the upper eight bits of a mantissa, as integers.
EDGES_AT, GUESSES_AT, STEPS_AT, TABLE_LENGTH = 256, 512, 768, 769
NOTHING, ONE, ZERO = np.float32(np.inf), np.float32(1), np.float32(0)
FLOOR, TINY = np.float32(1e-7), np.float32(2.0**-126)
MOST_CORRECTION, LEAST_CORRECTION = np.float32(1.5), np.float32(1 / 1.5)
UP = np.float32(2.0 ** (0.5 / 8))
MEAN_UNIT = np.float32(2.0 ** (0.5 / 8) / 127)
# Their products with the range of a channel are tried.
CLIP_1, CLIP_2 = np.float32(0.85), np.float32(0.7)
LEAST_TOKEN_SCALE, MOST_TOKEN_SCALE = np.float32(2.0 ** (-127 / 16)), np.float32(2.0 ** (127 / 16))
TOKENS_PER_LOGARITHM = 16
# Vectors of tokens that are corrected at once: 48 tokens of AVX-512.
TOGETHER = 3
