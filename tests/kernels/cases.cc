#include "tests/kernels/cases.h"

#include <algorithm>

#include "config/base/limits.h"

namespace fp8kvd::kernels::cases {
namespace {

constexpr Precision kPrecisions[] = {Precision::kFp8Kv, Precision::kBf16};

// Where kernels cut: tiles of 8, 16 and 64 tokens, and splits of a few pages.
constexpr int32_t kEdgeLengths[] = {1,  2,  7,  8,   9,   15,  16,  17,  31,  33,  48,
                                    63, 64, 65, 100, 127, 128, 129, 191, 193, 257, 300};

std::string NameOf(Precision precision) {
  return precision == Precision::kFp8Kv ? "fp8_kv" : "bf16";
}

std::string Shape(Precision precision, int32_t head_dim, int32_t group) {
  return NameOf(precision) + "_d" + std::to_string(head_dim) + "_g" + std::to_string(group);
}

Case Make(const std::string& what, Precision precision, int32_t head_dim, int32_t group) {
  Case c;
  c.name = what + "_" + Shape(precision, head_dim, group);
  c.precision = precision;
  c.head_dim = head_dim;
  c.group = group;
  // Both output types meet all kinds of cases, each shape always the same one.
  c.out_type = (head_dim / 16 + group) % 2 == 0 ? OutType::kFp32 : OutType::kBf16;
  return c;
}

// A row whose last query is the last token of seq_len.
Row AtEnd(int32_t seq_len, int32_t q_len, int32_t kv_heads) {
  Row row;
  row.seq_len = seq_len;
  row.pos = seq_len - q_len;
  row.q_len = q_len;
  row.kv_heads = kv_heads;
  return row;
}

void AddShapes(std::vector<Case>& cases, bool all) {
  for (const Precision precision : kPrecisions) {
    for (const int32_t head_dim : kHeadDims) {
      for (int32_t group = 1; group <= kGroupMax; ++group) {
        if (!all && (head_dim / 16 + group) % 8 != 0) continue;
        Case c = Make("edges", precision, head_dim, group);
        for (const int32_t length : kEdgeLengths) c.rows.push_back(AtEnd(length, 1, 3));
        cases.push_back(c);
      }
    }
  }
}

void AddEveryLength(std::vector<Case>& cases) {
  for (const Precision precision : kPrecisions) {
    for (const int32_t head_dim : kHeadDims) {
      for (const int32_t group : {1, 4, 7, 8}) {
        if (group != 4 && head_dim != 128 && head_dim != 80) continue;
        Case c = Make("lengths_1_to_300", precision, head_dim, group);
        for (int32_t length = 1; length <= 300; ++length) c.rows.push_back(AtEnd(length, 1, 1));
        cases.push_back(c);
      }
    }
  }
}

void AddLong(std::vector<Case>& cases) {
  for (const Precision precision : kPrecisions) {
    for (const int32_t head_dim : kHeadDims) {
      Case c = Make("lengths_1000_4096_8192", precision, head_dim, head_dim == 128 ? 4 : 2);
      for (const int32_t length : {1000, 4096, 8192}) c.rows.push_back(AtEnd(length, 2, 11));
      cases.push_back(c);
    }
    for (int32_t group = 1; group <= kGroupMax; ++group) {
      if (precision == Precision::kBf16 && group % 5 != 1) continue;
      Case c = Make("length_1000", precision, 128, group);
      c.rows = {AtEnd(1000, 2, 16), AtEnd(999, 2, 16)};
      cases.push_back(c);
    }
    Case ragged = Make("ragged", precision, 128, 8);
    for (int32_t i = 0; i < 40; ++i) ragged.rows.push_back(AtEnd(1 + i * i, 1, 2));
    ragged.rows.push_back(AtEnd(8192, 1, 2));
    ragged.batch_invariant = true;
    cases.push_back(ragged);
  }
}

// The window at every place that matters against the length and the tiles, one and several queries.
void AddWindows(std::vector<Case>& cases, const std::vector<int32_t>& head_dims) {
  for (const Precision precision : kPrecisions) {
    for (const int32_t head_dim : head_dims) {
      Case c = Make("window", precision, head_dim, 4);
      for (const int32_t window : {1, 2, 15, 16, 17, 63, 64, 65, 128, 198, 199, 200, 201, 300}) {
        for (const int32_t q_len : {1, 2, 5}) {
          Row row = AtEnd(200, q_len, 2);
          row.window = window;
          c.rows.push_back(row);
          row.pos -= 9;  // later keys are committed and must not be seen
          c.rows.push_back(row);
        }
      }
      cases.push_back(c);
      Case far = Make("window_in_long", precision, head_dim, 4);
      for (const int32_t window : {100, 512, 1023, 1024, 2998, 2999}) {
        Row row = AtEnd(3000, 3, 4);
        row.window = window;
        far.rows.push_back(row);
      }
      cases.push_back(far);
    }
  }
}

void AddQueries(std::vector<Case>& cases) {
  for (const Precision precision : kPrecisions) {
    for (const int32_t group : {1, 5, 8, 16}) {
      Case c = Make("several_queries", precision, 128, group);
      for (int32_t q_len = 1; q_len <= 17; ++q_len) {
        c.rows.push_back(AtEnd(150, q_len, 1));
        c.rows.push_back(AtEnd(q_len, q_len, 1));  // the first query sees one key
        Row row = AtEnd(190, q_len, 1);
        row.pos = 63 - q_len;  // the last stands just before a page's edge
        c.rows.push_back(row);
      }
      c.rows.push_back(AtEnd(100, kQLenMax, 1));
      cases.push_back(c);
    }
  }
}

void AddSinksAndSoftcaps(std::vector<Case>& cases) {
  for (const Precision precision : kPrecisions) {
    for (const int32_t group : {1, 6, 8}) {
      Case c = Make("sinks_softcap", precision, 64, group);
      for (const int32_t length : {1, 16, 63, 64, 65, 130, 300, 1500}) {
        for (const float softcap : {0.0F, 2.0F, 30.0F}) {
          for (const bool sinks : {false, true}) {
            Row row = AtEnd(length, 1, 2);
            row.softcap = softcap;
            row.sinks = sinks;
            row.sm_scale = softcap == 30.0F ? 2.0F : 0.0F;  // scores well beyond the cap
            c.rows.push_back(row);
          }
        }
      }
      cases.push_back(c);
      Case none = Make("no_key", precision, 64, group);
      for (int32_t i = 0; i < 40; ++i) {
        Row row = i % 3 == 2 ? AtEnd(70, 1, 2) : AtEnd(0, 1, 2);  // pos -1
        row.sinks = i % 2 == 0;
        none.rows.push_back(row);
      }
      none.rows.push_back(AtEnd(2, 4, 2));  // queries -2, -1, 0, 1
      cases.push_back(none);
    }
    Case no_lse = Make("no_lse", precision, 96, 4);
    no_lse.lse = false;
    for (const int32_t length : kEdgeLengths) no_lse.rows.push_back(AtEnd(length, 1, 3));
    cases.push_back(no_lse);
  }
}

// Rows of several models in one launch: nothing but head_dim and group is shared.
void AddMixedRows(std::vector<Case>& cases, int32_t group) {
  for (const Precision precision : kPrecisions) {
    Case c = Make("mixed_rows", precision, 128, group);
    for (int32_t i = 0; i < 24; ++i) {
      Row row = AtEnd(20 + 37 * i, 1 + i % 4, 1 + i % 5);
      row.window = i % 3 == 0 ? 50 + i : 0;
      row.softcap = i % 4 == 1 ? 20.0F : 0.0F;
      row.sinks = i % 5 == 2;
      row.sm_scale = i % 2 == 0 ? 0.0F : 0.05F;
      c.rows.push_back(row);
    }
    cases.push_back(c);
  }
}

// Rows all alike, which a backend may serve another way than mixed ones: few and long, few and
// short, and more pairs than a device has multiprocessors.
void AddEqualRows(std::vector<Case>& cases, const std::vector<int32_t>& head_dims) {
  struct Kind {
    int32_t rows;
    int32_t kv_heads;
    int32_t seq_len;
    int32_t q_len;
    int32_t group;
  };
  constexpr Kind kKinds[] = {{1, 1, 2500, 1, 8}, {2, 2, 700, 2, 8},  {1, 8, 1024, 1, 5},
                             {16, 2, 77, 1, 8},  {3, 5, 513, 1, 16}, {70, 2, 130, 1, 3},
                             {140, 1, 50, 1, 1}};
  for (const Precision precision : kPrecisions) {
    for (const int32_t head_dim : head_dims) {
      for (size_t i = 0; i < std::size(kKinds); ++i) {
        const Kind& kind = kKinds[i];
        const std::string size = std::to_string(kind.rows) + "x" + std::to_string(kind.kv_heads) +
                                 "x" + std::to_string(kind.seq_len);
        Case c = Make("equal_rows_" + size, precision, head_dim, kind.group);
        Row row = AtEnd(kind.seq_len, kind.q_len, kind.kv_heads);
        row.window = i % 3 == 2 ? kind.seq_len - 20 : 0;
        row.softcap = i % 4 == 1 ? 20.0F : 0.0F;
        row.sinks = i % 2 == 1;
        c.rows.assign(kind.rows, row);
        c.few_pairs = Pairs(c) < kPairsMin;
        cases.push_back(c);
      }
    }
  }
}

// Rows of one model and of unlike lengths, which a backend may serve by whole pairs: few; so few
// that several CTAs may share each; more pairs than a device has multiprocessors, shortest first;
// more than it has room for at once; and one among short ones so long that it has to be cut.
void AddUnequalRows(std::vector<Case>& cases, const std::vector<int32_t>& head_dims) {
  for (const Precision precision : kPrecisions) {
    for (const int32_t head_dim : head_dims) {
      Case few = Make("unequal_rows_few", precision, head_dim, 8);
      for (const int32_t length : {40, 700, 1, 300, 999}) few.rows.push_back(AtEnd(length, 1, 16));
      cases.push_back(few);

      for (const int32_t kv_heads : {2, 8}) {
        Case shared =
            Make("unequal_rows_4x" + std::to_string(kv_heads), precision, head_dim, kv_heads);
        for (const int32_t length : {1000, 1, 300, 520}) {
          shared.rows.push_back(AtEnd(length, 1, kv_heads));
        }
        shared.few_pairs = true;
        cases.push_back(shared);
      }

      Case more = Make("unequal_rows_50", precision, head_dim, 3);
      for (int32_t i = 0; i < 50; ++i) {
        Row row = AtEnd(9 + 17 * i, 1, 3);
        row.window = i % 4 == 1 ? 100 : 0;
        row.softcap = i % 4 == 2 ? 20.0F : 0.0F;
        row.sinks = i % 4 == 3;
        more.rows.push_back(row);
      }
      cases.push_back(more);

      Case many = Make("unequal_rows_300", precision, head_dim, 2);
      for (int32_t i = 0; i < 300; ++i) many.rows.push_back(AtEnd(1 + i * 37 % 200, 1, 2));
      cases.push_back(many);

      Case queries = Make("unequal_rows_of_2_queries", precision, head_dim, 8);
      for (int32_t i = 0; i < 70; ++i) queries.rows.push_back(AtEnd(2 + 11 * i, 2, 2));
      cases.push_back(queries);

      Case one_long = Make("unequal_rows_one_long", precision, head_dim, 8);
      for (int32_t i = 0; i < 40; ++i) one_long.rows.push_back(AtEnd(30 + i, 1, 2));
      one_long.rows.push_back(AtEnd(6000, 1, 2));
      cases.push_back(one_long);
    }
  }
}

// So few pairs, and so long, that each may be shared by more CTAs than one of them can join at
// once: alone, two, of several queries, and among short ones.
void AddLongPairs(std::vector<Case>& cases, const std::vector<int32_t>& head_dims) {
  for (const Precision precision : kPrecisions) {
    for (const int32_t head_dim : head_dims) {
      const int32_t length = head_dim == 64 ? 70000 : 30000;
      Case one = Make("one_long_pair", precision, head_dim, 8);
      one.rows = {AtEnd(length, 1, 1)};
      one.few_pairs = true;
      cases.push_back(one);
      if (head_dim != 128 || head_dims.size() == 1) continue;

      Case two = Make("two_long_pairs", precision, head_dim, 5);
      two.rows = {AtEnd(2 * length, 1, 2)};
      two.rows[0].sinks = true;
      two.few_pairs = true;
      cases.push_back(two);

      Case queries = Make("one_long_pair_of_3_queries", precision, head_dim, 8);
      queries.rows = {AtEnd(length, 3, 1)};
      queries.few_pairs = true;
      cases.push_back(queries);

      Case among = Make("one_long_pair_among_short", precision, head_dim, 8);
      for (int32_t i = 0; i < 70; ++i) among.rows.push_back(AtEnd(30 + i, 1, 1));
      among.rows.push_back(AtEnd(length, 1, 1));
      cases.push_back(among);
    }
  }
}

void AddData(std::vector<Case>& cases, const std::vector<int32_t>& head_dims, int32_t group,
             int32_t q_len) {
  struct Kind {
    const char* name;
    Data data;
  };
  constexpr Kind kKinds[] = {{"one_huge_many_tiny", Data::kOneHugeManyTiny},
                             {"zero_rows", Data::kZeroRows},
                             {"mixed_scales", Data::kMixedScales},
                             {"climbing", Data::kClimbing},
                             {"subnormal_rows", Data::kSubnormalRows},
                             {"range_edge", Data::kRangeEdge},
                             {"keys_at_edge", Data::kKeysAtEdge},
                             {"queries_tiny", Data::kQueriesTiny},
                             {"queries_large", Data::kQueriesLarge},
                             {"queries_wide", Data::kQueriesWide},
                             {"queries_at_edge", Data::kQueriesAtEdge},
                             {"all_at_edge", Data::kAllAtEdge}};
  for (const Precision precision : kPrecisions) {
    for (const int32_t head_dim : head_dims) {
      for (const Kind& kind : kKinds) {
        Case c = Make(kind.name, precision, head_dim, group);
        c.data = kind.data;
        for (const int32_t length : {1, 3, 17, 64, 65, 200, 300, 700}) {
          c.rows.push_back(AtEnd(std::max(length, q_len), q_len, 8 / q_len));
        }
        cases.push_back(c);
      }
    }
  }
}

void AddNeedle(std::vector<Case>& cases, int32_t seq_len) {
  Case c = Make("needle_in_" + std::to_string(seq_len), Precision::kFp8Kv, 64, 1);
  c.data = Data::kNeedle;
  c.rows = {AtEnd(seq_len, kQLenMax, 1)};
  cases.push_back(c);
}

void AddLargePool(std::vector<Case>& cases) {
  for (const Precision precision : kPrecisions) {
    Case c = Make("pool_past_4_gib", precision, 128, 4);
    for (int32_t i = 0; i < 16; ++i) c.rows.push_back(AtEnd(200 + i, 1, 4));
    c.pool_bytes_min = (int64_t{4} << 30) + (int64_t{512} << 20);
    cases.push_back(c);
  }
}

}  // namespace

std::vector<Case> Cases(Set set) {
  std::vector<Case> cases;
  const bool full = set == Set::kFull;
  AddShapes(cases, full);
  AddWindows(cases, full ? std::vector<int32_t>{64, 80, 128} : std::vector<int32_t>{64});
  AddSinksAndSoftcaps(cases);
  AddMixedRows(cases, 4);
  AddEqualRows(cases, full ? std::vector<int32_t>{64, 80, 128, 256} : std::vector<int32_t>{128});
  AddUnequalRows(cases, full ? std::vector<int32_t>{64, 80, 128, 256} : std::vector<int32_t>{128});
  AddData(cases, full ? std::vector<int32_t>{80, 128, 256} : std::vector<int32_t>{64}, 4, 1);
  if (full) {
    AddQueries(cases);
    AddEveryLength(cases);
    AddLong(cases);
    AddNeedle(cases, 131072);
    AddLargePool(cases);
  } else {
    AddNeedle(cases, 3000);
  }
  // Of 32 query columns, which a backend may serve another way.
  AddMixedRows(cases, 8);
  if (full) AddData(cases, {128}, 8, 4);
  AddLongPairs(cases, full ? std::vector<int32_t>{64, 128, 256} : std::vector<int32_t>{128});
  for (size_t i = 0; i < cases.size(); ++i) cases[i].seed = 1000 + i;
  return cases;
}

int64_t Pairs(const Case& c) {
  int64_t pairs = 0;
  for (const Row& row : c.rows) pairs += int64_t{row.q_len} * row.kv_heads;
  return pairs;
}

Visible VisibleKeys(const Row& row) {
  const int32_t end = std::max(0, row.pos + row.q_len);
  const int32_t first = row.window == 0 ? 0 : std::max(0, row.pos - row.window + 1);
  return {std::min(first, end), end};
}

}  // namespace fp8kvd::kernels::cases
