"""The kernels in Triton's own language. They walk the tables of `pallas_kernels.visits` and know no modes, documents or lengths.

Arrays are contiguous: q, out, d_out, dq [B, T, N, H]; k, v, dk, dv [B, S, K, H]; runs i32[B, h, R, 5], words i32[B, h, R, WIDTH].
Parameters in capitals are compiled in: shapes too, since XLA compiles a program for each shape anyway and the compiler then knows every
stride. Where the plan has no bitmap, HAS_WORDS is False and `words` is any pointer.

Offsets of rows are 64 bits wide, as arrays may have more than 2^31 elements; inside a tile 32 are enough.
"""

# pyright: reportAttributeAccessIssue=false, reportMissingImports=false
# The type checker takes triton, which requirements.txt leaves out, for the package beside this one.
import triton
import triton.language as tl


@triton.jit
def _block(step, word, start, length, second, HAS_WORDS: tl.constexpr):
    """The block of step number `step`; of a row of bits the lowest of `word`, whose step is not asked for."""
    block = tl.where(step < length, start + step, second + step - length)
    if HAS_WORDS:
        # The exponent of a power of two, which is exact in float32, is the number of its bit.
        lowest = (word ^ (word & (word - 1))).to(tl.float32)
        listed = 16 * (word >> 16) + (lowest.to(tl.int32, bitcast=True) >> 23) - 127
        block = tl.where(length < 0, listed, block)
    return block


@triton.jit
def _advance(words, slot, word, WIDTH: tl.constexpr, HAS_WORDS: tl.constexpr):
    """(slot, word) on the next set bit of a row: the index of the current word and what is left of it."""
    if HAS_WORDS:
        rest = word & (word - 1)
        used_up = (rest & 0xFFFF) == 0
        # The next word is read always and used where this one is used up: a branch would keep the loop from being pipelined. The last
        # set bit is left as well, where no word may follow.
        following = tl.load(words + tl.minimum(slot + 1, WIDTH - 1))
        slot = tl.where(used_up, slot + 1, slot)
        word = tl.where(used_up, following, rest)
    return slot, word


@triton.jit
def _next_tile(words, slot, word, part, PARTS: tl.constexpr, WIDTH: tl.constexpr, HAS_WORDS: tl.constexpr):
    """(slot, word) after tile `part` of a block's PARTS."""
    new_slot, new_word = _advance(words, slot, word, WIDTH, HAS_WORDS)
    if HAS_WORDS and PARTS > 1:
        new_slot = tl.where(part == PARTS - 1, new_slot, slot)
        new_word = tl.where(part == PARTS - 1, new_word, word)
    return new_slot, new_word


@triton.jit
def _query_program(
    order, QUERIES: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, TABLES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """(entry, KV head, query head, first query, row of the tables) of a program that has a tile of queries.

    Programs start in the order of their numbers, so heads with the most work come first, and within a head the last queries, which see
    the most; the query heads that read the same keys are neighbours.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILES: tl.constexpr = QUERIES // TILE
    program = tl.program_id(0)
    head_of_entry = tl.load(order + program // (TILES * GROUP))
    entry, kv_head = head_of_entry // KV_HEADS, head_of_entry % KV_HEADS
    head = kv_head * GROUP + program % GROUP
    first_query = (TILES - 1 - program % (TILES * GROUP) // GROUP) * TILE
    table = kv_head if TABLES == KV_HEADS else head
    row = (entry * TABLES + table).to(tl.int64) * (QUERIES // BLOCK) + first_query // BLOCK
    return entry, kv_head, head, first_query, row


@triton.jit
def _row(runs, words, row, WIDTH: tl.constexpr, HAS_WORDS: tl.constexpr):
    """(start, length, second, count, pointer to the row's words, first word) of a row of the tables."""
    runs += row * 5
    words += row * WIDTH
    word = tl.load(words) if HAS_WORDS else 0
    return tl.load(runs), tl.load(runs + 1), tl.load(runs + 2), tl.load(runs + 3), words, word


@triton.jit
def _reached(block, diagonal, offset, BLOCK: tl.constexpr, TILE: tl.constexpr, KEY_TILE: tl.constexpr):
    """How many key tiles of a row's last block a tile of queries walks: on the diagonal those that begin at or before its last query."""
    return tl.where(block == diagonal, (offset + TILE + KEY_TILE - 1) // KEY_TILE, BLOCK // KEY_TILE)


@triton.jit
def _attend(
    query, k, v, offsets, peak, total, acc, position, first_key,
    FACTOR: tl.constexpr, ROW: tl.constexpr, KEY_TILE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(peak, total, acc) with one more tile of keys. k, v: pointers to the head's first key."""
    at = first_key.to(tl.int64) * ROW
    scores = tl.dot(query, tl.trans(tl.load(k + at + offsets)), input_precision=PRECISION)
    if MASKED:
        scores = tl.where(first_key + tl.arange(0, KEY_TILE)[None, :] <= position[:, None], scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1) * FACTOR)
    p = tl.math.exp2(scores * FACTOR - new_peak[:, None])
    decay = tl.math.exp2(peak - new_peak)
    total = total * decay + tl.sum(p, axis=1)
    value = tl.load(v + at + offsets)
    acc = tl.dot(p.to(value.dtype), value, acc * decay[:, None], input_precision=PRECISION)
    return new_peak, total, acc


@triton.jit
def forward(
    q, k, v, lengths, order, runs, words, out, lse,
    FACTOR: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    TABLES: tl.constexpr, WIDTH: tl.constexpr, HAS_WORDS: tl.constexpr, BLOCK: tl.constexpr, QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out and lse f32[B, T, N] of one tile of queries of one head. FACTOR: scale log2(e). lengths i32[B], order i32[B K]."""
    PARTS: tl.constexpr = BLOCK // KEY_TILE
    ROW: tl.constexpr = KV_HEADS * DIM
    entry, kv_head, head, first_query, row = _query_program(order, QUERIES, HEADS, KV_HEADS, TABLES, BLOCK, QUERY_TILE)
    start, length, second, count, words, word = _row(runs, words, row, WIDTH, HAS_WORDS)
    columns = tl.arange(0, DIM)
    tokens = entry.to(tl.int64) * QUERIES + first_query
    queries = (tokens * HEADS + head) * DIM + tl.arange(0, QUERY_TILE)[:, None] * (HEADS * DIM) + columns[None, :]
    query = tl.load(q + queries)
    head_of_keys = (entry.to(tl.int64) * KEYS * KV_HEADS + kv_head) * DIM
    k += head_of_keys
    v += head_of_keys
    offsets = tl.arange(0, KEY_TILE)[:, None] * ROW + columns[None, :]
    first_position = first_query + (KEYS - QUERIES)
    position = first_position + tl.arange(0, QUERY_TILE)
    peak = tl.full([QUERY_TILE], -float("inf"), tl.float32)
    total = tl.zeros([QUERY_TILE], tl.float32)
    acc = tl.zeros([QUERY_TILE, DIM], tl.float32)
    slot = 0
    # Blocks ascend, so only a row's last can be the diagonal.
    last = tl.maximum(count - 1, 0)
    for tile in tl.range(0, last * PARTS, num_stages=STAGES):
        part = tile % PARTS
        first_key = _block(tile // PARTS, word, start, length, second, HAS_WORDS) * BLOCK + part * KEY_TILE
        peak, total, acc = _attend(
            query, k, v, offsets, peak, total, acc, position, first_key, FACTOR, ROW, KEY_TILE, False, PRECISION
        )  # fmt: skip
        slot, word = _next_tile(words, slot, word, part, PARTS, WIDTH, HAS_WORDS)
    block = _block(last, word, start, length, second, HAS_WORDS)
    parts = _reached(block, first_position // BLOCK, first_position % BLOCK, BLOCK, QUERY_TILE, KEY_TILE)
    for part in tl.range(0, tl.where(count > 0, parts, 0), num_stages=1):
        first_key = block * BLOCK + part * KEY_TILE
        peak, total, acc = _attend(
            query, k, v, offsets, peak, total, acc, position, first_key, FACTOR, ROW, KEY_TILE, True, PRECISION
        )  # fmt: skip
    # Rows beyond the length and rows that see nothing: outputs are uninitialised memory until written.
    seen = (total > 0) & (position < tl.load(lengths + entry))
    total = tl.where(seen, total, 1.0)
    result = tl.where(seen[:, None], acc / total[:, None], 0.0)
    tl.store(out + queries, result.to(out.dtype.element_ty))
    LN_2: tl.constexpr = 0.6931471805599453
    statistic = tl.where(seen, (peak + tl.math.log2(total)) * LN_2, -float("inf"))
    tl.store(lse + (tokens + tl.arange(0, QUERY_TILE)) * HEADS + head, statistic)


@triton.jit
def _query_gradient(
    query, d_output, k, v, offsets, row_lse, row_delta, acc, position, first_key,
    FACTOR: tl.constexpr, ROW: tl.constexpr, KEY_TILE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc with one more tile of keys. k, v: pointers to the head's first key."""
    at = first_key.to(tl.int64) * ROW
    key = tl.load(k + at + offsets)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * FACTOR - row_lse[:, None]
    if MASKED:
        scores = tl.where(first_key + tl.arange(0, KEY_TILE)[None, :] <= position[:, None], scores, -float("inf"))
    dp = tl.dot(d_output, tl.trans(tl.load(v + at + offsets)), input_precision=PRECISION)
    ds = tl.math.exp2(scores) * (dp - row_delta[:, None])
    return tl.dot(ds.to(key.dtype), key, acc, input_precision=PRECISION)


@triton.jit
def query_gradient(
    q, k, v, d_out, lse2, delta, order, runs, words, dq,
    SCALE: tl.constexpr, FACTOR: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, TABLES: tl.constexpr, WIDTH: tl.constexpr, HAS_WORDS: tl.constexpr, BLOCK: tl.constexpr, QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries of one head. lse2, delta: f32[B, N, T], see `row_statistics`."""
    PARTS: tl.constexpr = BLOCK // KEY_TILE
    ROW: tl.constexpr = KV_HEADS * DIM
    entry, kv_head, head, first_query, row = _query_program(order, QUERIES, HEADS, KV_HEADS, TABLES, BLOCK, QUERY_TILE)
    start, length, second, count, words, word = _row(runs, words, row, WIDTH, HAS_WORDS)
    columns = tl.arange(0, DIM)
    tokens = entry.to(tl.int64) * QUERIES + first_query
    queries = (tokens * HEADS + head) * DIM + tl.arange(0, QUERY_TILE)[:, None] * (HEADS * DIM) + columns[None, :]
    query = tl.load(q + queries)
    d_output = tl.load(d_out + queries)
    statistics = (entry * HEADS + head).to(tl.int64) * QUERIES + first_query + tl.arange(0, QUERY_TILE)
    row_lse = tl.load(lse2 + statistics)
    row_delta = tl.load(delta + statistics)
    head_of_keys = (entry.to(tl.int64) * KEYS * KV_HEADS + kv_head) * DIM
    k += head_of_keys
    v += head_of_keys
    offsets = tl.arange(0, KEY_TILE)[:, None] * ROW + columns[None, :]
    first_position = first_query + (KEYS - QUERIES)
    position = first_position + tl.arange(0, QUERY_TILE)
    acc = tl.zeros([QUERY_TILE, DIM], tl.float32)
    slot = 0
    last = tl.maximum(count - 1, 0)
    for tile in tl.range(0, last * PARTS, num_stages=STAGES):
        part = tile % PARTS
        first_key = _block(tile // PARTS, word, start, length, second, HAS_WORDS) * BLOCK + part * KEY_TILE
        acc = _query_gradient(
            query, d_output, k, v, offsets, row_lse, row_delta, acc, position, first_key, FACTOR, ROW, KEY_TILE, False, PRECISION
        )  # fmt: skip
        slot, word = _next_tile(words, slot, word, part, PARTS, WIDTH, HAS_WORDS)
    block = _block(last, word, start, length, second, HAS_WORDS)
    parts = _reached(block, first_position // BLOCK, first_position % BLOCK, BLOCK, QUERY_TILE, KEY_TILE)
    for part in tl.range(0, tl.where(count > 0, parts, 0), num_stages=1):
        first_key = block * BLOCK + part * KEY_TILE
        acc = _query_gradient(
            query, d_output, k, v, offsets, row_lse, row_delta, acc, position, first_key, FACTOR, ROW, KEY_TILE, True, PRECISION
        )  # fmt: skip
    tl.store(dq + queries, (acc * SCALE).to(dq.dtype.element_ty))


@triton.jit
def _key_gradients(
    key, value, q, d_out, lse2, delta, offsets, dk, dv, first_key, first_query,
    FACTOR: tl.constexpr, ROW: tl.constexpr, OFFSET: tl.constexpr, QUERY_TILE: tl.constexpr, KEY_TILE: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(dk, dv) with one more tile of queries. q, d_out, lse2, delta: pointers to the head's first query. OFFSET: keys before that."""
    at = first_query.to(tl.int64) * ROW
    columns = tl.arange(0, QUERY_TILE)
    query = tl.load(q + at + offsets)
    scores = tl.dot(key, tl.trans(query), input_precision=PRECISION) * FACTOR - tl.load(lse2 + first_query + columns)[None, :]
    if MASKED:
        seen = first_key + tl.arange(0, KEY_TILE)[:, None] <= first_query + OFFSET + columns[None, :]
        scores = tl.where(seen, scores, -float("inf"))
    p = tl.math.exp2(scores)
    d_output = tl.load(d_out + at + offsets)
    dv = tl.dot(p.to(d_output.dtype), d_output, dv, input_precision=PRECISION)
    dp = tl.dot(value, tl.trans(d_output), input_precision=PRECISION)
    ds = p * (dp - tl.load(delta + first_query + columns)[None, :])
    dk = tl.dot(ds.to(query.dtype), query, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def key_gradients(
    q, k, v, d_out, lse2, delta, order, runs, words, dk, dv,
    SCALE: tl.constexpr, FACTOR: tl.constexpr, BATCH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, TABLES: tl.constexpr, WIDTH: tl.constexpr, HAS_WORDS: tl.constexpr, BLOCK: tl.constexpr,
    QUERY_TILE: tl.constexpr, KEY_TILE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys of one KV head. Arguments as in `query_gradient`.

    The first keys are seen by the most queries, those of a streaming head's sink by as many as a full head's: they start first, of all
    heads, or one such program would outlast all others.
    """
    PARTS: tl.constexpr = BLOCK // QUERY_TILE
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROW: tl.constexpr = HEADS * DIM
    OFFSET: tl.constexpr = KEYS - QUERIES
    program = tl.program_id(0)
    head_of_entry = tl.load(order + program % (BATCH * KV_HEADS))
    entry, kv_head = head_of_entry // KV_HEADS, head_of_entry % KV_HEADS
    first_key = program // (BATCH * KV_HEADS) * KEY_TILE
    columns = tl.arange(0, DIM)
    head_of_keys = ((entry.to(tl.int64) * KEYS + first_key) * KV_HEADS + kv_head) * DIM
    keys = head_of_keys + tl.arange(0, KEY_TILE)[:, None] * (KV_HEADS * DIM) + columns[None, :]
    key = tl.load(k + keys)
    value = tl.load(v + keys)
    offsets = tl.arange(0, QUERY_TILE)[:, None] * ROW + columns[None, :]
    dk_sum = tl.zeros([KEY_TILE, DIM], tl.float32)
    dv_sum = tl.zeros([KEY_TILE, DIM], tl.float32)
    for g in range(GROUP):
        head = kv_head * GROUP + g
        table = kv_head if TABLES == KV_HEADS else head
        row = (entry * TABLES + table).to(tl.int64) * (KEYS // BLOCK) + first_key // BLOCK
        start, length, second, count, row_words, word = _row(runs, words, row, WIDTH, HAS_WORDS)
        head_of_queries = (entry.to(tl.int64) * QUERIES * HEADS + head) * DIM
        statistics = (entry * HEADS + head).to(tl.int64) * QUERIES
        # Blocks ascend, so only a row's first can be the diagonal; of that one, only the tiles that end at or after the first key.
        block = _block(0, word, start, length, second, HAS_WORDS)
        diagonal = block * BLOCK == first_key // BLOCK * BLOCK - OFFSET
        begin = tl.where(diagonal, first_key % BLOCK // QUERY_TILE, 0)
        for part in tl.range(begin, tl.minimum(count, 1) * PARTS, num_stages=1):
            dk_sum, dv_sum = _key_gradients(
                key, value, q + head_of_queries, d_out + head_of_queries, lse2 + statistics, delta + statistics, offsets, dk_sum, dv_sum,
                first_key, block * BLOCK + part * QUERY_TILE, FACTOR, ROW, OFFSET, QUERY_TILE, KEY_TILE, True, PRECISION,
            )  # fmt: skip
        slot, word = _advance(row_words, 0, word, WIDTH, HAS_WORDS)
        for tile in tl.range(PARTS, count * PARTS, num_stages=STAGES):
            part = tile % PARTS
            block = _block(tile // PARTS, word, start, length, second, HAS_WORDS)
            dk_sum, dv_sum = _key_gradients(
                key, value, q + head_of_queries, d_out + head_of_queries, lse2 + statistics, delta + statistics, offsets, dk_sum, dv_sum,
                first_key, block * BLOCK + part * QUERY_TILE, FACTOR, ROW, OFFSET, QUERY_TILE, KEY_TILE, False, PRECISION,
            )  # fmt: skip
            slot, word = _next_tile(row_words, slot, word, part, PARTS, WIDTH, HAS_WORDS)
    tl.store(dk + keys, (dk_sum * SCALE).to(dk.dtype.element_ty))
    tl.store(dv + keys, dv_sum.to(dv.dtype.element_ty))
