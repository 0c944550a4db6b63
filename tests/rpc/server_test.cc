// One call at a time, and the life of the server: health, reflection, cancel, drain, ports,
// threads.
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "google/protobuf/descriptor.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "grpcpp/generic/generic_stub.h"
#include "gtest/gtest.h"

#include "tests/rpc/rig.h"

namespace fp8kvd::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Server, CreatesAppendsDecodesAndFrees) {
  ServerRig rig;
  const v1::Handle handle = rig.Create(1)[0];
  const std::vector<uint64_t> prompt = Ids(100, 1000);
  v1::AppendResponse appended;
  for (int32_t layer : {0, 1}) {
    const grpc::Status status = rig.Append({rig.Chunk(handle, 0, prompt, layer)}, &appended);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ASSERT_EQ(appended.committed_size(), 1);
    EXPECT_EQ(appended.committed(0).seq_len(), 100U);
    EXPECT_EQ(appended.committed(0).layer(), static_cast<uint32_t>(layer));
  }
  std::vector<uint64_t> history = prompt;
  history.push_back(5);
  v1::DecodeResponse decoded;
  ASSERT_TRUE(rig.Decode(rig.Step({handle}, 100, {5}), &decoded).ok());
  EXPECT_EQ(decoded.item_errors_size(), 0);
  EXPECT_TRUE(rig.IsAnswer(decoded, 0, 500005, history));
  EXPECT_GE(decoded.timings().batch_items(), 1U);
  EXPECT_GT(rig.PagesUsed(), 0);

  grpc::ClientContext context;
  v1::FreeSequencesRequest free;
  *free.add_handles() = handle;
  v1::FreeSequencesResponse freed;
  ASSERT_TRUE(rig.stub->FreeSequences(&context, free, &freed).ok());
  EXPECT_EQ(freed.item_errors_size(), 0);
  EXPECT_TRUE(Eventually([&] { return rig.PagesUsed() == 0; }));
}

TEST(Server, EveryOtherRpcAnswers) {
  ServerRig rig;
  const v1::Handle handle = rig.Create(1)[0];
  ASSERT_TRUE(
      rig.Append({rig.Chunk(handle, 0, Ids(10, 1), 0), rig.Chunk(handle, 0, Ids(10, 1), 1)}).ok());
  const auto context = [] { return std::make_unique<grpc::ClientContext>(); };
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(rig.stub->GetServerInfo(context().get(), {}, &info).ok());
  EXPECT_EQ(info.incarnation(), 7U);
  EXPECT_GT(info.models(0).groups(0).pages_used(), 0U);
  EXPECT_FALSE(info.draining());

  v1::ForkSequencesRequest fork;
  *fork.mutable_parent() = handle;
  v1::ForkSequencesResponse forked;
  ASSERT_TRUE(rig.stub->ForkSequences(context().get(), fork, &forked).ok());
  ASSERT_EQ(forked.handles_size(), 1);

  v1::TruncateSequencesRequest truncate;
  *truncate.add_handles() = forked.handles(0);
  truncate.add_seq_lens(4);
  v1::TruncateSequencesResponse truncated;
  ASSERT_TRUE(rig.stub->TruncateSequences(context().get(), truncate, &truncated).ok());
  EXPECT_EQ(truncated.item_errors_size(), 0);

  v1::RenewSequencesRequest renew;
  *renew.add_handles() = handle;
  renew.add_handles()->set_seq_id(999999);
  v1::RenewSequencesResponse renewed;
  ASSERT_TRUE(rig.stub->RenewSequences(context().get(), renew, &renewed).ok());
  ASSERT_EQ(renewed.item_errors_size(), 1);
  EXPECT_EQ(renewed.item_errors(0).index(), 1U);
  EXPECT_EQ(renewed.item_errors(0).error().code(), grpc::StatusCode::NOT_FOUND);

  v1::StatSequencesRequest stat;
  *stat.add_handles() = forked.handles(0);
  v1::StatSequencesResponse stats;
  ASSERT_TRUE(rig.stub->StatSequences(context().get(), stat, &stats).ok());
  ASSERT_EQ(stats.sequences_size(), 1);
  EXPECT_THAT(stats.sequences(0).seq_lens(), ::testing::ElementsAre(4, 4));
  EXPECT_EQ(stats.sequences(0).model(), "m");

  v1::ListSequencesRequest list;
  list.set_page_size(1);
  v1::ListSequencesResponse page;
  ASSERT_TRUE(rig.stub->ListSequences(context().get(), list, &page).ok());
  ASSERT_EQ(page.sequences_size(), 1);
  list.set_page_token(page.next_page_token());
  v1::ListSequencesResponse second;
  ASSERT_TRUE(rig.stub->ListSequences(context().get(), list, &second).ok());
  ASSERT_EQ(second.sequences_size(), 1);
  EXPECT_NE(second.sequences(0).handle().seq_id(), page.sequences(0).handle().seq_id());
}

TEST(Server, PlansAndMeasuresWithoutASequence) {
  ServerRig rig;
  const auto context = [] { return std::make_unique<grpc::ClientContext>(); };
  v1::PlanPrecisionRequest plan;
  plan.set_model("m");
  plan.set_batch(64);
  plan.set_tokens(8192);
  plan.set_other_bytes(1000);
  plan.set_allow_fp8_kv(true);
  v1::PlanPrecisionResponse planned;
  ASSERT_TRUE(rig.stub->PlanPrecision(context().get(), plan, &planned).ok());
  EXPECT_EQ(planned.precision(), v1::PRECISION_FP8_KV);
  EXPECT_GT(planned.cache_share(), 0.9);
  EXPECT_EQ(planned.r_source(), "bytes");
  EXPECT_DOUBLE_EQ(planned.kv_bytes(), 64.0 * 8192 * 2 * 2 * 2 * 128 * 2);
  plan.set_allow_fp8_kv(false);
  ASSERT_TRUE(rig.stub->PlanPrecision(context().get(), plan, &planned).ok());
  EXPECT_EQ(planned.precision(), v1::PRECISION_BF16);

  v1::MeasureKvErrorRequest measure;
  measure.set_kv_heads(2);
  measure.set_head_dim(64);
  std::vector<uint16_t> rows(5 * 2 * 64);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<uint16_t>(0x3F80 + i % 128);
  measure.set_k(rows.data(), rows.size() * 2);
  measure.set_v(rows.data(), rows.size() * 2);
  v1::MeasureKvErrorResponse measured;
  ASSERT_TRUE(rig.stub->MeasureKvError(context().get(), measure, &measured).ok());
  EXPECT_EQ(measured.tokens(), 5U);
  EXPECT_GT(measured.k_error(), 0.0);
  EXPECT_LT(measured.k_error(), 0.08);
  EXPECT_GE(measured.k_error_worst_row(), measured.k_error());

  v1::OpenSharedMemoryResponse shared;
  const grpc::Status status = rig.stub->OpenSharedMemory(context().get(), {}, &shared);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST(Server, SharedMemoryIsForItsOwnHost) {
  ServerRigOptions options;
  std::string folder = (std::filesystem::temp_directory_path() / "fp8kvd_rpc_XXXXXX").string();
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  options.shared_memory.shm_socket = folder + "/socket";
  {
    ServerRig rig(options);
    v1::OpenSharedMemoryRequest request;
    v1::OpenSharedMemoryResponse response;
    for (const char* host_id : {"this host", "another host"}) {
      grpc::ClientContext context;
      request.set_host_id(host_id);
      const grpc::Status status = rig.stub->OpenSharedMemory(&context, request, &response);
      EXPECT_EQ(status.error_code(), std::string(host_id) == "this host"
                                         ? grpc::StatusCode::OK
                                         : grpc::StatusCode::FAILED_PRECONDITION);
    }
  }
  std::filesystem::remove_all(folder);
}

TEST(Server, CallsAreCounted) {
  ServerRig rig;
  rig.Create(1);
  v1::DecodeResponse ignored;
  EXPECT_FALSE(rig.Decode({}, &ignored).ok());
  const std::string text = rig.metrics.Scrape();
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_calls_total{method="CreateSequences",code="OK"} 1)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_calls_total{method="Decode",code="INVALID_ARGUMENT"} 1)"));
  EXPECT_THAT(text,
              HasSubstr(R"(fp8kvd_call_seconds_count{method="Decode",code="INVALID_ARGUMENT"} 1)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_call_received_bytes_total{method="CreateSequences"})"));
}

TEST(Health, ServesUntilTheDrain) {
  ServerRig rig;
  auto health = grpc::health::v1::Health::NewStub(rig.Channel());
  grpc::health::v1::HealthCheckRequest request;
  grpc::health::v1::HealthCheckResponse response;
  for (const char* service : {"", "fp8kvd.v1.DecodeAttention"}) {
    grpc::ClientContext context;
    request.set_service(service);
    ASSERT_TRUE(health->Check(&context, request, &response).ok());
    EXPECT_EQ(response.status(), grpc::health::v1::HealthCheckResponse::SERVING);
  }
  grpc::ClientContext unknown;
  request.set_service("other");
  EXPECT_EQ(health->Check(&unknown, request, &response).error_code(), grpc::StatusCode::NOT_FOUND);

  grpc::ClientContext watching;
  request.set_service("");
  auto watch = health->Watch(&watching, request);
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), grpc::health::v1::HealthCheckResponse::SERVING);
  std::thread stopper([&] { rig.Stop(); });
  EXPECT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), grpc::health::v1::HealthCheckResponse::NOT_SERVING);
  EXPECT_FALSE(watch->Read(&response));
  EXPECT_EQ(watch->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  stopper.join();
}

TEST(Reflection, ListsServicesAndGivesTheirFiles) {
  using grpc::reflection::v1alpha::ServerReflectionRequest;
  using grpc::reflection::v1alpha::ServerReflectionResponse;
  ServerRig rig;
  auto stub = grpc::reflection::v1alpha::ServerReflection::NewStub(rig.Channel());
  grpc::ClientContext context;
  auto stream = stub->ServerReflectionInfo(&context);
  ServerReflectionRequest request;
  ServerReflectionResponse response;
  request.set_list_services("*");
  ASSERT_TRUE(stream->Write(request) && stream->Read(&response));
  ASSERT_EQ(response.list_services_response().service_size(), 3);
  request.set_file_containing_symbol(response.list_services_response().service(0).name());
  ASSERT_TRUE(stream->Write(request) && stream->Read(&response));
  // What it imports, then the file itself.
  ASSERT_EQ(response.file_descriptor_response().file_descriptor_proto_size(), 2);
  google::protobuf::FileDescriptorProto file;
  ASSERT_TRUE(file.ParseFromString(response.file_descriptor_response().file_descriptor_proto(0)));
  EXPECT_EQ(file.name(), "fp8kvd/v1/accuracy.proto");
  ASSERT_TRUE(file.ParseFromString(response.file_descriptor_response().file_descriptor_proto(1)));
  EXPECT_EQ(file.package(), "fp8kvd.v1");
  EXPECT_EQ(file.service(0).method_size(), 14);
  request.set_file_containing_symbol("no.such.Thing");
  ASSERT_TRUE(stream->Write(request) && stream->Read(&response));
  EXPECT_EQ(response.error_response().error_code(), grpc::StatusCode::NOT_FOUND);
  ASSERT_TRUE(stream->WritesDone());
  EXPECT_TRUE(stream->Finish().ok());
}

// Known fault: a second daemon on the same port starts silently and takes half of the traffic.
TEST(Server, ASecondOneOnTheSamePortDoesNotStart) {
  ServerRig rig;
  config::ServerOptions options;
  options.listen_address = "127.0.0.1:" + std::to_string(rig.server->port());
  engine::SteadyClock clock;
  ops::Metrics metrics;
  const auto second =
      rpc::Server::Start(options, &rig.catalog, rig.fleet.get(), &clock, rpc::Planner{}, &metrics);
  ASSERT_TRUE(absl::IsUnavailable(second.status())) << second.status();
  EXPECT_THAT(std::string(second.status().message()),
              HasSubstr("cannot listen on " + options.listen_address));
}

// Known fault: a cancelled unary call is never finished, and shutdown hangs.
TEST(Server, ACancelledUnaryCallIsFinishedAndShutdownReturns) {
  ServerRig rig;
  const std::vector<v1::Handle> handles = rig.Create(16);
  rig.backend.Close();
  std::vector<std::thread> callers;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  for (int i = 0; i < 16; ++i) contexts.push_back(std::make_unique<grpc::ClientContext>());
  for (int i = 0; i < 16; ++i) {
    callers.emplace_back([&, i] {
      v1::DecodeResponse response;
      const grpc::Status status =
          rig.stub->Decode(contexts[i].get(), rig.Step({handles[i]}, 0, {uint64_t(i)}), &response);
      EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
    });
  }
  EXPECT_TRUE(Eventually([&] { return rig.server->calls_open() >= 16; }));
  for (const auto& context : contexts) context->TryCancel();
  for (std::thread& caller : callers) caller.join();
  rig.backend.Open();
  EXPECT_TRUE(Eventually([&] { return rig.server->calls_open() == 0; }));
  rig.Stop();
}

TEST(Server, ADrainAnswersWhatWasAdmittedAndRefusesTheRest) {
  ServerRig rig;
  const v1::Handle handle = rig.Create(1)[0];
  rig.backend.Close();
  v1::DecodeResponse admitted;
  grpc::Status status;
  std::thread caller([&] { status = rig.Decode(rig.Step({handle}, 0, {1}), &admitted); });
  EXPECT_TRUE(Eventually([&] { return rig.engine->stats().launches_inflight > 0; }));
  rig.engine->Drain();
  rig.server->Drain();
  v1::DecodeResponse refused;
  const grpc::Status late = rig.Decode(rig.Step({handle}, 1, {2}), &refused);
  EXPECT_EQ(late.error_code(), grpc::StatusCode::UNAVAILABLE) << late.error_message();
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(rig.stub->GetServerInfo(&context, {}, &info).ok());
  EXPECT_TRUE(info.draining());
  rig.backend.Open();
  caller.join();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(rig.IsAnswer(admitted, 0, 500001, {1}));
  rig.Stop();
  EXPECT_TRUE(rig.engine_status.ok());
}

TEST(Server, ADeviceFaultFailsEveryCallInFlightAndRefusesLaterOnes) {
  ServerRig rig;
  const std::vector<v1::Handle> handles = rig.Create(3);
  rig.backend.Close();
  v1::DecodeResponse ignored;
  grpc::Status launched;
  std::thread unary([&] { launched = rig.Decode(rig.Step({handles[0]}, 0, {1}), &ignored); });
  EXPECT_TRUE(Eventually([&] { return rig.engine->stats().launches_inflight > 0; }));
  grpc::ClientContext context;
  const auto stream = rig.stub->DecodeStream(&context);
  EXPECT_TRUE(stream->Write(rig.Step({handles[1]}, 0, {2})));
  EXPECT_TRUE(Eventually([&] { return rig.engine->stats().queue_items == 2; }));
  rig.backend.Break();
  unary.join();
  EXPECT_EQ(launched.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(launched.error_message(), HasSubstr("reconnect"));
  EXPECT_THAT(launched.error_message(), Not(HasSubstr("fence")));  // what broke is for the log
  v1::DecodeResponse reply;
  ASSERT_TRUE(stream->Read(&reply));
  const int code = reply.has_error() ? reply.error().code() : reply.item_errors(0).error().code();
  EXPECT_EQ(code, grpc::StatusCode::UNAVAILABLE);
  for (const grpc::Status& late : {rig.Decode(rig.Step({handles[2]}, 0, {3}), &ignored),
                                   rig.Append({rig.Chunk(handles[2], 0, Ids(3, 1), 0)})}) {
    EXPECT_EQ(late.error_code(), grpc::StatusCode::UNAVAILABLE) << late.error_message();
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  rig.Stop();
  EXPECT_FALSE(rig.engine_status.ok());
}

TEST(Server, CallsBeyondTheLimitAreRefusedWithADelay) {
  ServerRigOptions options;
  options.server.streams_max = 2;
  ServerRig rig(options);
  grpc::ClientContext contexts[2];
  const auto one = rig.stub->DecodeStream(&contexts[0]);
  const auto two = rig.stub->DecodeStream(&contexts[1]);
  ASSERT_TRUE(Eventually([&] { return rig.server->calls_open() == 2; }));
  grpc::ClientContext third;
  v1::GetServerInfoResponse info;
  const grpc::Status status = rig.stub->GetServerInfo(&third, {}, &info);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("this server takes 2"));
  EXPECT_EQ(third.GetServerTrailingMetadata().count("grpc-retry-pushback-ms"), 1U);
  EXPECT_FALSE(status.error_details().empty());
  // Full of streams is healthy: who asks must not take it for dead.
  grpc::ClientContext asks;
  grpc::health::v1::HealthCheckResponse health;
  EXPECT_TRUE(grpc::health::v1::Health::NewStub(rig.Channel())->Check(&asks, {}, &health).ok());
  one->WritesDone();
  two->WritesDone();
  EXPECT_TRUE(one->Finish().ok());
  EXPECT_TRUE(two->Finish().ok());
}

int Threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<int>(std::distance(begin(tasks), end(tasks)));
}

TEST(Server, TheNumberOfThreadsDoesNotGrowWithStreams) {
  ServerRig rig;
  const v1::Handle handle = rig.Create(1)[0];
  // The client lives in this process too: one stream starts all that it needs.
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeResponse>>>
      streams;
  const auto open = [&] {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    streams.push_back(rig.stub->DecodeStream(contexts.back().get()));
  };
  uint64_t pos = 0;
  const auto use = [&](size_t i) {
    v1::DecodeResponse response;
    ASSERT_TRUE(streams[i]->Write(rig.Step({handle}, pos, {pos})));
    ASSERT_TRUE(streams[i]->Read(&response));
    ASSERT_EQ(response.item_errors_size(), 0);
    ++pos;
  };
  open();
  use(0);
  const int with_one = Threads();
  while (streams.size() < 1000) {
    open();
    if (streams.size() % 50 == 0) use(streams.size() - 1);
  }
  EXPECT_TRUE(Eventually([&] { return rig.server->calls_open() == 1000; }));
  // gRPC's own timer threads may come and go by a few, whatever the number of streams.
  EXPECT_LE(Threads(), with_one + 4);
  for (auto& stream : streams) stream->WritesDone();
  for (auto& stream : streams) EXPECT_TRUE(stream->Finish().ok());
}

}  // namespace
}  // namespace fp8kvd::testing
