#include "server/translate/wire.h"

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "google/protobuf/stubs/logging.h"
#include "gtest/gtest.h"

#include "tests/fuzz/wire_agrees.h"

namespace fp8kvd::translate {
namespace {

absl::Span<const uint8_t> Bytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

v1::DecodeRequest FullDecode() {
  v1::DecodeRequest request;
  request.set_request_id(UINT64_MAX);
  request.set_model("m\xC3\xBC/\xF0\x9F\x98\x80");
  request.set_layer(300);
  for (int i = 0; i < 5; ++i) {
    v1::Handle* handle = request.add_handles();
    handle->set_seq_id(uint64_t{0x0123456789ABCDEF} + i);
    handle->set_generation(i * 1000);
    handle->set_incarnation(~uint64_t{0} - i);
    handle->set_home(i);
    request.add_positions(uint64_t{1} << (12 * i));
    request.add_q_lens(i * 200);
  }
  request.set_q(std::string(300, 'q'));
  request.set_k(std::string(40, 'k'));
  request.set_v(std::string(41, 'v'));
  request.add_sink_logits(-1.5F);
  request.add_sink_logits(2e30F);
  request.set_omit_sinks(true);
  request.set_want_lse(true);
  request.set_out_type(v1::OUT_TYPE_FP32);
  request.set_timeout_ms(70000);
  return request;
}

v1::AppendRequest FullAppend() {
  v1::AppendRequest request;
  request.set_model("m");
  request.mutable_handle()->set_seq_id(9);
  request.mutable_handle()->set_generation(1U << 31);
  request.set_layer(3);
  request.set_layers_count(2);
  request.set_pos(1U << 20);
  request.set_n(17);
  request.set_k(std::string(500, 'k'));
  request.set_v(std::string(500, 'v'));
  request.set_skip_to(UINT64_MAX);
  return request;
}

TEST(Wire, ReadsEveryFieldOfADecodeWhereverTheSlicesAreCut) {
  const std::string bytes = FullDecode().SerializeAsString();
  for (size_t size = 0; size <= bytes.size(); ++size) {
    WireDecode read;
    ASSERT_TRUE(read.Read(Cut(Bytes(bytes), {size, 1, 0})).ok()) << size;
    ASSERT_EQ(Difference(read, FullDecode()), "") << size;
  }
}

TEST(Wire, ReadsEveryFieldOfAnAppendWhereverTheSlicesAreCut) {
  const std::string bytes = FullAppend().SerializeAsString();
  for (size_t size = 0; size <= bytes.size(); ++size) {
    WireAppend read;
    ASSERT_TRUE(read.Read(Cut(Bytes(bytes), {size, 3, 0})).ok()) << size;
    ASSERT_EQ(Difference(read, FullAppend()), "") << size;
  }
}

TEST(Wire, AnEmptyMessageHasDefaultsAlsoAfterAFullOne) {
  WireDecode decode;
  const std::string full = FullDecode().SerializeAsString();
  ASSERT_TRUE(decode.Read(Cut(Bytes(full), {})).ok());
  ASSERT_TRUE(decode.Read({}).ok());
  EXPECT_EQ(Difference(decode, v1::DecodeRequest()), "");
  WireAppend append;
  const std::string full_append = FullAppend().SerializeAsString();
  ASSERT_TRUE(append.Read(Cut(Bytes(full_append), {})).ok());
  ASSERT_TRUE(append.Read({}).ok());
  EXPECT_EQ(Difference(append, v1::AppendRequest()), "");
}

TEST(Wire, TensorsStayWhereTheyLie) {
  const std::string bytes = FullDecode().SerializeAsString();
  WireDecode read;
  ASSERT_TRUE(read.Read(Cut(Bytes(bytes), {})).ok());
  ASSERT_EQ(read.q.pieces.size(), 1U);
  EXPECT_EQ(read.q.pieces[0].data(), Bytes(bytes).data() + bytes.find("qqq"));
}

TEST(Wire, AStrangersCountsDoNotBecomeMemory) {
  std::string bytes;
  for (int i = 0; i < 100000; ++i) bytes += std::string("\x22\x00", 2);          // an empty handle
  for (int i = 0; i < 100000; ++i) bytes += std::string("\x28\x07", 2);          // a position
  bytes += std::string("\x32\xA0\x8D\x06", 4) + std::string(100000, '\1');       // packed q_lens
  for (int i = 0; i < 100000; ++i) bytes += std::string("\x55\0\0\x80\x3F", 5);  // a sink
  WireDecode read;
  ASSERT_TRUE(read.Read(Cut(Bytes(bytes), {4096})).ok());
  EXPECT_EQ(read.handles.count, 100000);
  EXPECT_EQ(read.positions.count, 100000);
  EXPECT_EQ(read.q_lens.count, 100000);
  EXPECT_EQ(read.sink_logits.count, 100000);
  EXPECT_LE(read.handles.kept.capacity(), 2U * kItemsMax);
  EXPECT_LE(read.positions.kept.capacity(), 2U * kItemsMax);
  EXPECT_LE(read.q_lens.kept.capacity(), 2U * kItemsMax);
  EXPECT_LE(read.sink_logits.kept.capacity(), 2U * kQHeadsMax);
}

TEST(Wire, KeepsTheStartOfALongName) {
  v1::DecodeRequest request;
  request.set_model(std::string(100000, 'x'));
  const std::string bytes = request.SerializeAsString();
  WireDecode read;
  ASSERT_TRUE(read.Read(Cut(Bytes(bytes), {1000})).ok());
  EXPECT_EQ(read.model.size, 100000);
  EXPECT_EQ(read.model.kept.size(), kNameBytesMax);
}

TEST(Wire, ARefusalNamesTheByte) {
  WireDecode read;
  const std::string bytes("\x08\x01\x18\x80", 4);
  EXPECT_EQ(read.Read(Cut(Bytes(bytes), {})).message(),
            "the bytes up to 4 are no message of this rpc; send fp8kvd.v1 messages as protobuf "
            "encodes them");
}

// Groups of field 30, one within the other; every one is closed.
std::string Groups(int depth) {
  std::string bytes;
  for (int i = 0; i < depth; ++i) bytes += "\xF3\x01";
  for (int i = 0; i < depth; ++i) bytes += "\xF4\x01";
  return bytes;
}

std::string InHandle(const std::string& bytes) {
  std::string out = "\x22";
  out += static_cast<char>(0x80 | (bytes.size() & 0x7F));
  out += static_cast<char>(bytes.size() >> 7);
  return out + bytes;
}

struct Oddity {
  std::string name;
  std::string bytes;
};

// Encodings that a careless reader takes for something else.
std::vector<Oddity> Oddities() {
  const std::string x80_9(9, '\x80');
  return {
      {"LastOneWins", "\x08\x01\x08\x02"},
      {"LastBytesWin", "\x3A\x02zz\x3A\x01y"},
      {"PackedThenNot", "\x2A\x02\x01\x02\x28\x03"},
      {"PackedEmpty", std::string("\x2A\x00", 2)},
      {"PackedSplitElement", "\x2A\x01\x80\x01"},
      {"PackedFloatsOfOddSize", "\x52\x05\x01\x02\x03\x04\x05"},
      {"LongVarint", "\x08\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x7F"},
      {"ElevenByteVarint", "\x08" + x80_9 + "\x80\x01"},
      {"NarrowFieldWideVarint", "\x18\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01"},
      {"NegativeEnum", "\x68\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01"},
      {"BoolOfManyBits", "\x58" + x80_9 + "\x01"},
      {"LongTag", std::string("\x88\x80\x80\x80\x00\x05", 6)},
      {"TagOfSixBytes", std::string("\x88\x80\x80\x80\x80\x00\x05", 7)},
      {"TagPast32Bits", "\x88\x80\x80\x80\x70\x05"},
      {"TagZero", std::string("\x00\x00", 2)},
      {"FieldZero", "\x02\x01z"},
      {"WireTypeSix", "\x0E\x01"},
      {"WireTypeSeven", "\x0F\x01"},
      {"KnownFieldOtherType", "\x0D\x01\x02\x03\x04"},
      {"KnownFieldAsGroup", std::string("\x0B\x10\x01\x0C", 4)},
      {"LongLength", std::string("\x3A\x81\x80\x80\x80\x00z", 7)},
      {"LengthOfSixBytes", std::string("\x3A\x81\x80\x80\x80\x80\x00z", 8)},
      {"LengthPastTheEnd", "\x3A\x05zz"},
      {"LengthPast32Bits", "\x3A\xFF\xFF\xFF\xFF\x7Fz"},
      {"TruncatedTag", "\x80"},
      {"TruncatedFixed", "\x22\x05\x09\x01\x02\x03\x04"},
      {"HandleLeavesItsLength", std::string("\x22\x01\x10\x01", 4)},
      {"UnknownFields", "\xF8\x07\x01\xFA\x07\x03xyz\xFD\x07\x01\x02\x03\x04"},
      {"UnclosedGroup", "\xF3\x01\x08\x01"},
      {"GroupClosedByAnother", "\xF3\x01\xFC\x01"},
      {"StrayEndOfGroup", "\xF4\x01"},
      {"StrayEndInHandle", "\x22\x02\xF4\x01"},
      {"FieldZeroInGroup", std::string("\xF3\x01\x00\xF4\x01", 5)},
      {"Groups100", Groups(100)},
      {"Groups101", Groups(101)},
      {"Groups99InHandle", InHandle(Groups(99))},
      {"Groups100InHandle", InHandle(Groups(100))},
      {"NameOfFourByteChar", "\x12\x04\xF0\x9F\x98\x80"},
      {"NameCut", "\x12\x03\xF0\x9F\x98"},
      {"NameOverlong", "\x12\x02\xC0\xAF"},
      {"NameOverlong3", "\x12\x03\xE0\x9F\xBF"},
      {"NameOverlong4", "\x12\x04\xF0\x8F\xBF\xBF"},
      {"NameSurrogate", "\x12\x03\xED\xA0\x80"},
      {"NameBelowSurrogates", "\x12\x03\xED\x9F\xBF"},
      {"NamePastUnicode", "\x12\x04\xF4\x90\x80\x80"},
      {"NameLastUnicode", "\x12\x04\xF4\x8F\xBF\xBF"},
      {"NameStrayContinuation", "\x12\x01\x80"},
      {"NameWithZero", std::string("\x12\x03"
                                   "a\0b",
                                   5)},
      {"NameWrongThenRight", "\x12\x01\xFF\x12\x01o"},
      {"HandleMerges", "\x12\x09\x09\x01\x02\x03\x04\x05\x06\x07\x08\x12\x02\x10\x05"},
  };
}

class WireAgreesWithProtobuf : public testing::TestWithParam<Oddity> {};

TEST_P(WireAgreesWithProtobuf, OnBothMessages) {
  const google::protobuf::LogSilencer silencer;
  const absl::Span<const uint8_t> bytes = Bytes(GetParam().bytes);
  for (const std::vector<size_t>& sizes : {std::vector<size_t>{}, {1}, {2, 0, 3}}) {
    EXPECT_EQ((Disagreement<WireDecode, v1::DecodeRequest>(bytes, sizes)), "");
    EXPECT_EQ((Disagreement<WireAppend, v1::AppendRequest>(bytes, sizes)), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Encodings, WireAgreesWithProtobuf, testing::ValuesIn(Oddities()),
                         [](const auto& oddity) { return oddity.param.name; });

// Flips, drops, doubles and inserts bytes of good messages: far more wrong encodings than a list.
TEST(Wire, AgreesWithProtobufOnMutatedMessages) {
  const google::protobuf::LogSilencer silencer;
  std::mt19937 random(20260101);
  v1::DecodeRequest decode = FullDecode();
  decode.set_q("qq");
  decode.set_k("k");
  decode.set_v("");
  const std::string seeds[] = {decode.SerializeAsString(), FullAppend().SerializeAsString(),
                               Groups(3) + decode.SerializeAsString()};
  int accepted = 0;
  constexpr int kRounds = 30000;
  for (int round = 0; round < kRounds; ++round) {
    std::string bytes = seeds[random() % 3];
    for (uint32_t i = random() % 4 + 1; i > 0; --i) {
      const size_t at = random() % bytes.size();
      switch (random() % 4) {
        case 0:
          bytes[at] = static_cast<char>(random());
          break;
        case 1:
          bytes.erase(at, 1 + random() % 3);
          break;
        case 2:
          bytes.insert(at, bytes.substr(random() % bytes.size(), random() % 20));
          break;
        default:
          bytes[at] = static_cast<char>(bytes[at] ^ (1 << random() % 8));
          break;
      }
      if (bytes.empty()) bytes = "x";
    }
    const std::vector<size_t> sizes = {random() % 40, random() % 5, random() % 9};
    ASSERT_EQ((Disagreement<WireDecode, v1::DecodeRequest>(Bytes(bytes), sizes)), "") << round;
    ASSERT_EQ((Disagreement<WireAppend, v1::AppendRequest>(Bytes(bytes), sizes)), "") << round;
    accepted += v1::DecodeRequest().ParseFromString(bytes) ? 1 : 0;
  }
  EXPECT_GT(accepted, kRounds / 10);  // otherwise only refusals were compared
  EXPECT_LT(accepted, kRounds * 9 / 10);
}

}  // namespace
}  // namespace fp8kvd::translate
