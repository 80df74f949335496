// Fast paths of the codecs on the CPU. The torch code beside each codec is the reference: these functions give the
// same bytes. Only exactly rounded operations in a fixed order, or sums that are exact in any order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr uint32_t kMagnitude = 0x7FFFFFFF, kInfinity = 0x7F800000;

inline uint32_t bits_of(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }
inline float float_of(uint32_t b) { float x; std::memcpy(&x, &b, 4); return x; }

// scales.py: encode_scale followed by decode_scale
float write_scale(float scale, int64_t bits, uint8_t* out) {
  uint32_t raw = bits_of(scale) & kMagnitude;
  const bool finite = raw < kInfinity;
  if (finite && scale < 0x1p-100f) raw = 0;
  if (bits == 32) {
    if (!finite) raw = 0x7FC00000;
    std::memcpy(out, &raw, 4);
    return float_of(raw);
  }
  const int shift = bits == 16 ? 16 : 21;
  const uint32_t code = (raw + (1u << shift) - 1) >> shift;
  if (bits == 16) {
    const uint16_t word = finite ? code : 0x7FC0;
    std::memcpy(out, &word, 2);
    return float_of(uint32_t(word) << 16);
  }
  *out = finite ? std::clamp<int64_t>(int64_t(code) - 332, 0, 255) : 255;
  return *out == 0 ? 0.0f : *out == 255 ? NAN : float_of((uint32_t(*out) + 332) << 21);
}

float read_scale(const uint8_t* in, int64_t bits) {
  if (bits == 32) { uint32_t raw; std::memcpy(&raw, in, 4); return float_of(raw); }
  if (bits == 16) { uint16_t word; std::memcpy(&word, in, 2); return float_of(uint32_t(word) << 16); }
  return *in == 0 ? 0.0f : *in == 255 ? NAN : float_of((uint32_t(*in) + 332) << 21);
}

float largest_magnitude(const float* x, int64_t n) {  // as integers: NaN is above infinity
  int32_t largest = 0;
  for (int64_t i = 0; i < n; i++) largest = std::max(largest, int32_t(bits_of(x[i]) & kMagnitude));
  return float_of(largest);
}

// packing.py: strip i of the row goes to bit `bits * i` of every byte
template <int bits> void pack(const uint8_t* codes, uint8_t* out, int64_t n) {
  constexpr int per_byte = 8 / bits;
  const int64_t width = n / per_byte;
  for (int64_t j = 0; j < width; j++) {
    uint8_t byte = codes[j];
    for (int i = 1; i < per_byte; i++) byte |= codes[j + i * width] << (bits * i);
    out[j] = byte;
  }
}

template <int bits> constexpr float half_range() { return bits == 8 ? 127.0f : bits == 4 ? 7.0f : 1.5f; }

template <int bits>
void quantize_rows(int64_t rows, const float* x, uint8_t* out, float* residual, int64_t block, int64_t scale_bits) {
  constexpr float half = half_range<bits>();
  const int64_t packed = block * bits / 8;
  std::vector<uint8_t> codes(block);
  for (int64_t row = 0; row < rows; row++, x += block, out += packed) {
    const float scale = write_scale(largest_magnitude(x, block) * (bits == 2 ? 0.75f : 1.0f), scale_bits, out);
    out += scale_bits / 8;
    const float inverse = scale > 0 ? half / scale : 0.0f;
    if (inverse > 0) {
      for (int64_t i = 0; i < block; i++) {
        float step = x[i] * inverse + half;
        step = step < 0.0f ? 0.0f : step > 2 * half ? 2 * half : step;
        codes[i] = bits_of(step + 8388608.0f);  // 2**23: the integer, rounded half to even, is in the low bits
      }
    } else {
      std::fill(codes.begin(), codes.end(), uint8_t(std::nearbyint(half)));
    }
    pack<bits>(codes.data(), out, block);
    if (residual) {
      for (int64_t i = 0; i < block; i++) residual[i] = x[i] - (float(codes[i]) - half) / half * scale;
      residual += block;
    }
  }
}

template <int bits>
void dequantize_rows(int64_t rows, const uint8_t* in, float* x, int64_t block, int64_t scale_bits) {
  constexpr float half = half_range<bits>();
  constexpr int per_byte = 8 / bits;
  const int64_t width = block / per_byte;
  for (int64_t row = 0; row < rows; row++, x += block, in += width) {
    const float scale = read_scale(in, scale_bits);
    in += scale_bits / 8;
    for (int i = 0; i < per_byte; i++)
      for (int64_t j = 0; j < width; j++)
        x[i * width + j] = (float((in[j] >> (bits * i)) & ((1 << bits) - 1)) - half) / half * scale;
  }
}

typedef double Four __attribute__((vector_size(32)));
typedef double Eight __attribute__((vector_size(64)));

// out = a b: a [rows, inner], b [inner, columns]; `step` divides rows, the length of a Line columns. The operands of
// transform_tiles leave nothing to round: any order of the sums is exact, and so are fused sums.
template <int step, class Line>
__attribute__((optimize("fp-contract=fast"))) void multiply(const double* a, const double* b, double* out, int64_t rows,
                                                            int64_t inner, int64_t columns) {
  for (int64_t i = 0; i < rows; i += step)
    for (int64_t j = 0; j < columns; j += sizeof(Line) / sizeof(double)) {
      Line sum[step] = {}, line;
      for (int64_t k = 0; k < inner; k++) {
        std::memcpy(&line, b + k * columns + j, sizeof line);
        for (int r = 0; r < step; r++) sum[r] += a[(i + r) * inner + k] * line;
      }
      for (int r = 0; r < step; r++) std::memcpy(out + (i + r) * columns + j, &sum[r], sizeof line);
    }
}

// Cosines of even rows are mirrored, C[k][n - 1 - j] = C[k][j], those of odd rows mirrored with the other sign: half of
// each says all, and sums and differences of mirrored values take half of the products.
struct HalfCosines {
  int64_t n, h;
  std::vector<double> even, odd, even_t, odd_t;  // [h, h], and transposed

  HalfCosines(const double* cosines, int64_t n) : n(n), h(n / 2), even(h * h), odd(h * h), even_t(h * h), odd_t(h * h) {
    for (int64_t k = 0; k < h; k++)
      for (int64_t j = 0; j < h; j++) {
        even[k * h + j] = even_t[j * h + k] = cosines[2 * k * n + j];
        odd[k * h + j] = odd_t[j * h + k] = cosines[(2 * k + 1) * n + j];
      }
  }

  // right: a [n, h] times a half of the cosines, left: a half of the cosines times b [h, n]
  void right(const double* a, const double* b, double* out) const {
    h % 8 ? multiply<8, Four>(a, b, out, n, h, h) : multiply<8, Eight>(a, b, out, n, h, h);
  }
  void left(const double* a, const double* b, double* out) const {
    h % 8 ? multiply<4, Eight>(a, b, out, h, h, n) : multiply<8, Eight>(a, b, out, h, h, n);
  }
};

// x <- M x M^T for every tile, M being the cosines or their transpose, by way of numbers whose sums are exact.
template <bool inverse> void transform(int64_t tiles, float* x, const double* cosines, int64_t n) {
  const HalfCosines c(cosines, n);
  const int64_t h = c.h;
  std::vector<double> one(n * h), other(n * h), one_out(n * h), other_out(n * h), half(n * n);
  for (int64_t tile = 0; tile < tiles; tile++, x += n * n) {
    const float power = float_of(bits_of(largest_magnitude(x, n * n)) & kInfinity);
    const double snap = double(power) * 0x1.8p27;
    const auto rounded = [](double value, double step) { return (value + step) - step; };
    for (int64_t i = 0; i < n; i++)
      for (int64_t j = 0; j < h; j++) {
        const double a = rounded(x[i * n + (inverse ? 2 * j : j)], snap);
        const double b = rounded(x[i * n + (inverse ? 2 * j + 1 : n - 1 - j)], snap);
        one[i * h + j] = inverse ? a : a + b;
        other[i * h + j] = inverse ? b : a - b;
      }
    c.right(one.data(), inverse ? c.even.data() : c.even_t.data(), one_out.data());
    c.right(other.data(), inverse ? c.odd.data() : c.odd_t.data(), other_out.data());
    for (int64_t i = 0; i < n; i++)  // columns: forwards even ones, then odd ones
      for (int64_t j = 0; j < h; j++) {
        const double a = one_out[i * h + j], b = other_out[i * h + j];
        half[i * n + j] = rounded(inverse ? a + b : a, 8 * snap);
        half[i * n + (inverse ? n - 1 - j : h + j)] = rounded(inverse ? a - b : b, 8 * snap);
      }
    for (int64_t i = 0; i < h; i++) {
      const double* a = &half[(inverse ? 2 * i : i) * n];
      const double* b = &half[(inverse ? 2 * i + 1 : n - 1 - i) * n];
      for (int64_t j = 0; j < n; j++) {
        one[i * n + j] = inverse ? a[j] : a[j] + b[j];
        other[i * n + j] = inverse ? b[j] : a[j] - b[j];
      }
    }
    c.left(inverse ? c.even_t.data() : c.even.data(), one.data(), one_out.data());
    c.left(inverse ? c.odd_t.data() : c.odd.data(), other.data(), other_out.data());
    for (int64_t i = 0; i < h; i++) {
      const double *a = &one_out[i * n], *b = &other_out[i * n];
      if (inverse) {
        float *above = x + i * n, *below = x + (n - 1 - i) * n;
        for (int64_t j = 0; j < n; j++) above[j] = float(a[j] + b[j]), below[j] = float(a[j] - b[j]);
      } else {
        float *above = x + 2 * i * n, *below = above + n;
        for (int64_t j = 0; j < h; j++) {
          above[2 * j] = float(a[j]), above[2 * j + 1] = float(a[h + j]);
          below[2 * j] = float(b[j]), below[2 * j + 1] = float(b[h + j]);
        }
      }
    }
  }
}

}  // namespace

extern "C" {

void quantize_with_residual(int64_t rows, const float* x, uint8_t* out, float* residual, int64_t block, int64_t bits,
                        int64_t scale_bits) {
  if (bits == 8) quantize_rows<8>(rows, x, out, residual, block, scale_bits);
  if (bits == 4) quantize_rows<4>(rows, x, out, residual, block, scale_bits);
  if (bits == 2) quantize_rows<2>(rows, x, out, residual, block, scale_bits);
}

void quantize(int64_t rows, const float* x, uint8_t* out, int64_t block, int64_t bits, int64_t scale_bits) {
  quantize_with_residual(rows, x, out, nullptr, block, bits, scale_bits);
}

void dequantize(int64_t rows, const uint8_t* in, float* x, int64_t block, int64_t bits, int64_t scale_bits) {
  if (bits == 8) dequantize_rows<8>(rows, in, x, block, scale_bits);
  if (bits == 4) dequantize_rows<4>(rows, in, x, block, scale_bits);
  if (bits == 2) dequantize_rows<2>(rows, in, x, block, scale_bits);
}

// table: 7 midpoints, then the values of the 16 codes
void float4_encode_with_residual(int64_t rows, const float* x, uint8_t* out, float* residual, const float* table,
                             int64_t block, int64_t scale_bits) {
  std::vector<uint8_t> codes(block);
  float scaled[16];
  for (int64_t row = 0; row < rows; row++, x += block, out += block / 2) {
    const float scale = write_scale(largest_magnitude(x, block), scale_bits, out);
    out += scale_bits / 8;
    const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    for (int64_t i = 0; i < block; i++) {
      const float magnitude = std::fabs(x[i]) * inverse;
      uint32_t code = x[i] < 0 ? 8 : 0;
      for (int k = 0; k < 7; k++) code += magnitude >= table[k];
      codes[i] = code;
    }
    pack<4>(codes.data(), out, block);
    if (residual) {
      for (int k = 0; k < 16; k++) scaled[k] = table[7 + k] * scale;
      for (int64_t i = 0; i < block; i++) residual[i] = x[i] - scaled[codes[i]];
      residual += block;
    }
  }
}

void float4_encode(int64_t rows, const float* x, uint8_t* out, const float* table, int64_t block, int64_t scale_bits) {
  float4_encode_with_residual(rows, x, out, nullptr, table, block, scale_bits);
}

void float4_decode(int64_t rows, const uint8_t* in, float* x, const float* table, int64_t block, int64_t scale_bits) {
  float scaled[16];
  const int64_t width = block / 2;
  for (int64_t row = 0; row < rows; row++, x += block, in += width) {
    const float scale = read_scale(in, scale_bits);
    in += scale_bits / 8;
    for (int k = 0; k < 16; k++) scaled[k] = table[7 + k] * scale;
    for (int64_t j = 0; j < width; j++) {
      x[j] = scaled[in[j] & 15];
      x[j + width] = scaled[in[j] >> 4];
    }
  }
}

// Increasing indices of the `keep` largest magnitudes of every chunk; of equal ones the first.
// The keep-th largest maximum of small groups bounds the threshold from below: few candidates are left.
void largest(int64_t rows, const float* x, int64_t* indices, int64_t chunk, int64_t keep) {
  const int64_t size = std::max<int64_t>(1, chunk / (2 * keep)), groups = (chunk + size - 1) / size;
  std::vector<int32_t> maxima(groups), sorted(groups), candidates(chunk), places(chunk), ranked(chunk);
  for (int64_t row = 0; row < rows; row++, x += chunk, indices += keep) {
    for (int64_t g = 0; g < groups; g++) {
      int32_t largest = 0;
      for (int64_t i = g * size; i < std::min(chunk, (g + 1) * size); i++)
        largest = std::max(largest, int32_t(bits_of(x[i]) & kMagnitude));
      maxima[g] = largest;
    }
    sorted = maxima;
    std::nth_element(sorted.begin(), sorted.begin() + keep - 1, sorted.end(), std::greater<int32_t>());
    const int32_t bound = sorted[keep - 1];
    int64_t found = 0;
    for (int64_t g = 0; g < groups; g++) {
      if (maxima[g] < bound) continue;
      for (int64_t i = g * size; i < std::min(chunk, (g + 1) * size); i++) {
        const int32_t magnitude = bits_of(x[i]) & kMagnitude;
        candidates[found] = magnitude;
        places[found] = i;
        found += magnitude >= bound;
      }
    }
    std::copy_n(candidates.begin(), found, ranked.begin());
    std::nth_element(ranked.begin(), ranked.begin() + keep - 1, ranked.begin() + found, std::greater<int32_t>());
    const int32_t threshold = ranked[keep - 1];
    int64_t ties = keep - std::count_if(candidates.begin(), candidates.begin() + found,
                                        [=](int32_t magnitude) { return magnitude > threshold; });
    for (int64_t i = 0, kept = 0; i < found && kept < keep; i++)
      if (candidates[i] > threshold || (candidates[i] == threshold && ties-- > 0)) indices[kept++] = places[i];
  }
}

// dct.py: _transform; every tile has n x n values
void transform_tiles(int64_t tiles, float* x, const double* cosines, int64_t n, int64_t inverse) {
  inverse ? transform<true>(tiles, x, cosines, n) : transform<false>(tiles, x, cosines, n);
}

// outer_sgd.py; form: the parameter becomes the anchor (0), a mixture (1), or keeps progress (2)
// factors: learning rate, momentum, the parameter's share in a mixture or of its progress, then the anchor's share in a
// mixture or the share of `left` that the parameter holds
void outer_sgd(int64_t n, float* anchor, const float* gradient, float* param, float* momentum, const float* left,
               const float* factors, int64_t has_momentum, int64_t nesterov, int64_t form) {
  const float lr = factors[0], mu = factors[1], share = factors[2], other_share = factors[3];
  for (int64_t i = 0; i < n; i++) {
    const float before = anchor[i];
    float step = gradient[i];
    if (has_momentum) {
      momentum[i] = momentum[i] * mu + step;
      step = nesterov ? step + mu * momentum[i] : momentum[i];
    }
    const float now = before - lr * step;
    anchor[i] = now;
    if (form == 0) param[i] = now;
    if (form == 1) param[i] = share < 0.5f ? now + share * (param[i] - now) : param[i] - (param[i] - now) * other_share;
    if (form == 2) param[i] = now + share * (param[i] - (before - other_share * left[i]));
  }
}

}  // extern "C"
