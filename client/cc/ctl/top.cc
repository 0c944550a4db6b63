// fp8kvctl top: what the status page shows, in a terminal.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

#include "client/cc/ctl/commands.h"
#include "client/cc/ctl/http_get.h"
#include "client/cc/ctl/output.h"
#include "config/json.h"

namespace fp8kvd::ctl {
namespace {

using config::Tree;

constexpr double kNothing = std::numeric_limits<double>::quiet_NaN();
constexpr size_t kColumns = 50;  // of a row's history

enum class Form : uint8_t { kCount, kRate, kBytesRate, kRatio, kTime };

struct Row {
  const char* series;
  const char* title;
  Form form;
};

constexpr Row kRows[] = {{"pages_used_ratio", "pages used", Form::kRatio},
                         {"seqs", "sequences", Form::kCount},
                         {"queue_items", "items taken, not answered", Form::kCount},
                         {"rows_per_s", "decode rows", Form::kRate},
                         {"launches_per_s", "decode launches", Form::kRate},
                         {"batch_rows_mean", "rows of a launch", Form::kCount},
                         {"call_p50_s", "unary Decode, p50", Form::kTime},
                         {"call_p99_s", "unary Decode, p99", Form::kTime},
                         {"queue_p50_s", "wait for a launch, p50", Form::kTime},
                         {"queue_p99_s", "wait for a launch, p99", Form::kTime},
                         {"kernel_p50_s", "launch until its fence, p50", Form::kTime},
                         {"kernel_p99_s", "launch until its fence, p99", Form::kTime},
                         {"kv_read_bytes_per_s", "KV bytes read", Form::kBytesRate},
                         {"append_tokens_per_s", "appended (token, layer) pairs", Form::kRate},
                         {"received_bytes_per_s", "bytes in", Form::kBytesRate},
                         {"sent_bytes_per_s", "bytes out", Form::kBytesRate},
                         {"calls_per_s", "calls", Form::kRate},
                         {"calls_failed_per_s", "calls failed", Form::kRate}};

std::string ValueText(Form form, double value) {
  if (std::isnan(value)) return "-";
  switch (form) {
    case Form::kCount:
      return Fixed(value, value == std::floor(value) ? 0 : 1);
    case Form::kRate:
      return absl::StrCat(Fixed(value, value < 100 ? 1 : 0), "/s");
    case Form::kBytesRate:
      return absl::StrCat(HumanBytes(value), "/s");
    case Form::kRatio:
      return absl::StrCat(Fixed(100 * value, 1), " %");
    case Form::kTime:
      return value < 1e-3 ? absl::StrCat(Fixed(value * 1e6, 0), " us")
                          : absl::StrCat(Fixed(value * 1e3, 2), " ms");
  }
  return "";
}

double NumberOf(const Tree* tree) {
  double value = kNothing;
  if (tree == nullptr || !absl::SimpleAtod(tree->text, &value)) return kNothing;
  return value;
}

std::string TextOf(const Tree* tree) { return tree == nullptr ? "?" : Printable(tree->text); }

std::string TextAt(const Tree& object, const char* name) { return TextOf(object.Find(name)); }

std::vector<double> Series(const Tree& status, const char* name) {
  std::vector<double> values;
  const Tree* const history = status.Find("history");
  const Tree* const series = history == nullptr ? nullptr : history->Find(name);
  if (series == nullptr) return values;
  for (const Tree& value : series->children) values.push_back(NumberOf(&value));
  return values;
}

// The latest values as bars, `each` samples under one at their largest; empty where there is none.
std::string Bars(const std::vector<double>& values, size_t each) {
  static const char* const kBars[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  double top = 0;
  for (const double value : values) top = std::fmax(top, value);
  std::string bars;
  const size_t shown = std::min(values.size(), kColumns * each);
  for (size_t i = values.size() - shown; i < values.size(); i += each) {
    double largest = kNothing;
    for (size_t j = i; j < std::min(i + each, values.size()); ++j) {
      largest = std::fmax(largest, values[j]);
    }
    if (std::isnan(largest)) {
      bars += " ";
    } else {
      bars += kBars[top == 0 ? 0 : std::min<size_t>(7, static_cast<size_t>(8 * largest / top))];
    }
  }
  return bars;
}

void PrintModels(const Tree& status, std::ostream& out) {
  const Tree* const models = status.Find("models");
  if (models == nullptr) return;
  Table table({"model", "layers", "precision", "window", "pages used", "reserved", "of", "used"});
  for (const Tree& model : models->children) {
    const Tree* const groups = model.Find("groups");
    if (groups == nullptr) continue;
    for (const Tree& group : groups->children) {
      const double share = NumberOf(group.Find("pages_used")) / NumberOf(group.Find("pages_total"));
      const std::string window = TextAt(group, "window");
      table.Add({TextAt(model, "name"), TextAt(group, "layers"), TextAt(group, "precision"),
                 window == "0" ? "all" : window, TextAt(group, "pages_used"),
                 TextAt(group, "pages_reserved"), TextAt(group, "pages_total"),
                 ValueText(Form::kRatio, share)});
    }
  }
  table.Print(out);
  out << '\n';
  for (const Tree& model : models->children) {
    out << TextAt(model, "name") << ": " << TextAt(model, "reason") << '\n';
  }
}

// Nothing where there is only one.
void PrintDevices(const Tree& status, std::ostream& out) {
  const Tree* const devices = status.Find("devices");
  if (devices == nullptr || devices->children.size() < 2) return;
  Table table({"device", "sequences", "items", "launches", "pages used", "of", "used"});
  for (const Tree& device : devices->children) {
    const double share = NumberOf(device.Find("pages_used")) / NumberOf(device.Find("pages_total"));
    table.Add({TextAt(device, "name"), TextAt(device, "seqs"), TextAt(device, "queue_items"),
               TextAt(device, "launches_inflight"), TextAt(device, "pages_used"),
               TextAt(device, "pages_total"), ValueText(Form::kRatio, share)});
  }
  table.Print(out);
  out << '\n';
}

void PrintStatus(const Tree& status, std::ostream& out) {
  const Tree* const device = status.Find("device");
  out << "fp8kvd " << TextAt(status, "version") << ", " << TextAt(status, "state") << ", on "
      << TextOf(device == nullptr ? nullptr : device->Find("kind")) << " ("
      << TextOf(device == nullptr ? nullptr : device->Find("name")) << "), up "
      << TextAt(status, "uptime_s") << " s\n\n";
  const double interval_ms = NumberOf(status.Find("interval_ms"));
  const size_t each = 3;
  const double minutes = interval_ms * static_cast<double>(each * kColumns) / 60e3;
  Table table({"", "now", "largest", absl::StrCat("the last ", Fixed(minutes, 0), " minutes")});
  for (const Row& row : kRows) {
    const std::vector<double> values = Series(status, row.series);
    double largest = kNothing;
    for (const double value : values) largest = std::fmax(largest, value);
    table.Add({row.title, ValueText(row.form, values.empty() ? kNothing : values.back()),
               ValueText(row.form, largest), Bars(values, each)});
  }
  table.Print(out);
  out << '\n';
  PrintDevices(status, out);
  PrintModels(status, out);
}

absl::Status RunTop(const Invocation& invocation) {
  const std::string address = invocation.Text("http", "127.0.0.1:50052");
  const absl::StatusOr<int64_t> times = invocation.Count("times", 0, 1, 1'000'000'000);
  if (!times.ok()) return times.status();
  const bool is_once = invocation.json() || *times == 1;
  for (int64_t i = 0; *times == 0 || i < *times; ++i) {
    const absl::StatusOr<std::string> text = HttpGet(address, "/statusz.json", 5000);
    if (!text.ok()) return text.status();
    if (invocation.json()) {
      invocation.out() << *text << '\n';
      return absl::OkStatus();
    }
    const absl::StatusOr<Tree> status = config::ParseJson(*text);
    if (!status.ok()) return status.status();
    if (!is_once) invocation.out() << "\x1B[H\x1B[2J";  // home, clear
    PrintStatus(*status, invocation.out());
    invocation.out().flush();
    if (i + 1 != *times) std::this_thread::sleep_for(std::chrono::seconds(2));
  }
  return absl::OkStatus();
}

}  // namespace

const Command& TopCommand() {
  static const Command command = {
      "top",
      "occupancy, batches, latencies of the last minutes, as the status page has them",
      "",
      "fp8kvctl top --http=127.0.0.1:50052",
      {{"http", "HOST:PORT", "the daemon's http_address; default 127.0.0.1:50052"},
       {"times", "N", "look so often and end; default: every 2 s until interrupted"}},
      RunTop,
      /*has_daemon=*/false};
  return command;
}

}  // namespace fp8kvd::ctl
