// tests/client/fake_server.h: a DecodeAttention service inside the test, with faults on order. It
// keeps the K of one sequence a layer, answers Decode with q as out, and writes down what it heard.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"

#include "fp8kvd/v1/kv.grpc.pb.h"

namespace fp8kvd::client {

struct Fault {
  grpc::Status status;
  std::string pushback_ms = {};  // empty: none sent
};

class FakeServer final : public v1::DecodeAttention::Service {
  template <typename F>
  auto Locked(F f) {
    const std::lock_guard<std::mutex> lock(mu_);
    return f();
  }

 public:
  FakeServer() { Start("127.0.0.1:0"); }
  ~FakeServer() override { Stop(); }

  std::string target() const { return "127.0.0.1:" + std::to_string(port_); }
  void Stop() {
    if (server_ == nullptr) return;
    server_->Shutdown(std::chrono::system_clock::now());
    server_.reset();
  }

  // Set before the calls that they shape.
  uint64_t ttl_ms = 60'000;
  v1::LayerGroupInfo group = [] {
    v1::LayerGroupInfo fp8_kv;
    fp8_kv.set_precision(v1::PRECISION_FP8_KV);
    return fp8_kv;
  }();
  std::deque<Fault> faults;            // one for each of the next unary calls
  uint64_t tokens_until_break = ~0U;   // an Append stream commits so many tokens, then breaks, once
  int append_answers_lost = 0;         // so many Appends commit, and end as if the answer was lost
  int messages_until_break = 1 << 30;  // a decode stream reads so many messages, then breaks, once
  bool replies_backwards = false;      // a decode stream gathers four messages, answers in reverse
  bool decode_stream_refuses = false;

  // What was heard.
  int calls() {
    return Locked([&] { return calls_; });
  }
  int streams() {
    return Locked([&] { return streams_; });
  }
  std::vector<uint64_t> freed() {
    return Locked([&] { return freed_; });
  }
  std::vector<uint64_t> stream_ids() {
    return Locked([&] { return stream_ids_; });
  }
  std::map<uint32_t, std::string> k() {
    return Locked([&] { return k_; });
  }
  std::vector<v1::AppendRequest> chunks() {
    return Locked([&] { return chunks_; });
  }
  v1::DecodeRequest last_decode() {
    return Locked([&] { return last_decode_; });
  }

  // Waits until `count` renewals of a sequence came; false after 10 s.
  bool WaitForRenewals(uint64_t seq_id, int count) {
    std::unique_lock<std::mutex> lock(mu_);
    return heard_.wait_for(lock, std::chrono::seconds(10),
                           [&] { return renewals_[seq_id] >= count; });
  }
  int renewals(uint64_t seq_id) {
    return Locked([&] { return renewals_[seq_id]; });
  }

  grpc::Status GetServerInfo(grpc::ServerContext* context, const v1::GetServerInfoRequest*,
                             v1::GetServerInfoResponse* response) override {
    if (const grpc::Status s = Begin(context); !s.ok()) return s;
    response->set_version("fake");
    response->set_shm_socket("/run/fake.sock");
    response->set_host_id("a-boot-id");
    v1::ModelInfo* model = response->add_models();
    model->set_name("m");
    model->set_kv_heads(2);
    *model->add_groups() = group;
    response->mutable_limits()->set_items_max(7);
    return {};
  }

  grpc::Status CreateSequences(grpc::ServerContext* context,
                               const v1::CreateSequencesRequest* request,
                               v1::CreateSequencesResponse* response) override {
    if (const grpc::Status s = Begin(context); !s.ok()) return s;
    const std::lock_guard<std::mutex> lock(mu_);
    for (uint32_t i = 0; i < request->count(); ++i) {
      response->add_handles()->set_seq_id(++last_seq_id_);
    }
    response->set_ttl_ms(ttl_ms);
    return {};
  }

  grpc::Status ForkSequences(grpc::ServerContext*, const v1::ForkSequencesRequest* request,
                             v1::ForkSequencesResponse* response) override {
    const std::lock_guard<std::mutex> lock(mu_);
    for (uint32_t i = 0; i < request->count(); ++i) {
      response->add_handles()->set_seq_id(++last_seq_id_);
    }
    return {};
  }

  grpc::Status FreeSequences(grpc::ServerContext* context, const v1::FreeSequencesRequest* request,
                             v1::FreeSequencesResponse*) override {
    if (const grpc::Status s = Begin(context); !s.ok()) return s;
    if (request->handles_size() > 1024) return {grpc::StatusCode::INVALID_ARGUMENT, "handles"};
    const std::lock_guard<std::mutex> lock(mu_);
    for (const v1::Handle& handle : request->handles()) freed_.push_back(handle.seq_id());
    return {};
  }

  grpc::Status RenewSequences(grpc::ServerContext*, const v1::RenewSequencesRequest* request,
                              v1::RenewSequencesResponse* response) override {
    std::unique_lock<std::mutex> lock(mu_);
    const int calls = ++renew_calls_;
    heard_.notify_all();
    if (hangs_first_renewal && calls == 1) {
      is_tried_again_ =
          heard_.wait_for(lock, std::chrono::seconds(4), [&] { return renew_calls_ > 1; });
    }
    for (int i = 0; i < request->handles_size(); ++i) {
      const uint64_t seq_id = request->handles(i).seq_id();
      ++renewals_[seq_id];
      if (seq_id != gone_seq_id) continue;
      v1::ItemError* error = response->add_item_errors();
      error->set_index(static_cast<uint32_t>(i));
      error->mutable_error()->set_code(grpc::StatusCode::NOT_FOUND);
    }
    heard_.notify_all();
    return {};
  }
  uint64_t gone_seq_id = 0;  // renewals of it are answered with NOT_FOUND
  // The first renewal of all is answered when another comes, or after 4 s.
  bool hangs_first_renewal = false;
  bool is_tried_again() {
    return Locked([&] { return is_tried_again_; });
  }

  grpc::Status StatSequences(grpc::ServerContext*, const v1::StatSequencesRequest* request,
                             v1::StatSequencesResponse* response) override {
    const std::lock_guard<std::mutex> lock(mu_);
    v1::SequenceInfo* info = response->add_sequences();
    *info->mutable_handle() = request->handles(0);
    info->set_ttl_ms(ttl_ms);
    for (uint32_t layer = 0; layer < 4; ++layer) info->add_seq_lens(k_[layer].size() / kTokenBytes);
    return {};
  }

  grpc::Status ListSequences(grpc::ServerContext* context, const v1::ListSequencesRequest* request,
                             v1::ListSequencesResponse* response) override {
    if (const grpc::Status s = Begin(context); !s.ok()) return s;
    const uint64_t page = request->page_token().empty() ? 0 : std::stoull(request->page_token());
    for (uint64_t i = 0; i < 3; ++i) {
      response->add_sequences()->mutable_handle()->set_seq_id(page * 3 + i);
    }
    if (page < 2) response->set_next_page_token(std::to_string(page + 1));
    return {};
  }

  grpc::Status Append(grpc::ServerContext* context, grpc::ServerReader<v1::AppendRequest>* reader,
                      v1::AppendResponse*) override {
    if (const grpc::Status s = Begin(context); !s.ok()) return s;
    v1::AppendRequest chunk;
    while (reader->Read(&chunk)) {
      const std::lock_guard<std::mutex> lock(mu_);
      chunks_.push_back(chunk);
      std::string& k = k_[chunk.layer()];
      const uint64_t len = k.size() / kTokenBytes;
      if (chunk.pos() != len)
        return {grpc::StatusCode::OUT_OF_RANGE, "committed " + std::to_string(len)};
      const uint64_t n = std::min<uint64_t>(chunk.n(), tokens_until_break);
      k += chunk.k().substr(0, n * kTokenBytes);
      if (n < chunk.n()) {
        tokens_until_break = ~0U;
        return {grpc::StatusCode::UNAVAILABLE, "broken on order"};
      }
      tokens_until_break -= n;
    }
    if (append_answers_lost-- > 0) return {grpc::StatusCode::UNAVAILABLE, "lost on order"};
    return {};
  }

  grpc::Status Decode(grpc::ServerContext* context, const v1::DecodeRequest* request,
                      v1::DecodeResponse* response) override {
    if (const grpc::Status s = Begin(context); !s.ok()) return s;
    Answer(*request, response);
    return {};
  }

  grpc::Status DecodeStream(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::DecodeResponse, v1::DecodeRequest>* stream) override {
    Locked([&] { return ++streams_; });
    if (decode_stream_refuses) return {grpc::StatusCode::UNAVAILABLE, "refused on order"};
    std::vector<v1::DecodeRequest> gathered;
    v1::DecodeRequest request;
    while (stream->Read(&request)) {
      gathered.push_back(request);
      Locked([&] {
        stream_ids_.push_back(request.request_id());
        return 0;
      });
      if (--messages_until_break == 0) {
        messages_until_break = 1 << 30;
        return {grpc::StatusCode::UNAVAILABLE, "broken on order"};
      }
      if (gathered.size() < (replies_backwards ? 4U : 1U)) continue;
      for (; !gathered.empty(); gathered.pop_back()) {
        v1::DecodeResponse response;
        Answer(gathered.back(), &response);
        stream->Write(response);
      }
    }
    return {};
  }

  static constexpr size_t kTokenBytes = 8;  // of k: 2 KV heads x head_dim 2

 private:
  void Start(const std::string& address) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }

  // Counts the call and takes the next fault.
  grpc::Status Begin(grpc::ServerContext* context) {
    const std::lock_guard<std::mutex> lock(mu_);
    ++calls_;
    if (faults.empty()) return {};
    const Fault fault = faults.front();
    faults.pop_front();
    if (!fault.pushback_ms.empty()) {
      context->AddTrailingMetadata("grpc-retry-pushback-ms", fault.pushback_ms);
    }
    return fault.status;
  }

  void Answer(const v1::DecodeRequest& request, v1::DecodeResponse* response) {
    const std::lock_guard<std::mutex> lock(mu_);
    last_decode_ = request;
    response->set_request_id(request.request_id());
    response->set_out(request.q());
    if (request.want_lse()) response->set_lse(std::string("\0\0\200\77", 4));  // 1.0
    response->mutable_timings()->set_batch_items(3);
    if (request.layer() == 3) {  // a layer whose second item fails
      v1::ItemError* error = response->add_item_errors();
      error->set_index(1);
      error->mutable_error()->set_code(grpc::StatusCode::OUT_OF_RANGE);
      error->mutable_error()->set_message("committed length is 5");
    }
  }

  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
  std::mutex mu_;
  std::condition_variable heard_;
  int calls_ = 0;
  int streams_ = 0;
  uint64_t last_seq_id_ = 0;
  std::vector<uint64_t> freed_;
  std::vector<uint64_t> stream_ids_;
  std::map<uint64_t, int> renewals_;
  int renew_calls_ = 0;
  bool is_tried_again_ = false;
  std::map<uint32_t, std::string> k_;  // by layer
  std::vector<v1::AppendRequest> chunks_;
  v1::DecodeRequest last_decode_;
};

}  // namespace fp8kvd::client
