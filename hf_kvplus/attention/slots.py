"""Where the CPU kernel finds its arguments: places in one array of 64-bit integers.

Addresses and strides are in bytes. Names that end in `_B`, `_H` and `_Q` are the strides of batch rows, heads and
queries of the tensor named before.
"""

# SELF: address of the array itself. NEXT_TASK: a counter, 0 at the start. SHARES_DONE: address of a counter for each
# (batch row, KV head), 0 before and after a run. SHARES: parts that a head's tiles are divided into.
SELF, NEXT_TASK, SHARES_DONE, TASKS, SHARES = range(5)

# SCALING and SOFTCAP (0 for none) are float32. QUERIES_PER_HEAD: query heads that share a KV head.
KV_HEADS, QUERIES_PER_HEAD, QUERIES, ROW_CHUNKS, SCALING, SOFTCAP = range(5, 11)

# Columns: the first that is visible, the one behind the last, the first that is still stored, the one behind the last
# packed one. Then lengths in tiles and tokens. PADDING: address of a count for each batch row.
VISIBLE, TOTAL, FIRST_STORED, PACKED_TOKENS = range(11, 15)
FIRST_TILE, PACKED_TILES, RECENT_TOKENS, RECENT_TILES, SINK_TOKENS, SINK_TILES, PADDING = range(15, 22)

QUERY, QUERY_B, QUERY_H, QUERY_Q, OUTPUT, OUTPUT_B, OUTPUT_H, OUTPUT_Q = range(22, 30)

# MASK and SINK_LOGITS are 0 where there is none.
MASK, MASK_B, MASK_Q, SINK_LOGITS = range(30, 34)

# What the shares of a head leave for the last one to add up.
PARTIAL_OUTPUT, PARTIAL_SUMS = range(34, 36)

# Packed tensors. FACTOR: half precision, one for each token of a key block or each channel of a value block.
KEY_CODES, KEY_CODES_B, KEY_CODES_H, KEY_SCALE, KEY_SCALE_B, KEY_SCALE_H = range(36, 42)
KEY_ZERO, KEY_ZERO_B, KEY_ZERO_H, KEY_FACTOR, KEY_FACTOR_B, KEY_FACTOR_H = range(42, 48)
VALUE_CODES, VALUE_CODES_B, VALUE_CODES_H, VALUE_SCALE, VALUE_SCALE_B, VALUE_SCALE_H = range(48, 54)
VALUE_ZERO, VALUE_ZERO_B, VALUE_ZERO_H, VALUE_FACTOR, VALUE_FACTOR_B, VALUE_FACTOR_H = range(54, 60)

# Tensors at full precision.
RECENT_KEYS, RECENT_KEYS_B, RECENT_KEYS_H, RECENT_VALUES, RECENT_VALUES_B, RECENT_VALUES_H = range(60, 66)
SINK_KEYS, SINK_KEYS_B, SINK_KEYS_H, SINK_VALUES, SINK_VALUES_B, SINK_VALUES_H = range(66, 72)

# Addresses of square float32 matrices: queries times KEY_ROTATION fit the packed keys, packed output times
# VALUE_ROTATION is in the model's own channels.
KEY_ROTATION, VALUE_ROTATION = range(72, 74)

COUNT = 74
