// tests/sim/world.h: one run of the whole engine on fake time and a fake device: random clients
// that create, append, decode, fork, truncate, free, retry, cancel, come late and die; full pools
// and queues, leases that end, device faults, drain. Every answer is judged by a model of its
// sequence. Clients are of one to three tenants with parts of the pools, and try each other's
// handles. In half of the worlds callers take the engine's turns (server/engine/turn.h), in a third
// there are two devices, and batches with sequences of both.
//
// A seed decides everything: the same seed is the same run. Threads: one; the clients' calls and
// the engine's turns are steps of one loop.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/sim/random.h"
#include "tests/sim/seq_model.h"
#include "tests/support/engine_calls.h"
#include "tests/support/fake_backend.h"
#include "tests/support/spread_calls.h"

namespace fp8kvd::testing {

class World {
 public:
  World(uint64_t seed, bool is_tracing);
  ~World();

  // The first thing that went wrong, or "".
  std::string Run();
  // How often what happened: names of outcomes, so that a run of many seeds can show what it
  // covered.
  const std::map<std::string, int64_t>& tally() const { return tally_; }

 private:
  // A decode as its client remembers it, to send it again.
  struct SentDecode {
    int32_t model = 0;
    int32_t layer = 0;
    kernels::OutType out_type = kernels::OutType::kBf16;
    std::vector<ItemSpec> items;
  };
  // A call in flight, with how to judge it.
  struct Flight {
    CallFacts facts;
    std::unique_ptr<SpreadDecodeCall> decode;  // with `sent` and `seqs` of its items
    std::unique_ptr<AppendCall> append;
    std::unique_ptr<SpreadControlCall> control;
    std::vector<SeqModel*> seqs;  // that it names
    SentDecode sent;
    std::string what;

    // Who sends it, when, and until when it may wait.
    void Sign(cache::TenantId tenant, engine::TimeUs arrived, engine::TimeUs deadline) const;
    absl::Status Submit() const;
    void Cancel() const;
    absl::Status status() const;  // once done
    int32_t retry_after_ms() const;
    bool done() const { return times_done() > 0; }
    int32_t times_done() const;
  };
  struct Client {
    std::list<SeqModel> seqs;  // gone ones too: stale handles are tried
    std::deque<Flight> flights;
    SentDecode answered;  // the latest decode that has its answer
    bool is_alive = true;
    cache::TenantId tenant{0};
  };

  void Start();
  void Loop();
  void End();
  void CheckEngines();
  void CheckEngine(const engine::EngineStats& stats);
  void CheckAllBack();
  bool is_ok() const { return complaint_.empty(); }
  void Complain(const std::string& what);
  void Trace(const std::string& what) const;
  int64_t now() const { return clock_.NowUs(); }

  // One step of the loop each.
  void Turn();
  bool StepAll();
  void ActAs(Client& client);
  void CancelSomething();
  void Spy(Client& client);
  Client NewClient();
  void Kill(Client& client);

  // What a client may do.
  void Create(Client& client);
  void Decode(Client& client, SeqModel& seq);
  void Retry(Client& client);
  void Append(Client& client, SeqModel& seq);
  void Skip(Client& client, SeqModel& seq);
  void Fork(Client& client, SeqModel& seq);
  void Truncate(Client& client, SeqModel& seq);
  void FreeOrRenew(Client& client, SeqModel& seq);
  SeqModel* PickSeq(Client& client);
  engine::Engine& EngineOf(const SeqModel& seq) const {
    return fleet_->Of(fleet_->DeviceOf(seq.handle()));
  }
  ItemSpec MakeItem(SeqModel& seq, int32_t layer, bool is_append);
  void Send(Client& client, SentDecode sent, std::string what);
  void Submit(Client& client, Flight flight);

  // Answers.
  void JudgeDone();
  void JudgeSpies();
  bool EndsAll(const absl::Status& status);
  void Judge(Client& client, Flight& flight);
  void JudgeDecode(Flight& flight);
  void JudgeControl(Client& client, Flight& flight);
  void Count(const absl::Status& status, const std::string& what);

  const uint64_t seed_;
  const bool is_tracing_;
  Random random_;
  const bool callers_take_turns_;  // as beside a GPU: an answer may come within Submit
  const int64_t devices_;
  ManualClock clock_;
  std::deque<FakeBackend> backends_;
  std::vector<std::unique_ptr<engine::Engine>> engines_;
  std::unique_ptr<engine::Fleet> fleet_;
  std::list<Client> clients_;
  std::list<SpreadControlCall> spies_;  // calls with a handle of another tenant
  int64_t tenants_ = 1;
  std::map<std::string, int64_t> tally_;
  std::string complaint_;
  uint64_t next_token_ = 1;
  int64_t fault_at_ = -1;  // step of the loop
  bool has_fault_ = false;
  bool is_draining_ = false;
};

}  // namespace fp8kvd::testing
