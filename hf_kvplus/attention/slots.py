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

# Packed tensors. SCALE and ZERO: of the affine codec; of the dual-scale codec SCALE is the channel scale, ZERO the
# token scale. LEVELS: address of 16 float32 numbers that codes stand for.
KEY_CODES, KEY_CODES_B, KEY_CODES_H, KEY_SCALE, KEY_SCALE_B, KEY_SCALE_H = range(36, 42)
KEY_ZERO, KEY_ZERO_B, KEY_ZERO_H, KEY_MEAN, KEY_MEAN_B, KEY_MEAN_H = range(42, 48)
KEY_MEAN_SCALE, KEY_MEAN_SCALE_B, KEY_MEAN_SCALE_H, KEY_LEVELS = range(48, 52)
VALUE_CODES, VALUE_CODES_B, VALUE_CODES_H, VALUE_SCALE, VALUE_SCALE_B, VALUE_SCALE_H = range(52, 58)
VALUE_ZERO, VALUE_ZERO_B, VALUE_ZERO_H, VALUE_MEAN, VALUE_MEAN_B, VALUE_MEAN_H = range(58, 64)
VALUE_MEAN_SCALE, VALUE_MEAN_SCALE_B, VALUE_MEAN_SCALE_H, VALUE_LEVELS = range(64, 68)

# Tensors at full precision.
RECENT_KEYS, RECENT_KEYS_B, RECENT_KEYS_H, RECENT_VALUES, RECENT_VALUES_B, RECENT_VALUES_H = range(68, 74)
SINK_KEYS, SINK_KEYS_B, SINK_KEYS_H, SINK_VALUES, SINK_VALUES_B, SINK_VALUES_H = range(74, 80)

# Addresses of square float32 matrices: queries times KEY_ROTATION fit the packed keys, packed output times
# VALUE_ROTATION is in the model's own channels. OCTAVES: address of two tables of 16 float32 numbers, the powers of
# two from 0 to 1 in steps of an eighth (twice) and of a sixteenth.
KEY_ROTATION, VALUE_ROTATION, OCTAVES = range(80, 83)

# Tiles that this run is about: the first, and the one behind the last. A share that begins earlier goes on from where
# an earlier run left it, one that ends later leaves it for a later run; STATES: address of room for that, by task.
PIECE_FIRST, PIECE_LAST, STATES = range(83, 86)

# Sinks before a window, as its queries see them, and the column that the mask's first slot stands for.
LEAD_KEYS, LEAD_KEYS_B, LEAD_KEYS_H, LEAD_VALUES, LEAD_VALUES_B, LEAD_VALUES_H = range(86, 92)
LEAD_TOKENS, LEAD_TILES, FIRST_SLOT = range(92, 95)

# Each 0 where there is none. LOG_SUMS: address of room for a float32 number per output vector (batch row, query head,
# query), the logarithm of the sum of its weights. EARLIER, EARLIER_LOG_SUMS: float32 outputs found elsewhere, in
# the same order, and the logarithms of their sums; they are added up with what is found here.
LOG_SUMS, EARLIER, EARLIER_LOG_SUMS = range(95, 98)

# Turning means of keys, see `hf_kvplus.codecs.rotary_mean`: numbers of pairs, means, and the addresses of the pairs'
# cosines and sines, float32 (pairs, 2, tokens), and of their channels, int32 (pairs, 2).
KEY_PAIR, KEY_PAIR_B, KEY_PAIR_H, KEY_PAIR_MEAN, KEY_PAIR_MEAN_B, KEY_PAIR_MEAN_H = range(98, 104)
KEY_TURNS, KEY_TURN_CHANNELS = range(104, 106)

COUNT = 106
