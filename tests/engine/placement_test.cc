#include "server/engine/placement.h"

#include <algorithm>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fp8kvd::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

DeviceRoom Room(int64_t pages_total, int64_t pages_left, int64_t seqs = 0) {
  return {.seqs = seqs, .groups = {{.pages_total = pages_total, .pages_left = pages_left}}};
}

TEST(PlaceSeqs, TakesTheDeviceWithMostPages) {
  const SeqPages pages[] = {{.reserved = 10, .typical = 10}};
  EXPECT_THAT(PlaceSeqs({Room(100, 40), Room(100, 60), Room(100, 50)}, pages, 1), ElementsAre(1));
}

TEST(PlaceSeqs, OfEqualsTakesTheFirstAndThenTheOthersInTurn) {
  const SeqPages pages[] = {{.reserved = 10, .typical = 10}};
  EXPECT_THAT(PlaceSeqs({Room(100, 100), Room(100, 100), Room(100, 100)}, pages, 5),
              ElementsAre(0, 1, 2, 0, 1));
}

// A device of twice the pages gets twice the sequences.
TEST(PlaceSeqs, FillsDevicesInProportionToTheirPages) {
  const SeqPages pages[] = {{.reserved = 10, .typical = 10}};
  const auto placed = PlaceSeqs({Room(100, 100), Room(200, 200)}, pages, 30);
  EXPECT_EQ(std::count(placed.begin(), placed.end(), 1), 20);
}

// Nothing is reserved and nothing held, as in the moment after a client made its batch: such
// sequences count with what they will grow to.
TEST(PlaceSeqs, SpreadsSequencesThatHoldNothingYet) {
  const SeqPages pages[] = {{.reserved = 0, .typical = 10}};
  const auto placed = PlaceSeqs({Room(1000, 1000), Room(1000, 950, /*seqs=*/1)}, pages, 40);
  // The one of 50 pages counts as five.
  EXPECT_EQ(std::count(placed.begin(), placed.end(), 0), 21);
}

TEST(PlaceSeqs, PassesOverADeviceWithoutPagesForTheReservation) {
  const SeqPages pages[] = {{.reserved = 30, .typical = 1}};
  // The first has more room by the configured length, but not 30 pages in one piece of its rest.
  EXPECT_THAT(PlaceSeqs({Room(1000, 29), Room(40, 31)}, pages, 1), ElementsAre(1));
  // Where none has them one is named all the same, whose engine then says what lacks.
  EXPECT_THAT(PlaceSeqs({Room(1000, 29), Room(40, 20)}, pages, 1), ElementsAre(0));
}

TEST(PlaceSeqs, TheScarcestGroupDecides) {
  const SeqPages pages[] = {{.reserved = 10, .typical = 10}, {.reserved = 2, .typical = 2}};
  DeviceRoom many{
      .groups = {{.pages_total = 1000, .pages_left = 1000}, {.pages_total = 20, .pages_left = 4}}};
  DeviceRoom few{
      .groups = {{.pages_total = 1000, .pages_left = 100}, {.pages_total = 20, .pages_left = 20}}};
  EXPECT_THAT(PlaceSeqs({many, few}, pages, 1), ElementsAre(1));
}

TEST(PlaceSeqs, TakesNoneThatIsOut) {
  const SeqPages pages[] = {{.reserved = 1, .typical = 1}};
  DeviceRoom out = Room(100, 100);
  out.is_out = true;
  EXPECT_THAT(PlaceSeqs({out, Room(10, 1)}, pages, 3), ElementsAre(1, 1, 1));
  EXPECT_THAT(PlaceSeqs({out}, pages, 1), IsEmpty());
}

}  // namespace
}  // namespace fp8kvd::engine
