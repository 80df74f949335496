"""What runs on a GPU, in Triton: one pass over its memory, a program a few rows.

The torch code beside the callers is the reference and gives the same bytes. Whatever is rounded is rounded as there: no
product is fused with a sum (`gpu.OPTIONS`), divisions are IEEE's (`tl.div_rn`), and values that are too small for a
normal float32 have no part in any result. Arguments in capitals are constants of a compiled kernel.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)
SMALLEST = tl.constexpr(27 << 23)  # 2**-100, below which a scale is zero
OFFSET = tl.constexpr(332)  # of the exponents of 8-bit scales: `packing.encode_scale`
ROUND = tl.constexpr(8388608.0)  # 2**23: what is added to it is rounded to an integer, half to even, in the low bits


@triton.jit
def _magnitude(x):
    """The bits of absolute values: as integers in the same order, NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def _write_scale(scale, out, there, SCALE_BITS: tl.constexpr):
    """`packing.encode_scale` of the bits of scales [rows]; returns what they decode to."""
    is_finite = scale < INFINITY
    scale = tl.where(scale < SMALLEST, 0, scale)
    if SCALE_BITS == 32:
        code = tl.where(is_finite, scale, NAN)
        decoded = code
    elif SCALE_BITS == 16:
        code = tl.where(is_finite, (scale + 0xFFFF) >> 16, NAN >> 16)
        decoded = code << 16
    else:
        code = tl.minimum(tl.maximum(((scale + 0x1FFFFF) >> 21) - OFFSET, 0), 255)
        code = tl.where(is_finite, code, 255)
        decoded = _minifloat(code)
    for i in tl.static_range(SCALE_BITS // 8):
        tl.store(out + i, ((code >> (8 * i)) & 255).to(tl.uint8), there)
    return decoded.to(tl.float32, bitcast=True)


@triton.jit
def _read_scale(payload, there, SCALE_BITS: tl.constexpr):
    """`packing.decode_scale` of scales [rows]."""
    code = tl.load(payload, there, 0).to(tl.int32)
    for i in tl.static_range(1, SCALE_BITS // 8):
        code |= tl.load(payload + i, there, 0).to(tl.int32) << (8 * i)
    if SCALE_BITS == 16:
        code = code << 16
    elif SCALE_BITS == 8:
        code = _minifloat(code)
    return code.to(tl.float32, bitcast=True)


@triton.jit
def _minifloat(code):
    """The bits of a float32 of 8-bit scales."""
    return tl.where(code == 0, 0, tl.where(code == 255, NAN, (code + OFFSET) << 21))


@triton.jit
def _half_range(BITS: tl.constexpr):
    return 127.0 if BITS == 8 else (7.0 if BITS == 4 else 1.5)


@triton.jit
def _tile(num_rows, PACKED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The rows of this program, which of them there are, the bytes of a packed row, and which of those there are."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there, column = row < num_rows, tl.arange(0, WIDTH)[None, :]
    return row[:, None], there[:, None], column, there[:, None] & (column < PACKED)


@triton.jit
def quantize(
    rows,
    payload,
    residual,
    num_rows,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    SCALE_BITS: tl.constexpr,
    WITH_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Encode as `Quantize` does; `residual` gets what that loses, if it is asked for."""
    PER_BYTE: tl.constexpr = 8 // BITS
    PACKED: tl.constexpr = BLOCK // PER_BYTE
    row, there, column, here = _tile(num_rows, PACKED, ROWS, WIDTH)
    values = row * BLOCK + column
    largest = tl.zeros([ROWS, WIDTH], tl.int32)
    for i in tl.static_range(PER_BYTE):
        largest = tl.maximum(largest, _magnitude(tl.load(rows + values + i * PACKED, here, 0.0)))
    scale = tl.max(largest, axis=1, keep_dims=True)
    if BITS == 2:
        scale = (scale.to(tl.float32, bitcast=True) * 0.75).to(tl.int32, bitcast=True)
    payload += row * (SCALE_BITS // 8 + PACKED)
    scale = _write_scale(scale, payload, there, SCALE_BITS)
    half = _half_range(BITS)
    inverse = tl.where(scale > 0, tl.div_rn(tl.full([ROWS, 1], half, tl.float32), scale), 0.0)
    packed = tl.zeros([ROWS, WIDTH], tl.int32)
    for i in tl.static_range(PER_BYTE):
        x = tl.load(rows + values + i * PACKED, here, 0.0)
        step = tl.where(inverse > 0, tl.minimum(tl.maximum(x * inverse + half, 0.0), 2 * half), half)
        code = (step + ROUND).to(tl.int32, bitcast=True) & 255
        packed |= code << (BITS * i)
        if WITH_RESIDUAL:
            tl.store(residual + values + i * PACKED, x - _dequantized(code, scale, BITS), here)
    tl.store(payload + SCALE_BITS // 8 + column, packed.to(tl.uint8), here)


@triton.jit
def _dequantized(code, scale, BITS: tl.constexpr):
    half = tl.full(code.shape, _half_range(BITS), tl.float32)
    return tl.div_rn(code.to(tl.float32) - half, half) * scale


@triton.jit
def dequantize(
    payloads,
    weights,
    rows,
    num_rows,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    SCALE_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The sum of weight x what a payload decodes to, over all payloads."""
    PER_BYTE: tl.constexpr = 8 // BITS
    PACKED: tl.constexpr = BLOCK // PER_BYTE
    row, there, column, here = _tile(num_rows, PACKED, ROWS, WIDTH)
    begin = row * (SCALE_BITS // 8 + PACKED)
    for i in tl.static_range(PER_BYTE):
        code, scale = _read(payloads[0] + begin, there, column, here, i, BITS, SCALE_BITS)
        total = _dequantized(code, scale, BITS) * weights[0]
        for k in tl.static_range(1, len(payloads)):
            code, scale = _read(payloads[k] + begin, there, column, here, i, BITS, SCALE_BITS)
            total += _dequantized(code, scale, BITS) * weights[k]
        tl.store(rows + row * BLOCK + column + i * PACKED, total, here)


@triton.jit
def _read(payload, there, column, here, i: tl.constexpr, BITS: tl.constexpr, SCALE_BITS: tl.constexpr):
    """Strip `i` of the codes in a payload, and their scales."""
    packed = tl.load(payload + SCALE_BITS // 8 + column, here, 0).to(tl.int32)
    return (packed >> (BITS * i)) & ((1 << BITS) - 1), _read_scale(payload, there, SCALE_BITS)


@triton.jit
def float4_encode(
    rows,
    payload,
    residual,
    table,
    num_rows,
    BLOCK: tl.constexpr,
    SCALE_BITS: tl.constexpr,
    WITH_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Encode as `Float4` does; `table` has 7 midpoints between magnitudes, then the values of the 16 codes."""
    PACKED: tl.constexpr = BLOCK // 2
    row, there, column, here = _tile(num_rows, PACKED, ROWS, WIDTH)
    values = row * BLOCK + column
    low = tl.load(rows + values, here, 0.0)
    high = tl.load(rows + values + PACKED, here, 0.0)
    largest = tl.max(tl.maximum(_magnitude(low), _magnitude(high)), axis=1, keep_dims=True)
    payload += row * (SCALE_BITS // 8 + PACKED)
    scale = _write_scale(largest, payload, there, SCALE_BITS)
    inverse = tl.where(scale > 0, tl.div_rn(tl.full([ROWS, 1], 1.0, tl.float32), scale), 0.0)
    low_code, high_code = _float4_code(low, inverse, table), _float4_code(high, inverse, table)
    tl.store(payload + SCALE_BITS // 8 + column, (low_code | (high_code << 4)).to(tl.uint8), here)
    if WITH_RESIDUAL:
        tl.store(residual + values, low - tl.load(table + 7 + low_code) * scale, here)
        tl.store(residual + values + PACKED, high - tl.load(table + 7 + high_code) * scale, here)


@triton.jit
def _float4_code(x, inverse, table):
    magnitude = tl.abs(x) * inverse
    code = tl.where(x < 0, 8, 0)
    for k in tl.static_range(7):
        code += (magnitude >= tl.load(table + k)).to(tl.int32)
    return code


@triton.jit
def float4_decode(
    payloads,
    weights,
    rows,
    table,
    num_rows,
    BLOCK: tl.constexpr,
    SCALE_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The sum of weight x what a payload decodes to, over all payloads."""
    PACKED: tl.constexpr = BLOCK // 2
    row, there, column, here = _tile(num_rows, PACKED, ROWS, WIDTH)
    begin = row * (SCALE_BITS // 8 + PACKED)
    for i in tl.static_range(2):
        code, scale = _read(payloads[0] + begin, there, column, here, i, 4, SCALE_BITS)
        total = tl.load(table + 7 + code) * scale * weights[0]
        for k in tl.static_range(1, len(payloads)):
            code, scale = _read(payloads[k] + begin, there, column, here, i, 4, SCALE_BITS)
            total += tl.load(table + 7 + code) * scale * weights[k]
        tl.store(rows + row * BLOCK + column + i * PACKED, total, here)


@triton.jit
def largest(rows, indices, num_rows, CHUNK: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The KEEP-th largest magnitude of a chunk is found bit by bit; of equal ones the first are kept."""
    row, _there, column, here = _tile(num_rows, CHUNK, ROWS, WIDTH)
    magnitude = tl.where(here, _magnitude(tl.load(rows + row * CHUNK + column, here, 0.0)), -1)
    threshold = tl.zeros([ROWS, 1], tl.int32)
    for i in range(31):
        raised = threshold | (1 << (30 - i))
        count = tl.sum((magnitude >= raised).to(tl.int32), axis=1, keep_dims=True)
        threshold = tl.where(count >= KEEP, raised, threshold)
    above, equal = (magnitude > threshold).to(tl.int32), (magnitude == threshold).to(tl.int32)
    ties = KEEP - tl.sum(above, axis=1, keep_dims=True)
    kept = above | (equal & (tl.cumsum(equal, axis=1) <= ties).to(tl.int32))
    place = row * KEEP + tl.cumsum(kept, axis=1) - 1
    tl.store(indices + place, (column + tl.zeros([ROWS, 1], tl.int32)).to(tl.int64), here & (kept != 0))


@triton.jit
def outer_sgd(
    anchor,
    gradient,
    param,
    momentum,
    left,
    num_values,
    lr,
    mu,
    share,
    other_share,
    HAS_MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    FORM: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Move anchors as `outer_sgd.py` says.

    `share` is the parameter's in a mixture, or of its progress; `other_share` the anchor's in a mixture, or of `left`.
    """
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    here = i < num_values
    before = tl.load(anchor + i, here, 0.0)
    step = tl.load(gradient + i, here, 0.0)
    if HAS_MOMENTUM:
        speed = tl.load(momentum + i, here, 0.0) * mu + step
        tl.store(momentum + i, speed, here)
        step = step + mu * speed if NESTEROV else speed
    now = before - lr * step
    tl.store(anchor + i, now, here)
    if FORM == 1:
        value = tl.load(param + i, here, 0.0).to(tl.float32)
        now = tl.where(share < 0.5, now + share * (value - now), value - (value - now) * other_share)
    elif FORM == 2:
        value = tl.load(param + i, here, 0.0).to(tl.float32)
        now = now + share * (value - (before - other_share * tl.load(left + i, here, 0.0)))
    tl.store(param + i, now.to(param.dtype.element_ty), here)
