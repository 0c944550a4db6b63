// The data of a case (cases.h).
#include <algorithm>
#include <cmath>

#include "config/base/limits.h"
#include "kernels/bf16.h"
#include "tests/kernels/cases.h"

namespace fp8kvd::kernels::cases {
namespace {

// A finite bf16 of the largest exponent allowed, random sign and mantissa.
uint16_t EdgeBf16(Random& random) {
  constexpr uint32_t kExponent = (127 + kRangeExponent - 1) << 7;
  return static_cast<uint16_t>(kExponent | random.Below(128) | (random.Below(2) << 15));
}

uint16_t NormalBf16(Random& random, float factor) { return FloatToBf16(random.Normal() * factor); }

// A row of K or V that is made of noise alone.
void FillNoiseRow(Data data, bool is_key, int64_t row, int32_t head_dim, Random& random,
                  uint16_t* x) {
  float factor = 1.0F;
  if (data == Data::kMixedScales) factor = std::exp2(random.Uniform() * 12.0F - 6.0F);
  if (data == Data::kZeroRows && row % (is_key ? 3 : 4) == 0) factor = 0.0F;
  if (data == Data::kClimbing) {
    const auto tile = static_cast<float>(row / 128 % 16);  // of 8 heads
    factor = is_key ? 1.0F + tile / 4.0F : std::exp2(3.0F * tile - 24.0F);
  }
  if (data == Data::kNeedle && is_key) factor = 0.1F;
  for (int32_t i = 0; i < head_dim; ++i) x[i] = NormalBf16(random, factor);
}

void FillRow(Data data, bool is_key, int64_t row, int32_t head_dim, Random& random, uint16_t* x) {
  switch (data) {
    case Data::kOneHugeManyTiny:
      for (int32_t i = 0; i < head_dim; ++i) x[i] = NormalBf16(random, 0x1p-8F / kE4m3Max);
      x[random.Below(head_dim)] = FloatToBf16(random.Below(2) == 0 ? 1.0F : -1.0F);
      return;
    case Data::kSubnormalRows:
      for (int32_t i = 0; i < head_dim; ++i) {
        x[i] = static_cast<uint16_t>((1 + random.Below(127)) | (random.Below(2) << 15));
      }
      return;
    case Data::kRangeEdge:
    case Data::kAllAtEdge:
      for (int32_t i = 0; i < head_dim; ++i) x[i] = EdgeBf16(random);
      return;
    case Data::kKeysAtEdge:
      for (int32_t i = 0; i < head_dim; ++i) {
        x[i] = is_key ? EdgeBf16(random) : NormalBf16(random, 1.0F);
      }
      return;
    default:
      FillNoiseRow(data, is_key, row, head_dim, random, x);
  }
}

uint16_t QueryElement(Data data, Random& random) {
  switch (data) {
    case Data::kQueriesAtEdge:
    case Data::kAllAtEdge:
      return EdgeBf16(random);
    case Data::kQueriesWide:
      return NormalBf16(random, std::exp2(random.Uniform() * 26.0F - 24.0F));
    case Data::kQueriesTiny:
      return NormalBf16(random, 0x1p-60F);
    case Data::kQueriesLarge:
      return NormalBf16(random, 0x1p10F);
    case Data::kRangeEdge:
      return NormalBf16(random, 0x1p-28F);
    default:
      return NormalBf16(random, 1.0F);
  }
}

// Queries that hardly differ, and one key a third of the way in that points where they do, with a
// score of ln(keys) + 2: it holds about 0.88 of the weight, all others together the rest.
void PlantNeedle(const Case& c, const Row& row, Random& random, RowData& data) {
  const int32_t head_dim = c.head_dim;
  const int32_t q_heads = row.kv_heads * c.group;
  for (int32_t kv_head = 0; kv_head < row.kv_heads; ++kv_head) {
    std::vector<float> base(head_dim);
    float norm = 0.0F;
    for (float& x : base) x = random.Normal();
    for (const float x : base) norm += x * x;
    for (int32_t j = 0; j < row.q_len; ++j) {
      for (int32_t g = 0; g < c.group; ++g) {
        uint16_t* q = &data.q[(int64_t{j} * q_heads + kv_head * c.group + g) * head_dim];
        for (int32_t i = 0; i < head_dim; ++i) {
          q[i] = FloatToBf16(base[i] + 0.02F * random.Normal());
        }
      }
    }
    const float score = std::log(static_cast<float>(row.seq_len)) + 2.0F;
    const float factor = score * std::sqrt(static_cast<float>(head_dim)) / norm;
    uint16_t* k = &data.k[(int64_t{row.seq_len / 3} * row.kv_heads + kv_head) * head_dim];
    for (int32_t i = 0; i < head_dim; ++i) k[i] = FloatToBf16(base[i] * factor);
  }
}

}  // namespace

RowData MakeRowData(const Case& c, int32_t row_index) {
  const Row& row = c.rows[row_index];
  Random random(c.seed * 0x10001 + row_index);
  RowData data;
  const int64_t rows = int64_t{row.seq_len} * row.kv_heads;
  data.q.resize(int64_t{row.q_len} * row.kv_heads * c.group * c.head_dim);
  data.k.resize(rows * c.head_dim);
  data.v.resize(rows * c.head_dim);
  for (uint16_t& x : data.q) x = QueryElement(c.data, random);
  for (int64_t i = 0; i < rows; ++i) {
    FillRow(c.data, true, i, c.head_dim, random, &data.k[i * c.head_dim]);
    FillRow(c.data, false, i, c.head_dim, random, &data.v[i * c.head_dim]);
  }
  if (c.data == Data::kNeedle) PlantNeedle(c, row, random, data);
  if (row.sinks) {
    data.sink_logits.resize(row.kv_heads * c.group);
    for (float& logit : data.sink_logits) logit = 2.0F * random.Normal();
  }
  return data;
}

std::vector<RowData> MakeData(const Case& c) {
  std::vector<RowData> data;
  for (size_t i = 0; i < c.rows.size(); ++i) {
    data.push_back(MakeRowData(c, static_cast<int32_t>(i)));
  }
  return data;
}

uint64_t Random::Next() {
  state_ += 0x9E3779B97F4A7C15U;
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31);
}

float Random::Uniform() { return static_cast<float>(Next() >> 40) * 0x1p-24F; }

float Random::Normal() {
  const uint64_t bits = Next();
  const int32_t sum = static_cast<int32_t>(bits & 0xFFFF) +
                      static_cast<int32_t>(bits >> 16 & 0xFFFF) +
                      static_cast<int32_t>(bits >> 32 & 0xFFFF) + static_cast<int32_t>(bits >> 48);
  // Each part is uniform over 2^16 steps with variance 2^32 / 12; four have a deviation of 2^16 /
  // sqrt(3).
  return static_cast<float>(sum - 2 * 0xFFFF) * (1.7320508F / 65536.0F);
}

}  // namespace fp8kvd::kernels::cases
