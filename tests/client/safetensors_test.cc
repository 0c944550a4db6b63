// Reading captures: what a good file gives, and that every kind of bad file gives an error.
#include "client/cc/ctl/safetensors.h"

#include <cstdint>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/cc/ctl/capture.h"

namespace fp8kvd::ctl {
namespace {

const char kCaptures[] = "tests/data/captures/";

std::string File(const std::string& header, const std::string& data) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(header.size() >> (8 * i)));
  return bytes + header + data;
}

std::string Tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return "{\"x\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape + "],\"data_offsets\":[" +
         offsets + "]}}";
}

absl::Status ReadF32(const std::string& bytes, const std::vector<int64_t>& shape) {
  absl::StatusOr<Safetensors> file = Safetensors::Parse(bytes);
  return file.ok() ? file->F32("x", shape).status() : file.status();
}

TEST(Safetensors, ATensorComesBackElementByElement) {
  const std::string bytes =
      File(Tensor("I32", "2, 1", "0,8"), std::string("\1\0\0\0\376\377\377\377", 8));
  absl::StatusOr<Safetensors> file = Safetensors::Parse(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT(file->I32("x", {2, 1}).value(), testing::ElementsAre(1, -2));
}

TEST(Safetensors, AnUnalignedHeaderDoesNotMatter) {
  for (int pad = 0; pad < 8; ++pad) {
    const std::string header = Tensor("F32", "1", "0,4") + std::string(pad, ' ');
    absl::StatusOr<Safetensors> file =
        Safetensors::Parse(File(header, std::string("\0\0\200\77", 4)));
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_THAT(file->F32("x", {1}).value(), testing::ElementsAre(1.0F)) << pad;
  }
}

struct BadFile {
  const char* name;
  std::string bytes;
  std::vector<int64_t> shape;
  const char* says;
};

class BadFiles : public testing::TestWithParam<BadFile> {};

TEST_P(BadFiles, IsRefusedWithTheReason) {
  const absl::Status status = ReadF32(GetParam().bytes, GetParam().shape);
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr(GetParam().says));
}

INSTANTIATE_TEST_SUITE_P(
    Safetensors, BadFiles,
    testing::Values(
        BadFile{"empty", "", {1}, "holds 0 bytes"},
        BadFile{"header_longer_than_file", std::string("\377\0\0\0\0\0\0\0{}", 10), {1}, "255"},
        BadFile{"header_length_of_all_ones", std::string(8, '\377'), {1}, "18446744073709551615"},
        BadFile{"header_not_json", File("{{", ""), {1}, "not a JSON object"},
        BadFile{"entry_not_an_object", File("{\"x\":3}", ""), {1}, "not an object"},
        BadFile{"no_offsets", File("{\"x\":{\"dtype\":\"F32\",\"shape\":[1]}}", ""), {1}, "data_o"},
        BadFile{"data_cut_off", File(Tensor("F32", "2", "0,8"), "1234"), {2}, "4 bytes of data"},
        BadFile{"offsets_backwards", File(Tensor("F32", "1", "4,0"), "1234"), {1}, "[4, 0]"},
        BadFile{"offset_negative", File(Tensor("F32", "1", "-4,0"), "1234"), {1}, "2^53"},
        BadFile{"offset_fraction", File(Tensor("F32", "1", "0.5,4"), "1234"), {1}, "2^53"},
        BadFile{"shape_wants_more", File(Tensor("F32", "2", "0,4"), "1234"), {2}, "another number"},
        BadFile{"shape_overflows",
                File(Tensor("F32", "4294967296,4294967296,4", "0,4"), "1234"),
                {4294967296, 4294967296, 4},
                "another number"},
        BadFile{"shape_with_zero",
                File(Tensor("F32", "4294967296,0", "0,4"), "1234"),
                {4294967296, 0},
                "another number"},
        BadFile{"other_dtype", File(Tensor("BF16", "2", "0,4"), "1234"), {2}, "wanted F32"},
        BadFile{"other_shape", File(Tensor("F32", "1", "0,4"), "1234"), {2}, "wanted F32 [2]"},
        BadFile{"no_such_tensor", File("{}", ""), {1}, "no tensor x"}),
    [](const auto& bad) { return std::string(bad.param.name); });

TEST(Safetensors, AFileThatIsNotThereIsNotFound) {
  EXPECT_EQ(Safetensors::Read("no/such/file").status().code(), absl::StatusCode::kNotFound);
}

TEST(Safetensors, ADirectoryIsRefused) {
  EXPECT_EQ(Safetensors::Read("tests").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Capture, TheThreeCapturesHaveTheShapesThatTheirReadmeStates) {
  struct Want {
    const char* file;
    int32_t layer, q_heads, kv_heads, head_dim, window;
    float sm_scale;
  };
  for (const Want& want : {Want{"gemma3_text_a_layer05", 5, 4, 1, 256, 0, 0.0625F},
                           Want{"gemma3_text_a_layer10", 10, 4, 1, 256, 512, 0.0625F},
                           Want{"smollm2_text_a_layer16", 16, 9, 3, 64, 0, 0.125F}}) {
    SCOPED_TRACE(want.file);
    absl::StatusOr<Capture> c = ReadCapture(std::string(kCaptures) + want.file + ".safetensors");
    ASSERT_TRUE(c.ok()) << c.status();
    EXPECT_EQ(c->layer, want.layer);
    EXPECT_EQ(c->q_heads, want.q_heads);
    EXPECT_EQ(c->kv_heads, want.kv_heads);
    EXPECT_EQ(c->head_dim, want.head_dim);
    EXPECT_EQ(c->window, want.window);
    EXPECT_EQ(c->sm_scale, want.sm_scale);
    EXPECT_EQ(c->tokens, 1532);
    EXPECT_EQ(c->positions.front(), 1500);
    EXPECT_EQ(c->k.size(), 1532U * want.kv_heads * want.head_dim);
    EXPECT_EQ(c->out.size(), 32U * want.q_heads * want.head_dim);
  }
}

TEST(Capture, ItsErrorsFileStandsBesideIt) {
  EXPECT_EQ(ErrorsPath("a/b_layer05.safetensors"), "a/b_errors.json");
  EXPECT_EQ(ErrorsPath("plain.safetensors"), "");
  EXPECT_EQ(ErrorsPath("x_layer1/plain.safetensors"), "");
}

TEST(Capture, TheExpectedErrorIsTheLayersOwn) {
  const std::string errors = std::string(kCaptures) + "gemma3_text_a_errors.json";
  EXPECT_DOUBLE_EQ(ReadExpectedError(errors, 5).value(), 0.046111);
  EXPECT_DOUBLE_EQ(ReadExpectedError(errors, 10).value(), 0.047997);
  EXPECT_EQ(ReadExpectedError(errors, 99).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace fp8kvd::ctl
